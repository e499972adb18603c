// large_logits.cc - logits that a softmax with a fixed reference cannot hold: the reference of a
// row is the largest score of the first block it visits, so that a key far above it in a later
// block must send the tile to be computed again. The online softmax must pass the same cases.
#include <cmath>

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

class LargeLogits : public OnBackend {
 protected:
  static constexpr float kQuery = 16;

  // Two heads of 260 queries against 400 keys; dimension 0 is free for what is planted: queries
  // hold kQuery there where `is_hot`, keys nothing.
  Inputs base(DType dtype, int64_t head_dim, float density, int64_t hot_every) const {
    Inputs inputs = make_inputs(exactly({.num_q_heads = 2,
                                         .head_dim = head_dim,
                                         .segments = {{260, 400}},
                                         .dtype = dtype,
                                         .density = density,
                                         .seed = 11}));
    for (int64_t token = 0; token < inputs.q.tokens; ++token) {
      for (int64_t head = 0; head < 2; ++head)
        inputs.q.row(token, head)[0] = token % hot_every == 0 ? kQuery : 0;
    }
    for (int64_t token = 0; token < inputs.k.tokens; ++token) inputs.k.row(token, 0)[0] = 0;
    return inputs;
  }
  // Raises the logits that hot queries have of this key by `nats`.
  void plant(Inputs& inputs, int64_t key, float nats) const {
    inputs.k.row(key, 0)[0] = round_to(inputs.config.dtype, nats / (kQuery * inputs.softmax_scale));
  }
  void expect_exact_twice(const Inputs& inputs) const {
    const Call call(inputs);
    const OwnedMask mask = mask_of(inputs, call.attention);
    const Outcome outcome = run_attend(inputs, call, mask);
    EXPECT_TRUE(matches(outcome, truth_of(inputs, mask)));
    EXPECT_TRUE(same_bits(run_attend(inputs, call, mask), outcome)) << inputs.config;
  }
};

// In the first block, inside, and in a diagonal block; for every query, and for a few of a tile.
TEST_P(LargeLogits, PlantedKeys) {
  for (const DType dtype : dtypes()) {
    for (const int64_t head_dim : {64, 128, 80}) {
      for (const float nats : {5.f, 10.f, 12.f, 20.f, 43.f, 46.f, 60.f, 300.f}) {
        for (const int64_t key : {0, 5, 140, 255, 256, 399}) {
          Inputs inputs = base(dtype, head_dim, 1, key % 2 == 0 ? 1 : 37);
          plant(inputs, key, nats);
          expect_exact_twice(inputs);
        }
      }
    }
  }
}

// The diagonal block is far below everything else, or absent.
TEST_P(LargeLogits, LowDiagonal) {
  for (const DType dtype : dtypes()) {
    for (const float nats : {-20.f, -60.f, -300.f}) {
      Inputs inputs = base(dtype, 128, 0.6f, 1);
      for (int64_t key = 256; key < 400; ++key) plant(inputs, key, nats);
      expect_exact_twice(inputs);
    }
  }
}

// Every block further from the diagonal is a little above the one before, so that only the sum of
// many grows out of range.
TEST_P(LargeLogits, Slope) {
  for (const DType dtype : dtypes()) {
    for (const float nats_per_block : {2.f, 9.f, 15.f, 30.f}) {
      Inputs inputs = base(dtype, 128, 1, 1);
      for (int64_t key = 0; key < 400; ++key)
        plant(inputs, key, nats_per_block * static_cast<float>(3 - key / 128));
      expect_exact_twice(inputs);
    }
  }
}

// A few tiles of many, spread over heads and segments.
TEST_P(LargeLogits, AFewTilesOfMany) {
  for (const DType dtype : dtypes()) {
    Inputs inputs = make_inputs(exactly({.num_q_heads = 8,
                                         .num_kv_heads = 4,
                                         .head_dim = 128,
                                         .segments = {{300, 300}, {40, 700}, {513, 600}},
                                         .padding = 16,
                                         .dtype = dtype,
                                         .density = 0.8f,
                                         .seed = 3}));
    const Segment& last = inputs.segments[2];
    inputs.q.row(last.q_start + 400, 5)[0] = kQuery;
    inputs.k.row(last.kv_start + 100, 2)[0] = 60;
    inputs.k.row(inputs.segments[1].kv_start + 650, 1)[0] = -60;
    expect_exact_twice(inputs);
  }
}

TEST_P(LargeLogits, TimesThirty) {
  for (const DType dtype : dtypes()) {
    for (const int64_t head_dim : {64, 128, 96}) {
      Inputs inputs = base(dtype, head_dim, 0.8f, 1);
      for (float& value : inputs.q.data) value *= 30;
      inputs.q.round(dtype);
      expect_exact_twice(inputs);
    }
  }
}

// Rows without any difference between keys, and rows of zeros.
TEST_P(LargeLogits, ConstantRows) {
  for (const DType dtype : dtypes()) {
    Inputs inputs = base(dtype, 128, 0.7f, 1);
    std::fill(inputs.k.data.begin(), inputs.k.data.end(), 0.5f);
    expect_exact_twice(inputs);
    std::fill(inputs.q.data.begin(), inputs.q.data.end(), 0.f);
    expect_exact_twice(inputs);
  }
}

// One key takes all; what the others weigh must neither be lost nor grow.
TEST_P(LargeLogits, OneHotKeyGivesItsValue) {
  for (const DType dtype : dtypes()) {
    for (const int64_t key : {0, 140, 390}) {
      Inputs inputs = base(dtype, 128, 1, 1);
      plant(inputs, key, 300);
      const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
      for (int64_t i = 0; i < 128; ++i)
        ASSERT_EQ(outcome.out.row(259, 1)[i], inputs.v.row(key, 0)[i]) << key << " " << i;
    }
  }
}

CRISP_ON_CUDA(LargeLogits);

}  // namespace
}  // namespace crisp::test
