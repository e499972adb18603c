// masks.cc - what CUDA writes into masks and reports is what the CPU writes.
#include <cmath>

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

void expect_same_selection(const Selected& cuda, const Selected& cpu, const Case& c) {
  EXPECT_TRUE(cuda.mask == cpu.mask) << c;
  ASSERT_EQ(cuda.report.size(), cpu.report.size());
  for (size_t i = 0; i < cpu.report.size(); ++i) {
    EXPECT_EQ(cuda.report[i].pattern, cpu.report[i].pattern) << c;
    EXPECT_EQ(cuda.report[i].num_blocks, cpu.report[i].num_blocks) << i << " " << c;
    EXPECT_EQ(cuda.report[i].num_vertical + cuda.report[i].num_slash, 0) << c;
    EXPECT_TRUE(std::isnan(cuda.report[i].structural_mass)) << c;
    EXPECT_TRUE(std::isnan(cuda.report[i].js_distance)) << c;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool causal : {true, false}) {
    for (const int64_t block_size : {64, 128}) {
      Case c{.num_q_heads = 3, .head_dim = 8, .causal = causal, .block_size = block_size};
      c.dtype = DType::kBFloat16;
      for (const std::vector<Lengths>& segments : {std::vector<Lengths>{{1, 1}},
                                                   {{700, 700}, {130, 4200}, {0, 300}, {1, 1}},
                                                   {{5, 0}, {64, 64}, {0, 0}},
                                                   {{9000, 9000}},
                                                   {{0, 0}}}) {
        c.segments = segments;
        all.push_back(c);
      }
    }
  }
  return all;
}

Case on_cuda(Case c) {
  c.device = Device::kCuda;
  return c;
}

TEST(Masks, DenseIsTheCpus) {
  for (const Case& c : cases()) {
    expect_same_selection(run_select(make_inputs(on_cuda(c))), run_select(make_inputs(c)), c);
  }
}

TEST(Masks, AUsersMaskIsCutAsOnTheCpu) {
  uint64_t seed = 1;
  for (const Case& c : cases()) {
    const Inputs cpu = make_inputs(c), cuda = make_inputs(on_cuda(c));
    OwnedMask user(Call(cpu).attention, c.block_size);
    Random random(++seed);
    for (uint32_t& word : user.memory().as<uint32_t>())
      word = static_cast<uint32_t>(random.bits());  // bits past every limit as well
    expect_same_selection(run_select(cuda, &user), run_select(cpu, &user), c);
  }
}

// The heads of a report and a mask are spread over more than one warp and one block.
TEST(Masks, ManyHeads) {
  const Case c{.num_q_heads = 600,
               .num_kv_heads = 600,
               .head_dim = 8,
               .segments = {{300, 300}, {10, 200}},
               .dtype = DType::kFloat16};
  expect_same_selection(run_select(make_inputs(on_cuda(c))), run_select(make_inputs(c)), c);
}

class Prefill : public OnBackend {};

// select_blocks, then attend.
TEST_P(Prefill, IsSelectionThenAttend) {
  for (const bool causal : {true, false}) {
    const Inputs inputs = make_inputs(on({.num_q_heads = 4,
                                          .num_kv_heads = 2,
                                          .head_dim = 64,
                                          .segments = {{300, 500}, {64, 64}},
                                          .padding = 16,
                                          .dtype = DType::kBFloat16,
                                          .causal = causal,
                                          .density = 0.5f}));
    const OwnedMask user = mask_of(inputs, Call(inputs).attention);
    EXPECT_TRUE(same_bits(run_prefill(inputs, &user), run_attend(inputs, user)));
    Inputs dense = inputs;
    dense.config.density = 1;
    const OwnedMask all = mask_of(dense, Call(dense).attention);
    EXPECT_TRUE(same_bits(run_prefill(dense), run_attend(dense, all)));
  }
}
CRISP_ON_CUDA(Prefill);

}  // namespace
}  // namespace crisp::test
