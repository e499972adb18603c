// safetensors.h - reads and writes `.safetensors`: 8 bytes little-endian header length, a JSON
// object, raw tensors. The reader trusts nothing in the file: every size is checked for overflow
// and against the file, names must be unique, and tensors must cover the data exactly, without
// overlap or hole (as the format demands).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/atomic_file.h"
#include "files/mapped_file.h"

namespace crisp::files {

enum class ElementType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64
};
int64_t element_bytes(ElementType type);
const char* name(ElementType type);  // as in the file, e.g. "BF16"
// Bytes of a tensor of this shape, or nothing if the product leaves int64.
std::optional<int64_t> tensor_bytes(std::span<const int64_t> shape, ElementType type);

// One tensor: row-major, borrowed from the file's bytes, any alignment.
struct TensorView {
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;  // every size >= 0
  std::span<const std::byte> data;
};

struct Safetensors {
  std::map<std::string, TensorView, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;  // `__metadata__`
};

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

// `file` names the source in errors. The result borrows `bytes`. Throws FileError.
Safetensors parse_safetensors(std::span<const std::byte> bytes, std::string_view file);

// A mapped file and the tensors in it.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return file_.path(); }
  const Safetensors& contents() const { return contents_; }
  // Throws FileError naming the tensors that are there.
  const TensorView& tensor(std::string_view name) const;
  // The mapping alone; views taken before stay valid with it.
  MappedFile take_file() && { return std::move(file_); }

 private:
  MappedFile file_;
  Safetensors contents_;
};

struct NamedTensor {
  std::string name;
  TensorView tensor;
};

// Writes in the given order, data 64-byte aligned in the file; the caller commits. Each tensor's
// data must be as long as its shape says; names must be unique. Throws FileError.
void write_safetensors(AtomicFile& file, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string, std::less<>>& metadata = {});
// The same as a file of its own, committed.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string, std::less<>>& metadata = {});

// "[3, 8192, 64]"
std::string shape_text(std::span<const int64_t> shape);

}  // namespace crisp::files
