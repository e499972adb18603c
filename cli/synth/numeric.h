// numeric.h - the few elementary functions the generator needs, written so that every machine and
// compiler gives the same bits: additions, multiplications, divisions and square roots only (the
// library is built without contraction into fused multiply-adds).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace crisp::synth {

// Nearest integer for |x| < 2^51, kept as a double.
inline double round_nearest(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the unit of the last place is 1
  return (x + kMagic) - kMagic;
}

struct SinCos {
  double sin, cos;
};

// |x| up to about 1e9, absolute error below 1e-6 there and below 1e-12 for |x| < 1e4: Cody-Waite
// reduction by quarter turns, then Taylor polynomials on [-pi/4, pi/4].
inline SinCos sin_cos(double x) {
  constexpr double kHalfPiHigh = 1.57079632673412561417e+00;  // 33 bits of pi / 2
  constexpr double kHalfPiLow = 6.07710050650619224932e-11;
  const double quarter = round_nearest(x * (2 / std::numbers::pi));
  const double r = (x - quarter * kHalfPiHigh) - quarter * kHalfPiLow;
  const double z = r * r;
  const double s =
      r * (1 + z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 +
                                                     z * (1.0 / 362880 + z * (-1.0 / 39916800))))));
  const double c =
      1 + z * (-0.5 + z * (1.0 / 24 +
                           z * (-1.0 / 720 +
                                z * (1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600))))));
  const int64_t turn = static_cast<int64_t>(quarter) & 3;
  const double sine = (turn & 1) != 0 ? c : s, cosine = (turn & 1) != 0 ? s : c;
  return {(turn & 2) != 0 ? -sine : sine, turn == 1 || turn == 2 ? -cosine : cosine};
}

// Relative error below 2e-7; 0 for x < -87 and no larger than e^88.
inline float exp_float(float x) {
  x = x > 88.f ? 88.f : x;
  const float clamped = x < -87.f ? -87.f : x;
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23
  const float shifted = clamped * std::numbers::log2e_v<float> + kMagic;
  const float whole = shifted - kMagic;
  const float r = (clamped - whole * 0.693145751953125f) - whole * 1.428606765330187e-06f;
  const float poly =
      1.f +
      r * (1.f + r * (0.5f + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kMagic);
  const float scale = std::bit_cast<float>((exponent + 127) << 23);
  return x < -87.f ? 0.f : poly * scale;
}

// Natural logarithm of a normal positive number, relative error below 1e-14: x = m 2^e with m in
// [1/sqrt 2, sqrt 2), log m = 2 atanh((m - 1) / (m + 1)).
inline double log_double(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (m > std::numbers::sqrt2) m *= 0.5, ++exponent;
  const double u = (m - 1) / (m + 1), z = u * u;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
  return 2 * u * sum + static_cast<double>(exponent) * std::numbers::ln2;
}

// e^x for |x| < 700, relative error below 1e-14.
inline double exp_double(double x) {
  const double whole = round_nearest(x * std::numbers::log2e);
  const double r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  double sum = 1;
  for (int k = 16; k >= 1; --k) sum = 1 + r * sum / k;
  const uint64_t exponent = static_cast<uint64_t>(static_cast<int64_t>(whole) + 1023);
  return sum * std::bit_cast<double>(exponent << 52);
}

}  // namespace crisp::synth
