// merge_states against its formula in double, what it does not read, what it refuses; and the
// conversions it stores with, over all 16-bit values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/half.h"
#include "crisp/crisp.h"

namespace crisp {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr int64_t kTokens = 131, kHeads = 3, kHeadDim = 8;
constexpr int64_t kRow = kHeads * kHeadDim;

struct State {
  std::vector<float> out = std::vector<float>(kTokens * kRow),
                     lse = std::vector<float>(kTokens * kHeads);
  explicit State(uint32_t seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal(0.f, 4.f);
    for (float& value : out) value = normal(bits);
    for (float& value : lse) value = 20.f * normal(bits);
  }
  Tensor tensor() {
    return {out.data(), DType::kFloat32, kTokens, kHeads, kHeadDim, kRow, kHeadDim, 0};
  }
  ConstTensor view() const {
    return {out.data(), DType::kFloat32, kTokens, kHeads, kHeadDim, kRow, kHeadDim, 0};
  }
};

Context threads(int count) {
  Context context;
  context.num_threads = count;
  return context;
}

TEST(MergeRules, FollowsTheFormula) {
  const State a(1), b(2);
  State merged(3);
  merge_states(a.view(), a.lse, b.view(), b.lse, merged.tensor(), merged.lse, threads(2));
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto at = static_cast<size_t>(head * kTokens + token);
      const double m = std::max<double>(a.lse[at], b.lse[at]);
      const double lse = m + std::log(std::exp(a.lse[at] - m) + std::exp(b.lse[at] - m));
      EXPECT_NEAR(merged.lse[at], lse, 1e-6 * std::abs(lse) + 1e-6);
      for (int64_t i = 0; i < kHeadDim; ++i) {
        const auto o = static_cast<size_t>(token * kRow + head * kHeadDim + i);
        const double part_a = std::exp(a.lse[at] - lse) * a.out[o];
        const double part_b = std::exp(b.lse[at] - lse) * b.out[o];
        // Four roundings of each part and the exponent's own: 8 ulp of what is summed.
        EXPECT_NEAR(merged.out[o], part_a + part_b,
                    0x1p-20 * (std::abs(part_a) + std::abs(part_b)));
      }
    }
  }
}

TEST(MergeRules, AnEmptyStateAddsNothingWhateverItHolds) {
  State a(1), b(2), merged(3);
  b.lse.assign(b.lse.size(), kEmpty);
  b.out.assign(b.out.size(), std::nanf(""));
  merge_states(a.view(), a.lse, b.view(), b.lse, merged.tensor(), merged.lse, threads(1));
  EXPECT_EQ(merged.out, a.out);
  EXPECT_EQ(merged.lse, a.lse);
  merge_states(b.view(), b.lse, a.view(), a.lse, merged.tensor(), merged.lse, threads(1));
  EXPECT_EQ(merged.out, a.out);
  merge_states(b.view(), b.lse, b.view(), b.lse, merged.tensor(), merged.lse, threads(1));
  EXPECT_EQ(merged.out, std::vector<float>(merged.out.size(), 0.f));
  EXPECT_EQ(merged.lse, b.lse);
}

TEST(MergeRules, RefusesWhatDoesNotFitTogether) {
  State a(1), b(2), merged(3);
  const State before = merged;
  const auto merge = [&](const ConstTensor& view, std::span<const float> lse, Tensor out) {
    merge_states(a.view(), a.lse, view, lse, out, merged.lse, threads(1));
  };
  ConstTensor narrow = b.view();
  narrow.head_dim = 16;
  EXPECT_THROW(merge(narrow, b.lse, merged.tensor()), Error);
  EXPECT_THROW(merge(b.view(), std::span(b.lse).first(3), merged.tensor()), Error);
  EXPECT_THROW(merge(b.view(), b.lse, b.tensor()), Error);  // in place on b
  Tensor shifted = a.tensor();
  shifted.num_tokens = kTokens - 1;
  EXPECT_THROW(merge(b.view(), b.lse, shifted), Error);
  EXPECT_EQ(merged.out, before.out);
  EXPECT_EQ(merged.lse, before.lse);
}

TEST(Half, EveryValueOfBothDtypesRoundTrips) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float bf = float_from_bfloat16(half), fp = float_from_float16(half);
    if (std::isnan(bf)) {
      EXPECT_TRUE(std::isnan(float_from_bfloat16(bfloat16_from_float(bf))));
    } else {
      EXPECT_EQ(bfloat16_from_float(bf), half);
    }
    if (std::isnan(fp)) {
      EXPECT_TRUE(std::isnan(float_from_float16(float16_from_float(fp))));
    } else {
      EXPECT_EQ(float16_from_float(fp), half);
    }
  }
}

// Halfway between two neighbours the even one wins; one float step beside it, the nearer one.
TEST(Half, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
    const float middle = 0.5f * (float_from_float16(low) + float_from_float16(high));
    EXPECT_EQ(float16_from_float(middle), bits % 2 == 0 ? low : high) << bits;
    EXPECT_EQ(float16_from_float(std::nextafter(middle, 0.f)), low);
    EXPECT_EQ(float16_from_float(-std::nextafter(middle, 1e9f)), high | 0x8000u);
  }
  EXPECT_EQ(float16_from_float(65519.f), 0x7bff);
  EXPECT_EQ(float16_from_float(65520.f), 0x7c00);
  EXPECT_EQ(bfloat16_from_float(1.f + 0x1p-8f), 0x3f80);  // tie, to even
  EXPECT_EQ(bfloat16_from_float(1.f + 0x1p-8f + 0x1p-20f), 0x3f81);
  EXPECT_EQ(bfloat16_from_float(1.f + 3 * 0x1p-8f), 0x3f82);  // tie, to even
}

}  // namespace
}  // namespace crisp
