// policy_test.cc - the suite of whole selections on the CPU, and what holds for every policy there.
#include "policy/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "core/workspace.h"
#include "hwy/targets.h"
#include "policy_suite.h"
#include "proxy/proxy.h"
#include "run.h"
#include "structured.h"

namespace crisp::test {

CRISP_ON_CPU(Policies);

namespace {

bool same_report(const HeadReport& a, const HeadReport& b) {
  const auto same = [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  };
  return a.pattern == b.pattern && same(a.structural_mass, b.structural_mass) &&
         same(a.js_distance, b.js_distance) && a.num_vertical == b.num_vertical &&
         a.num_slash == b.num_slash && a.num_blocks == b.num_blocks;
}

TEST(Policy, BitEqualForEveryThreadCount) {
  for (const Policy& policy :
       {Policy{crisp_of(300)}, Policy{flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f)},
        Policy{Dense{}}}) {
    Case c = policy_case({{1500, 1700}, {900, 900}}, policy);
    const Selected one = run_select(structured_inputs(c));
    for (const int threads : {1, 2, 3, 7}) {
      c.num_threads = threads;
      const Selected other = run_select(structured_inputs(c));
      EXPECT_TRUE(other.mask == one.mask) << c;
      for (size_t entry = 0; entry < one.report.size(); ++entry) {
        EXPECT_TRUE(same_report(other.report[entry], one.report[entry])) << "entry " << entry << c;
      }
    }
  }
}

// The dispatch picks the widest vectors of the machine; narrower ones, down to one lane, must
// select the same blocks.
TEST(Policy, EveryInstructionSetLikeReference) {
  const int64_t supported = hwy::SupportedTargets();
  for (const int64_t target :
       {int64_t{HWY_SCALAR}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}, int64_t{HWY_NEON}}) {
    if ((supported & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    std::printf("target %s\n", cpu_target());
    for (const Policy& policy :
         {Policy{crisp_of(300)}, Policy{flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f)}}) {
      expect_like_reference(structured_inputs(policy_case({{900, 900}, {150, 391}}, policy)));
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

// More heads than one batch holds select what each does alone.
TEST(Policy, ManyHeadsInBatches) {
  Case c = policy_case({{130, 16384}}, crisp_of(300));
  c.num_q_heads = 96;
  c.num_kv_heads = 32;
  c.head_dim = 8;
  const Inputs inputs = structured_inputs(c);
  ASSERT_LT(proxy_heads_per_batch(Call(inputs).attention,
                                  segment_shape(inputs.segments[0], kBlockSize), Device::kCpu),
            96);
  const Selected all = run_select(inputs);
  for (const int64_t kv_head : {0, 15, 16, 17, 31}) {
    const int64_t h = 3 * kv_head;
    const Selected alone = run_select(take_heads(inputs, {h, h + 1, h + 2}, {kv_head}));
    const int64_t words = all.mask.mask.num_q_blocks * all.mask.mask.words_per_row();
    EXPECT_TRUE(std::equal(alone.mask.mask.words, alone.mask.mask.words + 3 * words,
                           all.mask.mask.words + h * words))
        << h;
    EXPECT_TRUE(same_report(alone.report[1], all.report[static_cast<size_t>(h) + 1])) << h;
  }
}

TEST(Policy, PeakWorkspaceIsWhatWasCounted) {
  const Case c = policy_case({{900, 1700}, {300, 300}, {1, 5000}}, crisp_of(300));
  const Inputs inputs = structured_inputs(c);
  const Call call(inputs);
  OwnedMask mask(call.attention, 128);
  for (const Policy& policy :
       {Policy{crisp_of(300)}, Policy{flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f)},
        Policy{flex_of(FlexPrefill::Variant::kPaper, 0.9f, 0.2f)}}) {
    std::visit(
        [&](const auto& chosen) {
          Context context{.num_threads = 3};
          const size_t bytes = select_workspace_bytes(call.attention, chosen, context);
          Guarded exact(bytes), short_of(bytes - Workspace::kAlignment);
          context.workspace = exact.bytes();
          run_policy(call.attention, chosen, mask.mask, context, {});
          EXPECT_TRUE(exact.intact());
          context.workspace = short_of.bytes();
          EXPECT_THROW(run_policy(call.attention, chosen, mask.mask, context, {}), Error);
          EXPECT_TRUE(short_of.intact());
        },
        policy);
  }
}

// Stages are told in the order data flows, on the calling thread, and every part is told.
TEST(Policy, StagesAreReported) {
  const Inputs inputs = structured_inputs(policy_case({{900, 900}, {100, 100}}, crisp_of(300)));
  const Call call(inputs);
  OwnedMask mask(call.attention, 128);
  std::vector<Stage> stages;
  Context context{.num_threads = 2};
  context.on_stage = [](Stage stage, void* user) {
    static_cast<std::vector<Stage>*>(user)->push_back(stage);
  };
  context.on_stage_user = &stages;
  Crisp policy = crisp_of(300);
  policy.dense_below_tokens = 500;
  const size_t bytes = select_workspace_bytes(call.attention, policy, context);
  EXPECT_TRUE(stages.empty()) << "counting the workspace is no work";
  Guarded workspace(bytes);
  context.workspace = workspace.bytes();
  run_policy(call.attention, policy, mask.mask, context, {});
  const std::vector<Stage> want = {Stage::kProxy,  Stage::kRoute, Stage::kSelect,
                                   Stage::kSelect, Stage::kMask,  Stage::kMask};
  EXPECT_EQ(stages, want);
}

}  // namespace
}  // namespace crisp::test
