// dtype.h - element sizes and names.
#pragma once

#include "crisp/crisp.h"

namespace crisp {

constexpr bool is_known(DType dtype) { return static_cast<uint8_t>(dtype) <= 2; }

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

}  // namespace crisp
