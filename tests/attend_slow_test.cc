// attend_slow_test.cc - the sweeps and the lengths that are too long for every day: `ctest -L
// slow`.
#include <gtest/gtest.h>

#include <cmath>

#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST(AttendSlow, FullMaskEqualsDenseForEveryLength) {
  for (const DType dtype : kDTypes) {
    for (const int64_t size : {64, 128}) {
      EXPECT_TRUE(is_exact_for_every_length({.head_dim = size,
                                             .segments = {{1025, 1025}},
                                             .dtype = dtype,
                                             .block_size = size,
                                             .num_threads = 2}));
    }
  }
}

TEST(AttendSlow, EveryPairOfShortLengths) {
  for (int64_t kv_len = 1; kv_len <= 260; kv_len += 7) {
    for (int64_t q_len = 1; q_len <= 260; q_len += 9) {
      const DType dtype = kDTypes[(kv_len + q_len) % 3];
      EXPECT_TRUE(is_exact(make_inputs(
          {.head_dim = 16, .segments = {{q_len, kv_len}}, .dtype = dtype, .causal = false})));
      if (q_len > kv_len) continue;
      EXPECT_TRUE(
          is_exact(make_inputs({.head_dim = 16, .segments = {{q_len, kv_len}}, .dtype = dtype})));
    }
  }
}

TEST(AttendSlow, EveryHeadDim) {
  for (int64_t head_dim = 8; head_dim <= 512; head_dim += 8) {
    for (const DType dtype : kDTypes) {
      EXPECT_TRUE(is_exact(make_inputs({.num_q_heads = 2,
                                        .head_dim = head_dim,
                                        .segments = {{140, 200}},
                                        .dtype = dtype,
                                        .density = 0.8f})));
    }
  }
}

// Rows [begin, end) of a long one-head call against the oracle, and the same bits from a call for
// these rows alone when they begin on the grid.
void expect_rows(const Inputs& whole, const Outcome& outcome, int64_t begin, int64_t end) {
  const int64_t offset = whole.k.tokens - whole.q.tokens;
  const Inputs rows = slice(whole, 0, {begin, 0}, {end, end + offset});
  const OwnedMask mask = mask_of(rows, Call(rows).attention);
  EXPECT_TRUE(matches(cut(outcome, begin, end, {0}), truth_of(rows, mask)))
      << begin << " to " << end;
  if ((begin + offset) % 128 == 0) {
    EXPECT_TRUE(same_bits(cut(outcome, begin, end, {0}), run_attend(rows, mask)))
        << begin << " to " << end;
  }
}

// A2: around 65,536 tokens, every block kept, rows past 2^32 / n.
TEST(AttendSlow, AroundSixtyFourThousandTokens) {
  for (const int64_t n : {65536, 65537}) {
    const Inputs inputs = make_inputs({.head_dim = 64, .segments = {{n, n}}, .num_threads = 2});
    const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
    expect_rows(inputs, outcome, 58200, 58400);
    expect_rows(inputs, outcome, n - n % 128 - 128, n);
  }
}

// A4: q_len x kv_len past 2^31.
TEST(AttendSlow, LongChunkAgainstLongPrefix) {
  const Inputs inputs = make_inputs(
      {.head_dim = 64, .segments = {{16384, 202752}}, .dtype = DType::kBFloat16, .num_threads = 2});
  const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
  expect_rows(inputs, outcome, 16384 - 128, 16384);
  expect_rows(inputs, outcome, 0, 128);
}

// B1: 2,048 sequences of 32 heads are 65,536 head-rows.
TEST(AttendSlow, ManySequencesOfManyHeads) {
  const Inputs inputs = make_inputs({.num_q_heads = 32,
                                     .head_dim = 8,
                                     .segments = std::vector<Lengths>(2048, {128, 128}),
                                     .dtype = DType::kBFloat16,
                                     .num_threads = 2});
  const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
  for (const int64_t index : {0, 1, 1023, 2046, 2047}) {
    const Inputs part = slice(inputs, index);
    const OwnedMask mask = mask_of(part, Call(part).attention);
    const Outcome alone = run_attend(part, mask);
    EXPECT_TRUE(matches(alone, truth_of(part, mask)));
    EXPECT_TRUE(same_bits(cut(outcome, inputs.segments[static_cast<size_t>(index)]), alone))
        << index;
  }
  for (const float value : outcome.out.data) ASSERT_FALSE(std::isnan(value)) << "not written";
}

}  // namespace
}  // namespace crisp::test
