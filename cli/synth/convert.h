// convert.h - float32 to and from the storage types, rounding to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

#include "crisp/crisp.h"

namespace crisp::synth {

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float from_bfloat16(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// Finite input. Adding a power of two whose last place is float16's rounds the mantissa.
inline uint16_t to_float16(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000u;
  const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  if (magnitude >= 65520.f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {  // subnormal: units of 2^-24
    const uint32_t units =
        std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    return static_cast<uint16_t>(sign | units);
  }
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

inline float from_float16(uint16_t x) {
  const uint32_t exponent = x >> 10 & 31u, mantissa = x & 0x3ffu;
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  if (exponent == 31u) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  const float magnitude = exponent == 0
                              ? static_cast<float>(mantissa) * 0x1p-24f
                              : std::bit_cast<float>((exponent + 112u) << 23 | mantissa << 13);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// `count` floats into elements [first, first + count) of `data`, and back.
void store_elements(DType dtype, const float* from, void* data, int64_t first, int64_t count);
void load_elements(DType dtype, const void* data, int64_t first, int64_t count, float* to);

// What `count` values become when stored.
void round_elements(DType dtype, float* values, int64_t count);

}  // namespace crisp::synth
