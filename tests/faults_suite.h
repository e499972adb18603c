// faults_suite.h - the classes of fault that users of attention kernels report, on any backend:
// masks, empty rows, tails, NaN and Inf, extreme logits.
#pragma once

#include <cmath>
#include <limits>
#include <thread>

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {

class Faults : public OnBackend {
 protected:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

  // The rows that a change may reach, although no query of them sees it: where a tile of the CUDA
  // kernels is computed again, all its rows are, by other arithmetic.
  int64_t tile_begin(int64_t position) const { return is_cuda() ? position / 128 * 128 : position; }
  int64_t tile_end(int64_t position) const {
    return is_cuda() ? (position / 128 + 1) * 128 : position + 1;
  }

  struct Poison {
    const char* where;
    float value;
    int64_t token;
  };
  void expect_poison_stays(const Inputs& clean, const Poison& poison, Values Inputs::*tensor);
};

// ---- Masks and lengths

TEST_P(Faults, FullMaskEqualsDenseForEveryLength) {
  EXPECT_TRUE(is_exact_for_every_length(on({.head_dim = 16, .segments = {{1025, 1025}}})));
}

TEST_P(Faults, RandomMasksOfEveryDensity) {
  uint64_t seed = 1;
  for (const float density : {0.f, 0.02f, 0.1f, 0.3f, 0.5f, 0.8f, 0.97f}) {
    for (const int64_t block_size : {64, 128}) {
      for (const bool causal : {true, false}) {
        EXPECT_TRUE(is_exact(make_inputs(on({.num_q_heads = 3,
                                             .head_dim = 32,
                                             .segments = {{300, 700}},
                                             .dtype = dtypes()[seed % dtypes().size()],
                                             .causal = causal,
                                             .block_size = block_size,
                                             .density = density,
                                             .seed = ++seed}))));
      }
    }
  }
}

TEST_P(Faults, MaskWithoutTheDiagonal) {
  const Inputs inputs =
      make_inputs(on({.num_q_heads = 2, .head_dim = 32, .segments = {{500, 500}}}));
  const Call call(inputs);
  OwnedMask mask = mask_of(inputs, call.attention);
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t row = 0; row < mask.mask.num_q_blocks; ++row) mask.set(head, row, row, false);
  }
  EXPECT_TRUE(matches(run_attend(inputs, call, mask), truth_of(inputs, mask)));
}

TEST_P(Faults, BitsOfInvisibleBlocksAreIgnored) {
  for (const bool causal : {true, false}) {
    const Inputs inputs = make_inputs(on({.num_q_heads = 2,
                                          .head_dim = 16,
                                          .segments = {{300, 500}, {70, 90}},
                                          .padding = 3,
                                          .causal = causal,
                                          .density = 0.5f}));
    const Call call(inputs);
    OwnedMask mask = mask_of(inputs, call.attention);
    const Outcome expected = run_attend(inputs, call, mask);
    for (const MaskRows& rows : mask_rows(inputs, 128)) {
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        for (int64_t head = 0; head < 2; ++head) {
          const int64_t end = 32 * mask.mask.words_per_row();
          for (int64_t block = rows.limit(row, causal); block < end; ++block) {
            mask.set(head, rows.first_row + row, block);
          }
        }
      }
    }
    EXPECT_TRUE(same_bits(run_attend(inputs, call, mask), expected)) << "causal " << causal;
  }
}

// E1: rows 384 to 511 are exactly 0 and -inf, written over the NaN; the others do not change.
TEST_P(Faults, EmptyRowBlock) {
  for (const DType dtype : dtypes()) {
    const Inputs inputs = make_inputs(
        on({.num_q_heads = 2, .head_dim = 64, .segments = {{700, 700}}, .dtype = dtype}));
    const Call call(inputs);
    OwnedMask mask = mask_of(inputs, call.attention);
    const Outcome full = run_attend(inputs, call, mask);
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t block = 0; block <= 3; ++block) mask.set(head, 3, block, false);
    }
    const Outcome outcome = run_attend(inputs, call, mask);
    EXPECT_TRUE(same_bits(cut(outcome, 0, 384, {0, 1}), cut(full, 0, 384, {0, 1})));
    EXPECT_TRUE(same_bits(cut(outcome, 512, 700, {0, 1}), cut(full, 512, 700, {0, 1})));
    const Outcome empty = cut(outcome, 384, 512, {0, 1});
    EXPECT_TRUE(same_bits(empty.out.data, std::vector<float>(empty.out.data.size(), 0.f), "out"));
    EXPECT_TRUE(same_bits(empty.lse, std::vector<float>(empty.lse.size(), -kInf), "lse"));
  }
}

// E2: without keys the log of the empty sum is -inf, never +inf.
TEST_P(Faults, SequenceWithoutKeys) {
  const Inputs inputs = make_inputs(on({.head_dim = 16, .segments = {{3, 3}, {200, 0}, {4, 4}}}));
  const Outcome empty =
      cut(run_attend(inputs, mask_of(inputs, Call(inputs).attention)), inputs.segments[1]);
  EXPECT_TRUE(same_bits(empty.out.data, std::vector<float>(empty.out.data.size(), 0.f), "out"));
  EXPECT_TRUE(same_bits(empty.lse, std::vector<float>(200, -kInf), "lse"));
}

// ---- Numbers

inline void scale(Values& values, float factor, DType dtype) {
  for (float& value : values.data) value *= factor;
  values.round(dtype);
}

// C1: keys that do not exist must not join with weight exp(0) when every true score is below -20.
TEST_P(Faults, AllScoresFarBelowZero) {
  for (const int64_t length : {1, 63, 127, 128, 129, 255, 513}) {
    for (const bool causal : {true, false}) {
      for (const DType dtype : dtypes()) {
        Inputs inputs = make_inputs(on({.head_dim = 64,
                                        .segments = {{length, length}},
                                        .dtype = dtype,
                                        .causal = causal,
                                        .block_size = length % 2 ? 128 : 64}));
        for (int64_t token = 0; token < length; ++token) {
          inputs.q.row(token, 0)[0] = 16;
          inputs.k.row(token, 0)[0] = -16;  // -32 after scaling, +- a few
        }
        EXPECT_TRUE(is_exact(inputs));
      }
    }
  }
}

TEST_P(Faults, LogitsTimesThirty) {
  for (const DType dtype : dtypes()) {
    Inputs inputs = make_inputs(on({.num_q_heads = 2,
                                    .head_dim = 64,
                                    .segments = {{260, 400}},
                                    .dtype = dtype,
                                    .density = 0.8f}));
    scale(inputs.q, 30, dtype);
    EXPECT_TRUE(is_exact(inputs));
  }
}

TEST_P(Faults, ScaleIsHonoured) {
  for (const float softmax_scale : {1e-6f, 0.03f, 0.5f, 3.f}) {
    Inputs inputs = make_inputs(on({.num_q_heads = 2, .head_dim = 40, .segments = {{130, 260}}}));
    inputs.softmax_scale = softmax_scale;
    EXPECT_TRUE(is_exact(inputs));
  }
}

// One key takes all: first, inside and last.
TEST_P(Faults, OneHotKey) {
  for (const int64_t hot : {0, 300, 499}) {
    for (const DType dtype : dtypes()) {
      Inputs inputs = make_inputs(
          on({.head_dim = 64, .segments = {{500, 500}}, .dtype = dtype, .causal = false}));
      for (int64_t token = 0; token < 500; ++token) inputs.q.row(token, 0)[0] = 20;
      inputs.k.row(hot, 0)[0] = 40;  // score 100
      EXPECT_TRUE(is_exact(inputs));
      const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
      for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(outcome.out.row(7, 0)[i], inputs.v.row(hot, 0)[i]);
    }
  }
}

// A sink that holds .999 of the mass: what is left decides, and must not be lost in rounding.
TEST_P(Faults, SinkHoldsAlmostAll) {
  for (const DType dtype : dtypes()) {
    Inputs inputs = make_inputs(on({.num_q_heads = 2,
                                    .head_dim = 64,
                                    .segments = {{600, 600}},
                                    .dtype = dtype,
                                    .density = 0.9f}));
    for (int64_t token = 0; token < 600; ++token) {
      for (int64_t head = 0; head < 2; ++head) inputs.q.row(token, head)[0] = 8;
    }
    inputs.k.row(0, 0)[0] = 13.5f;  // about ln(600 * 1000)
    EXPECT_TRUE(is_exact(inputs));
  }
}

// Equal keys: row i averages the first i + 1 values, and lse is the natural log of their number.
TEST_P(Faults, ConstantKeysGiveMeansAndNaturalLogs) {
  Inputs inputs = make_inputs(on({.head_dim = 32, .segments = {{400, 400}}}));
  std::fill(inputs.k.data.begin(), inputs.k.data.end(), 0.f);
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Truth truth = truth_of(inputs, mask);
  EXPECT_TRUE(matches(run_attend(inputs, mask), truth));
  for (size_t i = 0; i < 400; ++i)
    ASSERT_NEAR(truth.lse.reference[i], std::log(static_cast<double>(i + 1)), 1e-12);
  std::fill(inputs.v.data.begin(), inputs.v.data.end(), 2.5f);
  EXPECT_TRUE(is_exact(inputs));
}

// Adding one vector to all keys adds one number to all logits of a row: out stays, lse moves.
TEST_P(Faults, ShiftOfAllLogitsChangesNothing) {
  Inputs inputs = make_inputs(
      on({.num_q_heads = 2, .head_dim = 32, .segments = {{200, 300}}, .density = 0.7f}));
  for (float& value : inputs.k.data)
    value = std::nearbyint(value * 16) / 16;  // so that sums are exact
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  Inputs shifted = inputs;
  for (int64_t token = 0; token < 300; ++token) {
    for (int64_t i = 0; i < 32; ++i) shifted.k.row(token, 0)[i] += static_cast<float>(i % 5) - 1;
  }
  Truth truth = truth_of(shifted, mask);
  const Truth unshifted = truth_of(inputs, mask);
  for (size_t i = 0; i < truth.out.reference.size(); ++i) {
    ASSERT_NEAR(truth.out.reference[i], unshifted.out.reference[i], 1e-12);
  }
  EXPECT_TRUE(matches(run_attend(shifted, mask), truth));
}

// G2: v of kv head j is j, so head h must give h / group_size.
TEST_P(Faults, QueryHeadsReadTheirKvHead) {
  Inputs inputs = make_inputs(
      on({.num_q_heads = 28, .num_kv_heads = 4, .head_dim = 8, .segments = {{140, 140}}}));
  for (int64_t token = 0; token < 140; ++token) {
    for (int64_t head = 0; head < 4; ++head)
      std::fill_n(inputs.v.row(token, head), inputs.v.dim, static_cast<float>(head));
  }
  EXPECT_TRUE(is_exact(inputs));
  const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
  for (int64_t head = 0; head < 28; ++head)
    EXPECT_NEAR(outcome.out.row(139, head)[3], static_cast<double>(head / 7),
                is_cuda() ? 0.03 : 1e-5);
}

// M1: what comes after a token changes nothing for it, not a bit.
TEST_P(Faults, TheFutureDoesNotMatter) {
  const Inputs inputs = make_inputs(
      on({.num_q_heads = 2, .head_dim = 32, .segments = {{333, 333}}, .dtype = DType::kBFloat16}));
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome expected = run_attend(inputs, mask);
  const Truth truth = truth_of(inputs, mask);
  for (const int64_t token : {1, 100, 127, 128, 200, 332}) {
    Inputs changed = inputs;
    for (Values* values : {&changed.k, &changed.v}) {
      std::fill(values->row(token, 0), values->row(0, 0) + values->data.size(), 77.f);
    }
    const Outcome outcome = run_attend(changed, mask);
    const int64_t sure = tile_begin(token);
    EXPECT_TRUE(same_bits(cut(outcome, 0, sure, {0, 1}), cut(expected, 0, sure, {0, 1}))) << token;
    EXPECT_TRUE(matches(cut(outcome, 0, token, {0, 1}), cut(truth, 0, token, {0, 1}))) << token;
  }
}

// Calls from several threads at once do not disturb one another.
TEST_P(Faults, ConcurrentCalls) {
  const Inputs inputs = make_inputs(on({.num_q_heads = 2,
                                        .head_dim = 64,
                                        .segments = {{400, 600}},
                                        .density = 0.6f,
                                        .num_threads = 2}));
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome expected = run_attend(inputs, mask);
  std::vector<Outcome> outcomes(4);
  std::vector<std::thread> threads;
  for (Outcome& outcome : outcomes)
    threads.emplace_back([&] { outcome = run_attend(inputs, mask); });
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : outcomes) EXPECT_TRUE(same_bits(outcome, expected));
}

// ---- NaN and Inf: a row that sees one gives what dense attention gives, any other gives its bits.
// On CUDA a row whose block visits the key without seeing it may be computed in another way, and,
// since the tensor cores multiply a weight of 0 by what they are given, may become NaN where v is.

inline void Faults::expect_poison_stays(const Inputs& clean, const Poison& poison,
                                        Values Inputs::*tensor) {
  constexpr int64_t kDim = 5;
  SCOPED_TRACE(std::string(poison.where) + " of token " + std::to_string(poison.token) + " is " +
               std::to_string(poison.value));
  const OwnedMask mask = mask_of(clean, Call(clean).attention);
  const Outcome expected = run_attend(clean, mask);
  Inputs poisoned = clean;
  (poisoned.*tensor).row(poison.token, 0)[kDim] = poison.value;
  Outcome outcome = run_attend(poisoned, mask);
  const Truth truth = truth_of(poisoned, mask);
  const Segment& segment = clean.segments[0];
  const MaskRows rows = mask_rows(clean, 128)[0];
  int64_t num_clean = 0;
  for (int64_t i = 0; i < segment.q_len; ++i) {
    const int64_t position = segment.kv_len - segment.q_len + i,
                  row = position / 128 - rows.first_q_block;
    for (int64_t head = 0; head < clean.q.heads; ++head) {
      const bool visits = mask.at(head, row, poison.token / 128);
      const bool sees = visits && poison.token <= position;
      if (is_cuda() && visits && tensor == &Inputs::v) {
        float& got = outcome.out.row(i, head)[kDim];
        EXPECT_FALSE(sees && std::isfinite(got)) << "query " << i << " head " << head;
        const int64_t element = (i * clean.q.heads + head) * clean.q.dim + kDim;
        got = static_cast<float>(truth.out.reference[static_cast<size_t>(element)]);
      }
      if (is_cuda() ? visits : sees) continue;
      ++num_clean;
      ASSERT_TRUE(same_bits(cut(outcome, i, i + 1, {head}), cut(expected, i, i + 1, {head})))
          << "query " << i << " head " << head;
    }
  }
  EXPECT_GT(num_clean, 0);
  EXPECT_TRUE(matches(outcome, truth));
}

TEST_P(Faults, NaNAndInfReachOnlyRowsThatSeeThem) {
  for (const DType dtype : dtypes()) {
    const Inputs clean = make_inputs(on({.num_q_heads = 3,
                                         .head_dim = 16,
                                         .segments = {{170, 450}},
                                         .dtype = dtype,
                                         .density = 0.6f,
                                         .seed = 4}));
    for (const float value : {kNaN, kInf, -kInf}) {
      for (const int64_t token : {60, 255, 256, 300, 440}) {
        expect_poison_stays(clean, {"k", value, token}, &Inputs::k);
        expect_poison_stays(clean, {"v", value, token}, &Inputs::v);
      }
    }
  }
}

TEST_P(Faults, NaNInAQueryStaysInItsRow) {
  const Inputs clean = make_inputs(
      on({.num_q_heads = 2, .head_dim = 16, .segments = {{200, 300}}, .density = 0.8f}));
  const OwnedMask mask = mask_of(clean, Call(clean).attention);
  const Outcome expected = run_attend(clean, mask);
  Inputs poisoned = clean;
  poisoned.q.row(77, 1)[3] = kNaN;
  const Outcome outcome = run_attend(poisoned, mask);
  EXPECT_TRUE(matches(outcome, truth_of(poisoned, mask)));
  EXPECT_TRUE(same_bits(cut(outcome, 0, 200, {0}), cut(expected, 0, 200, {0})));
  // Query 77 is at position 177 of its keys.
  const int64_t begin = tile_begin(177) - 100, end = std::min<int64_t>(tile_end(177) - 100, 200);
  EXPECT_TRUE(same_bits(cut(outcome, 0, begin, {1}), cut(expected, 0, begin, {1})));
  EXPECT_TRUE(same_bits(cut(outcome, end, 200, {1}), cut(expected, end, 200, {1})));
}

// A first block that scores -inf throughout weighs nothing once another block is seen.
TEST_P(Faults, BlockOfMinusInfinityWeighsNothing) {
  for (const DType dtype : dtypes()) {
    Inputs inputs = make_inputs(on({.head_dim = 16, .segments = {{150, 500}}, .dtype = dtype}));
    for (int64_t token = 0; token < 150; ++token) inputs.q.row(token, 0)[2] = 1;
    for (int64_t token = 0; token < 256; ++token) inputs.k.row(token, 0)[2] = -kInf;
    EXPECT_TRUE(is_exact(inputs));
  }
}

}  // namespace crisp::test
