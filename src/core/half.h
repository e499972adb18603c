// half.h - one float to and from the 16-bit dtypes, round to nearest even. For single values;
// kernels convert whole vectors by themselves.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace crisp {

constexpr float float_from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

constexpr uint16_t bfloat16_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float float_from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal, exact in float
  return sign != 0 ? -magnitude : magnitude;
}

constexpr uint16_t float16_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: the float adder rounds at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // one ulp of [0.5, 1) is 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

// Element `index` of an array of `dtype`.
inline float load_float(const void* data, DType dtype, int64_t index) {
  const auto* at = static_cast<const std::byte*>(data) + index * element_bytes(dtype);
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kFloat16 ? float_from_float16(bits) : float_from_bfloat16(bits);
}

inline void store_float(void* data, DType dtype, int64_t index, float value) {
  auto* at = static_cast<std::byte*>(data) + index * element_bytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(at, &value, sizeof(value));
    return;
  }
  const uint16_t bits =
      dtype == DType::kFloat16 ? float16_from_float(value) : bfloat16_from_float(value);
  std::memcpy(at, &bits, sizeof(bits));
}

}  // namespace crisp
