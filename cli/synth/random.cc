#include "synth/random.h"

#include <algorithm>
#include <cmath>

#include "synth/numeric.h"

namespace crisp::synth {
namespace {

constexpr int64_t kPairsPerPass = 128;

// Natural logarithm of u in [2^-24, 1], absolute error below 1e-6.
inline float log_unit(float u) {
  const int32_t bits = std::bit_cast<int32_t>(u);
  const int32_t reduced = bits - 0x3f3504f3;  // 1 / sqrt 2: m falls into [1/sqrt 2, sqrt 2)
  const int32_t exponent = reduced >> 23;
  const float m = std::bit_cast<float>((reduced & 0x007fffff) + 0x3f3504f3);
  const float t = (m - 1.f) / (m + 1.f), z = t * t;
  return 2.f * t * (1.f + z * (1.f / 3 + z * (1.f / 5 + z * (1.f / 7 + z * (1.f / 9))))) +
         static_cast<float>(exponent) * std::numbers::ln2_v<float>;
}

// Box and Muller: radius from the high half, angle from the low half of 64 random bits. The angle
// is folded to a quarter turn, sin and cos there, signs put back.
inline void normal_pair(uint32_t high, uint32_t low, float* out) {
  const float u = static_cast<float>(static_cast<int32_t>(high >> 8) + 1) * 0x1p-24f;
  const float radius = std::sqrt(std::max(-2.f * log_unit(u), 0.f));
  const int32_t fraction = static_cast<int32_t>((low >> 6) & 0xffffff);  // of a quarter turn
  const float x =
      static_cast<float>(fraction - 0x800000) * (0x1p-24f * std::numbers::pi_v<float> / 2);
  const float z = x * x;
  const float s =
      x * (1.f + z * (-1.f / 6 + z * (1.f / 120 + z * (-1.f / 5040 + z * (1.f / 362880)))));
  const float c = 1.f + z * (-0.5f + z * (1.f / 24 + z * (-1.f / 720 + z * (1.f / 40320))));
  const bool swap = (low >> 30 & 1u) != 0, flip = (low >> 31) != 0;
  const float a = swap ? -s : c, b = swap ? c : s;
  out[0] = radius * (flip ? -a : a);
  out[1] = radius * (flip ? -b : b);
}

}  // namespace

void fill_normals(uint64_t key, int64_t first, int64_t count, float* out) {
  uint64_t bits[kPairsPerPass];
  for (int64_t done = 0; done < count; done += 2 * kPairsPerPass) {
    const int64_t pairs = std::min(kPairsPerPass, (count - done) / 2);
    for (int64_t i = 0; i < pairs; ++i) bits[i] = random_bits(key, (first + done) / 2 + i);
    for (int64_t i = 0; i < pairs; ++i)
      normal_pair(static_cast<uint32_t>(bits[i] >> 32), static_cast<uint32_t>(bits[i]),
                  out + done + 2 * i);
  }
}

}  // namespace crisp::synth
