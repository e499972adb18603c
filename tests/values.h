// values.h - numbers of a test: plain floats that the dtype under test can hold, and how to lay
// them out. Written apart from the library's own conversions, which are under test.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "crisp/crisp.h"

namespace crisp::test {

// Round to nearest, ties to even, as IEEE 754 has it.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000) {  // subnormal: multiples of 2^-24
    const float steps = std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(steps));
  }
  return static_cast<uint16_t>(sign |
                               (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0)
    return std::bit_cast<float>(sign |
                                std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | biased << 23 | fraction << 13);
}

inline void store(DType dtype, float value, std::byte* at) {
  if (dtype == DType::kFloat32) {
    std::memcpy(at, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
  std::memcpy(at, &half, 2);
}

inline float load(DType dtype, const std::byte* at) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  if (dtype == DType::kFloat16) return from_float16(half);
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

inline float round_to(DType dtype, float value) {
  std::byte bytes[4];
  store(dtype, value, bytes);
  return load(dtype, bytes);
}

// Seeded and the same on every machine and compiler, unlike the distributions of <random>.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
  }
  float normal() {  // Irwin-Hall: near enough, and free of libm differences
    double sum = -6;
    for (int i = 0; i < 4; ++i) {
      const uint64_t word = bits();
      for (int part = 0; part < 3; ++part)
        sum += static_cast<double>(word >> (21 * part) & 0x1fffff) * 0x1p-21;
    }
    return static_cast<float>(sum);
  }

 private:
  uint64_t state_;
};

// [tokens, heads, dim] in that order, whatever the layout under test.
struct Values {
  int64_t tokens = 0, heads = 0, dim = 0;
  std::vector<float> data;

  Values() = default;
  Values(int64_t tokens_, int64_t heads_, int64_t dim_)
      : tokens(tokens_),
        heads(heads_),
        dim(dim_),
        data(static_cast<size_t>(tokens_ * heads_ * dim_)) {}
  float* row(int64_t token, int64_t head) { return data.data() + (token * heads + head) * dim; }
  const float* row(int64_t token, int64_t head) const {
    return data.data() + (token * heads + head) * dim;
  }
  void round(DType dtype) {
    for (float& value : data) value = round_to(dtype, value);
  }
};

inline Values normal_values(int64_t tokens, int64_t heads, int64_t dim, uint64_t seed) {
  Values values(tokens, heads, dim);
  Random random(seed);
  for (float& value : values.data) value = random.normal();
  return values;
}

}  // namespace crisp::test
