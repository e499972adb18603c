// Any bytes are either an array that lies inside them, or a FileError.
#include <cstdlib>

#include "files/error.h"
#include "files/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crisp::files;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const TensorView view = parse_npy(bytes, "fuzz");
    const auto needed = tensor_bytes(view.shape, view.type);
    if (!needed || static_cast<size_t>(*needed) != view.data.size()) std::abort();
    if (view.data.data() < bytes.data() ||
        view.data.data() + view.data.size() != bytes.data() + size) {
      std::abort();
    }
  } catch (const FileError&) {
  }
  return 0;
}
