// small.cc - a few small calls that reach every kernel: what compute-sanitizer is run on.
#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

class Small : public OnBackend {};

TEST_P(Small, Contiguous) {
  for (const int64_t head_dim : {128, 64}) {
    EXPECT_TRUE(is_exact(make_inputs(exactly({.num_q_heads = 2,
                                              .head_dim = head_dim,
                                              .segments = {{130, 300}},
                                              .dtype = DType::kBFloat16,
                                              .density = 0.8f}))));
  }
}

TEST_P(Small, OtherHeadDims) {
  for (const int64_t head_dim : {8, 96, 256}) {
    EXPECT_TRUE(is_exact(make_inputs(exactly({.num_q_heads = 2,
                                              .head_dim = head_dim,
                                              .segments = {{70, 200}},
                                              .dtype = DType::kFloat16,
                                              .causal = head_dim != 96,
                                              .block_size = head_dim == 8 ? 64 : 128}))));
  }
}

TEST_P(Small, SegmentsInPages) {
  for (const int64_t page_size : {1, 16, 128}) {
    EXPECT_TRUE(is_exact(make_inputs(exactly({.num_q_heads = 4,
                                              .num_kv_heads = 2,
                                              .head_dim = 128,
                                              .segments = {{40, 129}, {0, 0}, {9, 0}, {65, 70}},
                                              .padding = 16,
                                              .dtype = DType::kFloat16,
                                              .page_size = page_size}))));
  }
}

TEST_P(Small, OddStrides) {
  EXPECT_TRUE(is_exact(make_inputs(exactly({.num_q_heads = 2,
                                            .head_dim = 40,
                                            .segments = {{70, 133}},
                                            .dtype = DType::kBFloat16,
                                            .layout = Layout::kOddStrides}))));
}

// A tile that is computed again.
TEST_P(Small, AKeyFarAboveTheRest) {
  Inputs inputs = make_inputs(exactly(
      {.num_q_heads = 2, .head_dim = 128, .segments = {{140, 400}}, .dtype = DType::kBFloat16}));
  for (int64_t token = 0; token < 140; ++token) inputs.q.row(token, 1)[0] = 16;
  inputs.k.row(5, 0)[0] = 100;
  EXPECT_TRUE(is_exact(inputs));
}

TEST_P(Small, MasksAndPrefill) {
  const Inputs inputs = make_inputs(exactly({.num_q_heads = 2,
                                             .head_dim = 64,
                                             .segments = {{140, 300}, {20, 20}},
                                             .dtype = DType::kFloat16,
                                             .density = 0.5f}));
  const OwnedMask user = mask_of(inputs, Call(inputs).attention);
  EXPECT_TRUE(matches(run_prefill(inputs, &user), truth_of(inputs, user)));
  run_select(inputs);
}
CRISP_ON_CUDA(Small);

}  // namespace
}  // namespace crisp::test
