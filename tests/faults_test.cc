// faults_test.cc - the classes of fault that users of attention kernels report, as far as a CPU can
// show them: masks, empty rows, tails, NaN and Inf, extreme logits, many segments.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// ---- Masks and lengths

TEST(Faults, FullMaskEqualsDenseForEveryLength) {
  EXPECT_TRUE(is_exact_for_every_length({.head_dim = 16, .segments = {{1025, 1025}}}));
}

TEST(Faults, RandomMasksOfEveryDensity) {
  uint64_t seed = 1;
  for (const float density : {0.f, 0.02f, 0.1f, 0.3f, 0.5f, 0.8f, 0.97f}) {
    for (const int64_t block_size : {64, 128}) {
      for (const bool causal : {true, false}) {
        EXPECT_TRUE(is_exact(make_inputs({.num_q_heads = 3,
                                          .head_dim = 32,
                                          .segments = {{300, 700}},
                                          .dtype = kDTypes[seed % 3],
                                          .causal = causal,
                                          .block_size = block_size,
                                          .density = density,
                                          .seed = ++seed})));
      }
    }
  }
}

TEST(Faults, MaskWithoutTheDiagonal) {
  const Inputs inputs = make_inputs({.num_q_heads = 2, .head_dim = 32, .segments = {{500, 500}}});
  const Call call(inputs);
  OwnedMask mask = mask_of(inputs, call.attention);
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t row = 0; row < mask.mask.num_q_blocks; ++row) mask.set(head, row, row, false);
  }
  EXPECT_TRUE(matches(run_attend(inputs, call, mask), truth_of(inputs, mask)));
}

TEST(Faults, BitsOfInvisibleBlocksAreIgnored) {
  for (const bool causal : {true, false}) {
    const Inputs inputs = make_inputs({.num_q_heads = 2,
                                       .head_dim = 16,
                                       .segments = {{300, 500}, {70, 90}},
                                       .padding = 3,
                                       .causal = causal,
                                       .density = 0.5f});
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
TEST(Faults, EmptyRowBlock) {
  for (const DType dtype : kDTypes) {
    const Inputs inputs =
        make_inputs({.num_q_heads = 2, .head_dim = 64, .segments = {{700, 700}}, .dtype = dtype});
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
TEST(Faults, SequenceWithoutKeys) {
  const Inputs inputs = make_inputs({.head_dim = 16, .segments = {{3, 3}, {200, 0}, {4, 4}}});
  const Outcome empty =
      cut(run_attend(inputs, mask_of(inputs, Call(inputs).attention)), inputs.segments[1]);
  EXPECT_TRUE(same_bits(empty.out.data, std::vector<float>(200 * 16, 0.f), "out"));
  EXPECT_TRUE(same_bits(empty.lse, std::vector<float>(200, -kInf), "lse"));
}

// B2: more sequences than any launch grid has rows. Queries repeat every 1,000 sequences.
TEST(Faults, SeventyThousandSequences) {
  constexpr int64_t kDistinct = 1000, kRepeats = 70, kTokens = 16, kDim = 64;
  const Inputs inputs =
      make_inputs({.head_dim = kDim,
                   .segments = std::vector<Lengths>(kDistinct, {kTokens, kTokens}),
                   .dtype = DType::kBFloat16});
  Call call(inputs);
  const size_t chunk = static_cast<size_t>(kDistinct * kTokens * kDim) * 2;  // bytes
  std::vector<std::byte> q(chunk * kRepeats);
  std::vector<Segment> segments;
  for (int64_t repeat = 0; repeat < kRepeats; ++repeat) {
    std::memcpy(q.data() + static_cast<size_t>(repeat) * chunk, call.attention.q.data, chunk);
    for (Segment segment : inputs.segments) {
      segment.q_start += repeat * kDistinct * kTokens;
      segments.push_back(segment);
    }
  }
  Attention many = call.attention;
  many.q.data = q.data();
  many.q.num_tokens *= kRepeats;
  many.segments = segments;
  OwnedMask mask(many, 128);
  for (int64_t row = 0; row < kDistinct * kRepeats; ++row) mask.set(0, row, 0);
  Guarded out(q.size()), lse(static_cast<size_t>(many.q.num_tokens) * sizeof(float));
  Context context;
  context.num_threads = 2;
  Guarded workspace(workspace_bytes(many, Dense{}, mask.mask, context));
  context.workspace = workspace.bytes();
  Tensor result{out.data(), DType::kBFloat16, many.q.num_tokens, 1, kDim, kDim, kDim};
  attend(many, mask.mask, result, lse.as<float>(), context);
  EXPECT_TRUE(out.intact() && lse.intact() && workspace.intact());

  Outcome first{Values(kDistinct * kTokens, 1, kDim), {}};
  for (size_t i = 0; i < first.out.data.size(); ++i)
    first.out.data[i] = load(DType::kBFloat16, out.data() + 2 * i);
  first.lse.assign(lse.as<float>().begin(), lse.as<float>().begin() + kDistinct * kTokens);
  EXPECT_TRUE(matches(first, truth_of(inputs, mask_of(inputs, call.attention))));
  for (size_t repeat = 1; repeat < kRepeats; ++repeat) {
    ASSERT_EQ(std::memcmp(out.data() + repeat * chunk, out.data(), chunk), 0) << repeat;
    ASSERT_EQ(std::memcmp(lse.data() + repeat * chunk / kDim * 2, lse.data(), chunk / kDim * 2), 0)
        << repeat;
  }
}

// ---- Numbers

void scale(Values& values, float factor, DType dtype) {
  for (float& value : values.data) value *= factor;
  values.round(dtype);
}

// C1: keys that do not exist must not join with weight exp(0) when every true score is below -20.
TEST(Faults, AllScoresFarBelowZero) {
  for (const int64_t length : {1, 63, 127, 128, 129, 255, 513}) {
    for (const bool causal : {true, false}) {
      for (const DType dtype : kDTypes) {
        Inputs inputs = make_inputs({.head_dim = 64,
                                     .segments = {{length, length}},
                                     .dtype = dtype,
                                     .causal = causal,
                                     .block_size = length % 2 ? 128 : 64});
        for (int64_t token = 0; token < length; ++token) {
          inputs.q.row(token, 0)[0] = 16;
          inputs.k.row(token, 0)[0] = -16;  // -32 after scaling, +- a few
        }
        EXPECT_TRUE(is_exact(inputs));
      }
    }
  }
}

TEST(Faults, LogitsTimesThirty) {
  for (const DType dtype : kDTypes) {
    Inputs inputs = make_inputs({.num_q_heads = 2,
                                 .head_dim = 64,
                                 .segments = {{260, 400}},
                                 .dtype = dtype,
                                 .density = 0.8f});
    scale(inputs.q, 30, dtype);
    EXPECT_TRUE(is_exact(inputs));
  }
}

TEST(Faults, ScaleIsHonoured) {
  for (const float softmax_scale : {1e-6f, 0.03f, 0.5f, 3.f}) {
    Inputs inputs = make_inputs({.num_q_heads = 2, .head_dim = 40, .segments = {{130, 260}}});
    inputs.softmax_scale = softmax_scale;
    EXPECT_TRUE(is_exact(inputs));
  }
}

// One key takes all: first, inside and last.
TEST(Faults, OneHotKey) {
  for (const int64_t hot : {0, 300, 499}) {
    for (const DType dtype : kDTypes) {
      Inputs inputs =
          make_inputs({.head_dim = 64, .segments = {{500, 500}}, .dtype = dtype, .causal = false});
      for (int64_t token = 0; token < 500; ++token) inputs.q.row(token, 0)[0] = 20;
      inputs.k.row(hot, 0)[0] = 40;  // score 100
      EXPECT_TRUE(is_exact(inputs));
      const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
      for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(outcome.out.row(7, 0)[i], inputs.v.row(hot, 0)[i]);
    }
  }
}

// A sink that holds .999 of the mass: what is left decides, and must not be lost in rounding.
TEST(Faults, SinkHoldsAlmostAll) {
  for (const DType dtype : kDTypes) {
    Inputs inputs = make_inputs({.num_q_heads = 2,
                                 .head_dim = 64,
                                 .segments = {{600, 600}},
                                 .dtype = dtype,
                                 .density = 0.9f});
    for (int64_t token = 0; token < 600; ++token) {
      for (int64_t head = 0; head < 2; ++head) inputs.q.row(token, head)[0] = 8;
    }
    inputs.k.row(0, 0)[0] = 13.5f;  // about ln(600 * 1000)
    EXPECT_TRUE(is_exact(inputs));
  }
}

// Equal keys: row i averages the first i + 1 values, and lse is the natural log of their number.
TEST(Faults, ConstantKeysGiveMeansAndNaturalLogs) {
  Inputs inputs = make_inputs({.head_dim = 32, .segments = {{400, 400}}});
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
TEST(Faults, ShiftOfAllLogitsChangesNothing) {
  Inputs inputs =
      make_inputs({.num_q_heads = 2, .head_dim = 32, .segments = {{200, 300}}, .density = 0.7f});
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
TEST(Faults, QueryHeadsReadTheirKvHead) {
  Inputs inputs =
      make_inputs({.num_q_heads = 28, .num_kv_heads = 4, .head_dim = 8, .segments = {{140, 140}}});
  for (int64_t token = 0; token < 140; ++token) {
    for (int64_t head = 0; head < 4; ++head)
      std::fill_n(inputs.v.row(token, head), 8, static_cast<float>(head));
  }
  EXPECT_TRUE(is_exact(inputs));
  const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
  for (int64_t head = 0; head < 28; ++head)
    EXPECT_NEAR(outcome.out.row(139, head)[3], static_cast<double>(head / 7), 1e-5);
}

// M1: what comes after a token changes nothing for it, not a bit.
TEST(Faults, TheFutureDoesNotMatter) {
  const Inputs inputs = make_inputs(
      {.num_q_heads = 2, .head_dim = 32, .segments = {{333, 333}}, .dtype = DType::kBFloat16});
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome expected = run_attend(inputs, mask);
  for (const int64_t token : {1, 100, 127, 128, 200, 332}) {
    Inputs changed = inputs;
    for (Values* values : {&changed.k, &changed.v}) {
      std::fill(values->row(token, 0), values->row(0, 0) + values->data.size(), 77.f);
    }
    EXPECT_TRUE(same_bits(cut(run_attend(changed, mask), 0, token, {0, 1}),
                          cut(expected, 0, token, {0, 1})))
        << token;
  }
}

// Calls from several threads at once do not disturb one another.
TEST(Faults, ConcurrentCalls) {
  const Inputs inputs = make_inputs({.num_q_heads = 2,
                                     .head_dim = 64,
                                     .segments = {{400, 600}},
                                     .density = 0.6f,
                                     .num_threads = 2});
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome expected = run_attend(inputs, mask);
  std::vector<Outcome> outcomes(4);
  std::vector<std::thread> threads;
  for (Outcome& outcome : outcomes)
    threads.emplace_back([&] { outcome = run_attend(inputs, mask); });
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : outcomes) EXPECT_TRUE(same_bits(outcome, expected));
}

// ---- NaN and Inf: a row that sees one gives what dense attention gives; any other gives its bits.

struct Poison {
  const char* where;
  float value;
  int64_t token;
};

void expect_poison_stays(const Inputs& clean, const Poison& poison, Values Inputs::*tensor) {
  SCOPED_TRACE(std::string(poison.where) + " of token " + std::to_string(poison.token) + " is " +
               std::to_string(poison.value));
  const OwnedMask mask = mask_of(clean, Call(clean).attention);
  const Outcome expected = run_attend(clean, mask);
  Inputs poisoned = clean;
  (poisoned.*tensor).row(poison.token, 0)[5] = poison.value;
  const Outcome outcome = run_attend(poisoned, mask);
  EXPECT_TRUE(matches(outcome, truth_of(poisoned, mask)));
  const Segment& segment = clean.segments[0];
  const MaskRows rows = mask_rows(clean, 128)[0];
  int64_t num_clean = 0;
  for (int64_t i = 0; i < segment.q_len; ++i) {
    const int64_t position = segment.kv_len - segment.q_len + i,
                  row = position / 128 - rows.first_q_block;
    for (int64_t head = 0; head < clean.q.heads; ++head) {
      const bool sees = poison.token <= position && mask.at(head, row, poison.token / 128);
      if (sees) continue;
      ++num_clean;
      ASSERT_TRUE(same_bits(cut(outcome, i, i + 1, {head}), cut(expected, i, i + 1, {head})))
          << "query " << i << " head " << head;
    }
  }
  EXPECT_GT(num_clean, 0);
}

TEST(Faults, NaNAndInfReachOnlyRowsThatSeeThem) {
  for (const DType dtype : kDTypes) {
    const Inputs clean = make_inputs({.num_q_heads = 3,
                                      .head_dim = 16,
                                      .segments = {{170, 450}},
                                      .dtype = dtype,
                                      .density = 0.6f,
                                      .seed = 4});
    for (const float value : {kNaN, kInf, -kInf}) {
      for (const int64_t token : {60, 255, 256, 300, 440}) {
        expect_poison_stays(clean, {"k", value, token}, &Inputs::k);
        expect_poison_stays(clean, {"v", value, token}, &Inputs::v);
      }
    }
  }
}

TEST(Faults, NaNInAQueryStaysInItsRow) {
  const Inputs clean =
      make_inputs({.num_q_heads = 2, .head_dim = 16, .segments = {{200, 300}}, .density = 0.8f});
  const OwnedMask mask = mask_of(clean, Call(clean).attention);
  const Outcome expected = run_attend(clean, mask);
  Inputs poisoned = clean;
  poisoned.q.row(77, 1)[3] = kNaN;
  const Outcome outcome = run_attend(poisoned, mask);
  EXPECT_TRUE(matches(outcome, truth_of(poisoned, mask)));
  EXPECT_TRUE(same_bits(cut(outcome, 0, 200, {0}), cut(expected, 0, 200, {0})));
  EXPECT_TRUE(same_bits(cut(outcome, 0, 77, {1}), cut(expected, 0, 77, {1})));
  EXPECT_TRUE(same_bits(cut(outcome, 78, 200, {1}), cut(expected, 78, 200, {1})));
}

// A first block that scores -inf throughout weighs nothing once another block is seen.
TEST(Faults, BlockOfMinusInfinityWeighsNothing) {
  for (const DType dtype : kDTypes) {
    Inputs inputs = make_inputs({.head_dim = 16, .segments = {{150, 500}}, .dtype = dtype});
    for (int64_t token = 0; token < 150; ++token) inputs.q.row(token, 0)[2] = 1;
    for (int64_t token = 0; token < 256; ++token) inputs.k.row(token, 0)[2] = -kInf;
    EXPECT_TRUE(is_exact(inputs));
  }
}

}  // namespace
}  // namespace crisp::test
