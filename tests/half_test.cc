// half_test.cc - one float to and from the 16-bit dtypes, over all their values.
#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>

namespace crisp {
namespace {

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
