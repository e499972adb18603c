// attend_suite.h - attend() against the oracle, over dtypes, head dims, groups, lengths, layouts,
// pages and segments, on any backend.
#pragma once

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {

inline void expect_exact(const Case& c) { EXPECT_TRUE(is_exact(make_inputs(c))); }

class Attend : public OnBackend {};

TEST_P(Attend, EveryDTypeAndHeadDim) {
  for (const DType dtype : dtypes()) {
    for (const int64_t head_dim : {8, 24, 32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512}) {
      if (is_cuda() && head_dim > 256) continue;
      expect_exact(exactly(
          {.num_q_heads = 2, .head_dim = head_dim, .segments = {{149, 149}}, .dtype = dtype}));
    }
  }
}

TEST_P(Attend, EveryGroupSize) {
  for (const int64_t group : {1, 3, 4, 5, 7, 8, 16}) {
    const DType dtype = dtypes()[static_cast<size_t>(group) % dtypes().size()];
    expect_exact(on({.num_q_heads = 2 * group,
                     .num_kv_heads = 2,
                     .head_dim = 32,
                     .segments = {{70, 133}},
                     .dtype = dtype,
                     .density = 0.7f}));
  }
}

// One query, block edges, q_len != kv_len so that rows and columns of blocks differ in number.
TEST_P(Attend, LengthsAroundTheBlocks) {
  const Lengths all[] = {{1, 1},     {1, 127},   {1, 128},   {1, 129},   {2, 2},
                         {63, 63},   {64, 64},   {65, 65},   {127, 127}, {128, 128},
                         {129, 129}, {255, 255}, {192, 192}, {192, 200}, {300, 1000},
                         {5, 600},   {128, 384}, {130, 385}, {100, 640}, {257, 511}};
  for (const Lengths& lengths : all) {
    for (const int64_t block_size : {64, 128}) {
      for (const bool causal : {true, false}) {
        expect_exact(on(
            {.head_dim = 64, .segments = {lengths}, .causal = causal, .block_size = block_size}));
        expect_exact(exactly({.num_q_heads = 2,
                              .head_dim = 24,
                              .segments = {lengths},
                              .dtype = DType::kBFloat16,
                              .causal = causal,
                              .block_size = block_size,
                              .density = 0.5f,
                              .seed = 3}));
        if (is_cuda())
          expect_exact(exactly({.num_q_heads = 2,
                                .head_dim = 128,
                                .segments = {lengths},
                                .dtype = DType::kFloat16,
                                .causal = causal,
                                .block_size = block_size,
                                .density = 0.5f,
                                .seed = 4}));
      }
    }
  }
}

// Only causal attention needs kv_len >= q_len.
TEST_P(Attend, MoreQueriesThanKeysWithoutCausality) {
  for (const int64_t block_size : {64, 128}) {
    for (const Lengths lengths : {Lengths{300, 1}, {300, 63}, {1000, 300}, {129, 128}}) {
      expect_exact(on({.head_dim = 32,
                       .segments = {lengths},
                       .causal = false,
                       .block_size = block_size,
                       .density = 0.6f}));
    }
  }
}

// kv_len 0 is an empty state; q_len 0 is nothing.
TEST_P(Attend, SegmentsOfLengthZero) {
  for (const bool causal : {true, false}) {
    expect_exact(on({.num_q_heads = 2,
                     .head_dim = 16,
                     .segments = {{0, 0}, {5, 5}, {7, 0}, {0, 40}, {130, 131}, {0, 0}},
                     .causal = causal}));
  }
}

TEST_P(Attend, NothingAtAll) {
  expect_exact(on({.head_dim = 16, .segments = {{0, 0}}}));
  expect_exact(on({.head_dim = 16, .segments = {{9, 0}}}));
  expect_exact(on({.head_dim = 16, .segments = {{0, 9}}}));
}

// The same numbers in any layout give the same bits. Odd strides go to other kernels on Hopper.
TEST_P(Attend, LayoutsAreBitEqual) {
  for (const DType dtype : dtypes()) {
    Case c = on({.num_q_heads = 6,
                 .num_kv_heads = 2,
                 .head_dim = 40,
                 .segments = {{300, 333}},
                 .dtype = dtype,
                 .density = 0.7f});
    const Inputs plain = make_inputs(c);
    const OwnedMask mask = mask_of(plain, Call(plain).attention);
    const Outcome expected = run_attend(plain, mask);
    const Truth truth = truth_of(plain, mask);
    EXPECT_TRUE(matches(expected, truth));
    for (const Layout layout : {Layout::kHeadMajor, Layout::kPackedQkv, Layout::kOddStrides}) {
      c.layout = layout;
      const Inputs inputs = make_inputs(c);
      EXPECT_TRUE(same_or_true(run_attend(inputs, mask), expected, truth)) << c;
    }
  }
}

TEST_P(Attend, PagesAreBitEqual) {
  // Segments that start at any token of a page, and at a multiple of what Hopper copies at a time.
  for (const int64_t padding : is_cuda() ? std::vector<int64_t>{5, 32} : std::vector<int64_t>{5}) {
    for (const DType dtype : dtypes()) {
      Case c = on({.num_q_heads = 4,
                   .num_kv_heads = 2,
                   .head_dim = 64,
                   .segments = {{200, 519}, {3, 130}, {64, 64}},
                   .padding = padding,
                   .dtype = dtype,
                   .density = 0.8f});
      const Inputs plain = make_inputs(c);
      const OwnedMask mask = mask_of(plain, Call(plain).attention);
      const Outcome expected = run_attend(plain, mask);
      const Truth truth = truth_of(plain, mask);
      EXPECT_TRUE(matches(expected, truth));
      for (const int64_t page_size : {1, 3, 16, 64, 100, 128, 1000}) {
        for (const Layout layout : {Layout::kContiguous, Layout::kHeadMajor, Layout::kOddStrides}) {
          c.page_size = page_size;
          c.layout = layout;
          const Inputs inputs = make_inputs(c);
          EXPECT_TRUE(same_or_true(run_attend(inputs, mask), expected, truth)) << c;
        }
      }
    }
  }
}

// Each segment gives the bits it gives alone: batches, padding, empty sequences, short chunks.
inline void expect_segments_stand_alone(const Case& c) {
  SCOPED_TRACE(::testing::PrintToString(c));
  const Inputs inputs = make_inputs(c);
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  const Outcome whole = run_attend(inputs, call, mask);
  const std::vector<MaskRows> rows = mask_rows(inputs, c.block_size);
  for (size_t s = 0; s < inputs.segments.size(); ++s) {
    const Inputs part = slice(inputs, static_cast<int64_t>(s));
    const Call alone(part);
    OwnedMask own(alone.attention, c.block_size);
    ASSERT_EQ(own.mask.num_q_blocks, rows[s].num_rows);
    ASSERT_EQ(own.mask.num_kv_blocks, rows[s].num_kv_blocks);
    for (int64_t head = 0; head < c.num_q_heads; ++head) {
      for (int64_t row = 0; row < rows[s].num_rows; ++row) {
        for (int64_t block = 0; block < rows[s].num_kv_blocks; ++block) {
          own.set(head, row, block, mask.at(head, rows[s].first_row + row, block));
        }
      }
    }
    // Without keys, hence without numbers, there is one answer whatever the kernels.
    const Outcome expected = run_attend(part, alone, own);
    if (part.k.tokens > 0 && part.q.tokens > 0) {
      EXPECT_EQ(expected.family, whole.family);
    }
    EXPECT_TRUE(same_bits(cut(whole, inputs.segments[s]), expected)) << "segment " << s;
  }
}

TEST_P(Attend, SegmentsStandAlone) {
  expect_segments_stand_alone(on(
      {.num_q_heads = 28,
       .num_kv_heads = 4,
       .head_dim = 16,
       .segments = {{1, 1}, {127, 127}, {128, 128}, {129, 129}, {2000, 2000}, {0, 0}, {4096, 4096}},
       .density = 0.3f,
       .num_threads = 2}));
  expect_segments_stand_alone(on({.num_q_heads = 3,
                                  .num_kv_heads = 1,
                                  .head_dim = 64,
                                  .segments = {{5, 600}, {128, 128}, {300, 1000}},
                                  .padding = 77,
                                  .dtype = DType::kBFloat16}));
  expect_segments_stand_alone(on({.num_q_heads = 2,
                                  .num_kv_heads = 1,
                                  .head_dim = 32,
                                  .segments = {{5, 600}, {300, 20}, {65, 64}},
                                  .padding = 9,
                                  .dtype = DType::kFloat16,
                                  .causal = false,
                                  .block_size = 64}));
}

TEST_P(Attend, UnequalLengthsInOneCall) {
  for (const DType dtype : dtypes()) {
    expect_exact(on({.num_q_heads = 4,
                     .num_kv_heads = 1,
                     .head_dim = 48,
                     .segments = {{5, 600}, {128, 128}, {300, 1000}},
                     .padding = 11,
                     .dtype = dtype}));
  }
}

// The blocks of a chunk lie on the grid of its sequence, so a cut at a multiple of the block gives
// the same bits, any other cut the same numbers within the bound.
TEST_P(Attend, ChunksEqualOneShot) {
  for (const int64_t boundary : {1920, 1930}) {
    const Inputs whole = make_inputs(
        on({.num_q_heads = 2, .head_dim = 32, .segments = {{2200, 2200}}, .density = 0.6f}));
    const Call call(whole);
    const OwnedMask mask = mask_of(whole, call.attention);
    const Outcome one_shot = run_attend(whole, call, mask);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, boundary}, {boundary, 2200}}) {
      const Inputs chunk = slice(whole, 0, {begin, 0}, {end, end});
      const Call chunk_call(chunk);
      OwnedMask chunk_mask(chunk_call.attention, 128);
      for (int64_t head = 0; head < 2; ++head) {
        for (int64_t row = 0; row < chunk_mask.mask.num_q_blocks; ++row) {
          for (int64_t block = 0; block <= begin / 128 + row; ++block) {
            chunk_mask.set(head, row, block, mask.at(head, begin / 128 + row, block));
          }
        }
      }
      const Outcome outcome = run_attend(chunk, chunk_call, chunk_mask);
      if (boundary % 128 == 0) {
        EXPECT_TRUE(same_bits(outcome, cut(one_shot, begin, end, {0, 1})))
            << begin << " to " << end;
      }
      EXPECT_TRUE(matches(outcome, truth_of(chunk, chunk_mask))) << begin << " to " << end;
    }
  }
}

// D1: four chunks with a growing prefix are the one-shot call.
TEST_P(Attend, FourChunksWithPrefix) {
  const Inputs whole =
      make_inputs(on({.head_dim = 16, .segments = {{8192, 8192}}, .num_threads = 2}));
  const Outcome one_shot = run_attend(whole, mask_of(whole, Call(whole).attention));
  for (int64_t begin = 0; begin < 8192; begin += 2048) {
    const Inputs chunk = slice(whole, 0, {begin, 0}, {begin + 2048, begin + 2048});
    const Outcome outcome = run_attend(chunk, mask_of(chunk, Call(chunk).attention));
    EXPECT_TRUE(same_bits(outcome, cut(one_shot, begin, begin + 2048, {0}))) << begin;
  }
}

// From run to run, and for any number of threads.
TEST_P(Attend, RerunsAreBitEqual) {
  const Inputs inputs = make_inputs(on({.num_q_heads = 6,
                                        .num_kv_heads = 2,
                                        .head_dim = 64,
                                        .segments = {{700, 1300}, {33, 500}},
                                        .dtype = DType::kBFloat16,
                                        .density = 0.5f}));
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome expected = run_attend(inputs, mask);
  for (const int num_threads : {1, 2, 3, 8, 0}) {
    Inputs threaded = inputs;
    threaded.config.num_threads = num_threads;
    for (int repeat = 0; repeat < 3; ++repeat) {
      EXPECT_TRUE(same_bits(run_attend(threaded, mask), expected)) << num_threads << " threads";
    }
  }
}

}  // namespace crisp::test
