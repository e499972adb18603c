// npy.h - reads and writes `.npy`, format versions 1 to 3: C order, little-endian float32 and
// float16, and bfloat16 as ml_dtypes stores it (2-byte void, '<V2' or '|V2').
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "files/mapped_file.h"
#include "files/safetensors.h"

namespace crisp::files {

// `file` names the source in errors. The result borrows `bytes`. Throws FileError; everything the
// reader does not take (float64, big-endian, Fortran order, objects) is refused by name.
TensorView parse_npy(std::span<const std::byte> bytes, std::string_view file);

class NpyFile {
 public:
  explicit NpyFile(const std::string& path);
  const std::string& path() const { return file_.path(); }
  const TensorView& array() const { return array_; }

 private:
  MappedFile file_;
  TensorView array_;
};

// Writes version 1 atomically. `array` is F32, F16 or BF16. Throws FileError.
void write_npy(const std::string& path, const TensorView& array);

}  // namespace crisp::files
