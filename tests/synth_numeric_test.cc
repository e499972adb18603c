// The generator's own arithmetic, which must not depend on the machine, against the standard
// library.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "synth/convert.h"
#include "synth/numeric.h"
#include "synth/random.h"

namespace crisp::synth {
namespace {

TEST(SynthNumeric, AgreesWithTheStandardLibrary) {
  for (double x = -50; x < 50; x += .0137) {
    EXPECT_NEAR(exp_double(x) / std::exp(x), 1, 1e-13) << x;
    EXPECT_NEAR(exp_float(static_cast<float>(x)) / std::exp(static_cast<float>(x)), 1, 3e-7) << x;
    EXPECT_NEAR(sin_cos(x * 1000).sin, std::sin(x * 1000), 1e-10) << x;
    EXPECT_NEAR(sin_cos(x * 1000).cos, std::cos(x * 1000), 1e-10) << x;
    if (x <= 0) continue;
    EXPECT_NEAR(log_double(x), std::log(x), 1e-14 * (1 + std::abs(std::log(x)))) << x;
  }
  EXPECT_EQ(exp_float(-200), 0.f);
  EXPECT_NEAR(sin_cos(524288.0 * 1).sin, std::sin(524288.0), 1e-8);
}

TEST(SynthRandom, NormalsAreNormal) {
  constexpr int64_t kCount = 1 << 18;
  std::vector<float> x(kCount), tail(100);
  fill_normals(123, 0, kCount, x.data());
  double moments[5] = {};
  for (float value : x)
    for (int power = 1; power <= 4; ++power)
      moments[power] += std::pow(static_cast<double>(value), power);
  EXPECT_NEAR(moments[1] / kCount, 0, .01);
  EXPECT_NEAR(moments[2] / kCount, 1, .01);
  EXPECT_NEAR(moments[3] / kCount, 0, .02);
  EXPECT_NEAR(moments[4] / kCount, 3, .06);
  double within = 0, odd_even = 0;
  for (size_t i = 0; i < kCount; i += 2) odd_even += static_cast<double>(x[i] * x[i + 1]);
  for (float value : x) within += std::abs(value) < 1 ? 1 : 0;
  EXPECT_NEAR(within / kCount, .6827, .004);
  EXPECT_NEAR(odd_even / (kCount / 2), 0, .01);
  fill_normals(123, 5000, 100, tail.data());  // any part of a stream, on its own
  EXPECT_EQ(std::memcmp(tail.data(), x.data() + 5000, 400), 0);
}

TEST(SynthConvert, StoresAtAnOffsetAndRoundsAsStored) {
  const std::vector<float> values = {1 + 0x1p-11f, 1 + 3 * 0x1p-11f, -2.f, 0x1p-24f, 300.123f};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> storage(8, 0.f), loaded(5), rounded = values;
    store_elements(dtype, values.data(), storage.data(), 2, 5);
    load_elements(dtype, storage.data(), 2, 5, loaded.data());
    round_elements(dtype, rounded.data(), 5);
    EXPECT_EQ(loaded, rounded);
    EXPECT_EQ(rounded == values, dtype == DType::kFloat32);
    EXPECT_EQ(storage[0], 0.f);  // elements 0 and 1 of every type lie there
  }
}

}  // namespace
}  // namespace crisp::synth
