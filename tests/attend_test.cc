// attend_test.cc - attend() against the oracle, over dtypes, head dims, groups, lengths, layouts,
// pages and segments.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

void expect_exact(const Case& c) { EXPECT_TRUE(is_exact(make_inputs(c))); }

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Reruns what a failure printed; without CRISP_CASE, a case that uses every word.
TEST(Rerun, CaseFromEnvironment) {
  const char* text = std::getenv("CRISP_CASE");
  const Case c =
      parse_case(text ? text
                      : "hq=6 hkv=2 d=40 segments=100:130,1:300 padding=3 dtype=bfloat16 "
                        "layout=odd-strides page=16 causal=1 block=128 density=0.5 "
                        "threads=2 device=cpu seed=5");
  std::ostringstream first, second;
  first << c;
  second << parse_case(first.str());
  EXPECT_EQ(first.str(), second.str()) << "a case must print as what reruns it";
  expect_exact(c);
}

TEST(Rerun, RefusesUnknownWords) {
  for (const char* text : {"heads=3", "layout=round", "dtype=int8", "policy=best", "hq"}) {
    EXPECT_THROW(parse_case(text), std::invalid_argument) << text;
  }
}

TEST(Attend, EveryDTypeAndHeadDim) {
  for (const DType dtype : kDTypes) {
    for (const int64_t head_dim : {8, 24, 32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512}) {
      expect_exact(
          {.num_q_heads = 2, .head_dim = head_dim, .segments = {{149, 149}}, .dtype = dtype});
    }
  }
}

TEST(Attend, EveryGroupSize) {
  for (const int64_t group : {1, 3, 4, 5, 7, 8, 16}) {
    const DType dtype = kDTypes[group % 3];
    expect_exact({.num_q_heads = 2 * group,
                  .num_kv_heads = 2,
                  .head_dim = 32,
                  .segments = {{70, 133}},
                  .dtype = dtype,
                  .density = 0.7f});
  }
}

// One query, block edges, q_len != kv_len so that rows and columns of blocks differ in number.
TEST(Attend, LengthsAroundTheBlocks) {
  const Lengths all[] = {{1, 1},     {1, 127},   {1, 128},   {1, 129},   {2, 2},
                         {63, 63},   {64, 64},   {65, 65},   {127, 127}, {128, 128},
                         {129, 129}, {255, 255}, {192, 192}, {192, 200}, {300, 1000},
                         {5, 600},   {128, 384}, {130, 385}, {100, 640}, {257, 511}};
  for (const Lengths& lengths : all) {
    for (const int64_t block_size : {64, 128}) {
      for (const bool causal : {true, false}) {
        expect_exact(
            {.head_dim = 64, .segments = {lengths}, .causal = causal, .block_size = block_size});
        expect_exact({.num_q_heads = 2,
                      .head_dim = 24,
                      .segments = {lengths},
                      .dtype = DType::kBFloat16,
                      .causal = causal,
                      .block_size = block_size,
                      .density = 0.5f,
                      .seed = 3});
      }
    }
  }
}

// Only causal attention needs kv_len >= q_len.
TEST(Attend, MoreQueriesThanKeysWithoutCausality) {
  for (const int64_t block_size : {64, 128}) {
    for (const Lengths lengths : {Lengths{300, 1}, {300, 63}, {1000, 300}, {129, 128}}) {
      expect_exact({.head_dim = 32,
                    .segments = {lengths},
                    .causal = false,
                    .block_size = block_size,
                    .density = 0.6f});
    }
  }
}

// kv_len 0 is an empty state; q_len 0 is nothing.
TEST(Attend, SegmentsOfLengthZero) {
  for (const bool causal : {true, false}) {
    expect_exact({.num_q_heads = 2,
                  .head_dim = 16,
                  .segments = {{0, 0}, {5, 5}, {7, 0}, {0, 40}, {130, 131}, {0, 0}},
                  .causal = causal});
  }
}

TEST(Attend, NothingAtAll) {
  expect_exact({.head_dim = 16, .segments = {{0, 0}}});
  expect_exact({.head_dim = 16, .segments = {{9, 0}}});
  expect_exact({.head_dim = 16, .segments = {{0, 9}}});
}

// The same numbers in any layout give the same bits.
TEST(Attend, LayoutsAreBitEqual) {
  for (const DType dtype : kDTypes) {
    Case c{.num_q_heads = 6,
           .num_kv_heads = 2,
           .head_dim = 40,
           .segments = {{300, 333}},
           .dtype = dtype,
           .density = 0.7f};
    const Inputs plain = make_inputs(c);
    const OwnedMask mask = mask_of(plain, Call(plain).attention);
    const Outcome expected = run_attend(plain, mask);
    EXPECT_TRUE(matches(expected, truth_of(plain, mask)));
    for (const Layout layout : {Layout::kHeadMajor, Layout::kPackedQkv, Layout::kOddStrides}) {
      c.layout = layout;
      const Inputs inputs = make_inputs(c);
      EXPECT_TRUE(same_bits(run_attend(inputs, mask), expected)) << c;
    }
  }
}

TEST(Attend, PagesAreBitEqual) {
  for (const DType dtype : kDTypes) {
    Case c{.num_q_heads = 4,
           .num_kv_heads = 2,
           .head_dim = 64,
           .segments = {{200, 519}, {3, 130}, {64, 64}},
           .padding = 5,
           .dtype = dtype,
           .density = 0.8f};
    const Inputs plain = make_inputs(c);
    const OwnedMask mask = mask_of(plain, Call(plain).attention);
    const Outcome expected = run_attend(plain, mask);
    EXPECT_TRUE(matches(expected, truth_of(plain, mask)));
    for (const int64_t page_size : {1, 3, 16, 64, 100, 128, 1000}) {
      for (const Layout layout : {Layout::kContiguous, Layout::kHeadMajor, Layout::kOddStrides}) {
        c.page_size = page_size;
        c.layout = layout;
        const Inputs inputs = make_inputs(c);
        EXPECT_TRUE(same_bits(run_attend(inputs, mask), expected)) << c;
      }
    }
  }
}

// Each segment gives the bits it gives alone: batches, padding, empty sequences, short chunks.
void expect_segments_stand_alone(const Case& c) {
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
    EXPECT_TRUE(same_bits(cut(whole, inputs.segments[s]), run_attend(part, alone, own)))
        << "segment " << s;
  }
}

TEST(Attend, SegmentsStandAlone) {
  expect_segments_stand_alone(
      {.num_q_heads = 28,
       .num_kv_heads = 4,
       .head_dim = 16,
       .segments = {{1, 1}, {127, 127}, {128, 128}, {129, 129}, {2000, 2000}, {0, 0}, {4096, 4096}},
       .density = 0.3f,
       .num_threads = 2});
  expect_segments_stand_alone({.num_q_heads = 3,
                               .num_kv_heads = 1,
                               .head_dim = 64,
                               .segments = {{5, 600}, {128, 128}, {300, 1000}},
                               .padding = 77,
                               .dtype = DType::kBFloat16});
  expect_segments_stand_alone({.num_q_heads = 2,
                               .num_kv_heads = 1,
                               .head_dim = 32,
                               .segments = {{5, 600}, {300, 20}, {65, 64}},
                               .padding = 9,
                               .dtype = DType::kFloat16,
                               .causal = false,
                               .block_size = 64});
}

TEST(Attend, UnequalLengthsInOneCall) {
  for (const DType dtype : kDTypes) {
    expect_exact({.num_q_heads = 4,
                  .num_kv_heads = 1,
                  .head_dim = 48,
                  .segments = {{5, 600}, {128, 128}, {300, 1000}},
                  .padding = 11,
                  .dtype = dtype});
  }
}

// The blocks of a chunk lie on the grid of its sequence, so a cut at a multiple of the block gives
// the same bits, any other cut the same numbers within the bound.
TEST(Attend, ChunksEqualOneShot) {
  for (const int64_t boundary : {1920, 1930}) {
    const Inputs whole = make_inputs(
        {.num_q_heads = 2, .head_dim = 32, .segments = {{2200, 2200}}, .density = 0.6f});
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
TEST(Attend, FourChunksWithPrefix) {
  const Inputs whole = make_inputs({.head_dim = 16, .segments = {{8192, 8192}}, .num_threads = 2});
  const Outcome one_shot = run_attend(whole, mask_of(whole, Call(whole).attention));
  for (int64_t begin = 0; begin < 8192; begin += 2048) {
    const Inputs chunk = slice(whole, 0, {begin, 0}, {begin + 2048, begin + 2048});
    const Outcome outcome = run_attend(chunk, mask_of(chunk, Call(chunk).attention));
    EXPECT_TRUE(same_bits(outcome, cut(one_shot, begin, begin + 2048, {0}))) << begin;
  }
}

TEST(Attend, BitEqualForAnyThreadCount) {
  Case c{.num_q_heads = 6,
         .num_kv_heads = 2,
         .head_dim = 64,
         .segments = {{700, 1300}, {33, 500}},
         .dtype = DType::kBFloat16,
         .density = 0.5f};
  const Inputs inputs = make_inputs(c);
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

}  // namespace
}  // namespace crisp::test
