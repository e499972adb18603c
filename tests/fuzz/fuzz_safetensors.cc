// Any bytes are either a file whose every tensor lies inside them, or a FileError.
#include <cstdlib>

#include "files/error.h"
#include "files/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crisp::files;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const Safetensors contents = parse_safetensors(bytes, "fuzz");
    size_t total = 0;
    for (const auto& [name, view] : contents.tensors) {
      const auto needed = tensor_bytes(view.shape, view.type);
      if (!needed || static_cast<size_t>(*needed) != view.data.size()) std::abort();
      if (view.data.data() < bytes.data() ||
          view.data.data() + view.data.size() > bytes.data() + size) {
        std::abort();
      }
      total += view.data.size();
    }
    if (total > size) std::abort();  // tensors overlap
  } catch (const FileError&) {
  }
  return 0;
}
