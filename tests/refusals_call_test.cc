// refusals_call_test.cc - masks, contexts, outputs and policies outside the contract are refused.
#include "core/device.h"
#include "refusals.h"

namespace crisp::test {
namespace {

TEST(Refusals, Masks) {
  const Refusal refusals[] = {
      {"block_size",
       kShapes,
       [](Bench& b) { b.block_mask.block_size = 32; },
       {"mask.block_size", "32", "64 or 128"}},
      {"mask of fewer heads",
       kShapes,
       [](Bench& b) { b.block_mask.num_heads = 2; },
       {"mask.num_heads", "2", "4"}},
      {"mask of other rows",
       kShapes,
       [](Bench& b) { b.block_mask.num_q_blocks = 9; },
       {"mask.num_q_blocks", "9", "4"}},
      {"mask of other columns",
       kShapes,
       [](Bench& b) { b.block_mask.num_kv_blocks = 3; },
       {"mask.num_kv_blocks", "3", "2"}},
      {"no words", kAll, [](Bench& b) { b.block_mask.words = nullptr; }, {"mask.words", "null"}},
      {"words misaligned",
       kAll,
       [](Bench& b) { b.block_mask.words += 1; },
       {"mask.words", "aligned to 8"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, Contexts) {
  const Refusal refusals[] = {
      {"float32 on CUDA, or no CUDA here",
       kShapes,
       [](Bench& b) { b.context.device = Device::kCuda; },
       {kWithCuda ? "q.dtype" : "context.device", "kCuda"}},
      {"unknown device",
       kShapes,
       [](Bench& b) { b.context.device = Device{9}; },
       {"context.device", "9"}},
      {"threads negative",
       kShapes,
       [](Bench& b) { b.context.num_threads = -1; },
       {"context.num_threads", "-1"}},
      {"too many threads",
       kShapes,
       [](Bench& b) { b.context.num_threads = 5000; },
       {"context.num_threads", "5000", "1024"}},
      {"no workspace",
       kAttends,
       [](Bench& b) { b.context.workspace = {}; },
       {"context.workspace", "0"}},
      {"workspace one byte short",
       kAttends,
       [](Bench& b) { b.context.workspace = b.context.workspace.first(b.bytes(Dense{}) - 1); },
       {"context.workspace", "workspace_bytes"}},
      {"workspace short for Crisp",
       kSelects,
       [](Bench& b) {
         b.policy = Crisp{.dense_below_tokens = 0},
         b.context.workspace = b.context.workspace.first(16);
       },
       {"context.workspace", "16"}},
      {"workspace misaligned",
       kAttends,
       [](Bench& b) { b.context.workspace = b.workspace_memory->bytes().subspan(64); },
       {"context.workspace", "aligned to 256"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, Outputs) {
  const Refusal refusals[] = {
      {"out null", kAttends, [](Bench& b) { b.out.data = nullptr; }, {"out.data", "null"}},
      {"out of another dtype",
       kAttends,
       [](Bench& b) { b.out.dtype = DType::kBFloat16; },
       {"out.dtype", "bfloat16", "float32"}},
      {"out of another shape", kAttends, [](Bench& b) { b.out.num_heads = 3; }, {"out", "3", "4"}},
      {"out rows on one another",
       kAttends,
       [](Bench& b) { b.out.token_stride = 0; },
       {"out.token_stride", "0", "apart"}},
      {"out heads on one another",
       kAttends,
       [](Bench& b) { b.out.head_stride = 8; },
       {"out.head_stride", "8", "apart"}},
      {"out misaligned",
       kAttends,
       [](Bench& b) { b.out.data = b.out_memory.data() + 1; },
       {"out.data", "aligned to 4"}},
      {"lse too short",
       kAttends,
       [](Bench& b) { b.lse = b.lse.first(100); },
       {"lse", "100", "1048"}},
      {"out over the workspace",
       kAttends,
       [](Bench& b) { b.out.data = b.workspace_memory->data(); },
       {"out", "overlaps", "workspace"}},
      {"lse over out",
       kAttends,
       [](Bench& b) { b.lse = b.out_memory.as<float>().first(b.lse.size()); },
       {"lse", "overlaps", "out"}},
      {"report too short",
       kSelects,
       [](Bench& b) { b.report = b.report.first(4); },
       {"report", "4", "8"}},
      {"mask over the workspace",
       kSelects,
       [](Bench& b) {
         b.policy = Crisp{.dense_below_tokens = 0},
         b.block_mask.words = b.workspace_memory->as<uint32_t>().data();
       },
       {"mask.words", "overlaps", "workspace"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

Refusal crisp_with(const char* what, void (*spoil)(Crisp&), std::vector<const char*> says) {
  return {what, kPolicy,
          [spoil](Bench& b) {
            Crisp policy;
            spoil(policy);
            b.policy = policy;
          },
          std::move(says)};
}

TEST(Refusals, Policies) {
  const Refusal refusals[] = {
      crisp_with("tau_proxy NaN", [](Crisp& p) { p.tau_proxy = kNaN; }, {"tau_proxy", "nan"}),
      crisp_with("tau_proxy negative", [](Crisp& p) { p.tau_proxy = -0.1f; },
                 {"tau_proxy", "-0.1", ">= 0"}),
      crisp_with("alpha 0", [](Crisp& p) { p.alpha = 0; }, {"alpha", "0", "> 0"}),
      crisp_with("gamma 0", [](Crisp& p) { p.gamma = 0; }, {"gamma", "0", "(0, 1]"}),
      crisp_with("gamma above 1", [](Crisp& p) { p.gamma = 1.5f; }, {"gamma", "1.5", "(0, 1]"}),
      crisp_with("tau_js Inf", [](Crisp& p) { p.tau_js = kInf; }, {"tau_js", "inf"}),
      crisp_with("sink_tokens 0", [](Crisp& p) { p.sink_tokens = 0; },
                 {"sink_tokens", "0", ">= 1"}),
      crisp_with("recency_tokens -4", [](Crisp& p) { p.recency_tokens = -4; },
                 {"recency_tokens", "-4", ">= 1"}),
      crisp_with("min_budget negative", [](Crisp& p) { p.min_budget_tokens = -1; },
                 {"min_budget_tokens", "-1"}),
      crisp_with("gate negative", [](Crisp& p) { p.dense_below_tokens = -1; },
                 {"dense_below_tokens", "-1"}),
      crisp_with("unknown floor", [](Crisp& p) { p.noise_floor = NoiseFloor{5}; },
                 {"noise_floor", "5"}),
      crisp_with("unknown routing", [](Crisp& p) { p.routing = Routing{5}; }, {"routing", "5"}),
      crisp_with("unknown selection", [](Crisp& p) { p.selection = Selection{5}; },
                 {"selection", "5"}),
      {"tau NaN", kPolicy, [](Bench& b) { b.policy = FlexPrefill{.tau = kNaN}; }, {"tau", "nan"}},
      {"gamma of FlexPrefill",
       kPolicy,
       [](Bench& b) { b.policy = FlexPrefill{.gamma = 2}; },
       {"gamma", "2", "(0, 1]"}},
      {"unknown variant",
       kPolicy,
       [](Bench& b) { b.policy = FlexPrefill{.variant = FlexPrefill::Variant{9}}; },
       {"variant", "9"}},
      {"Crisp without causality",
       kPolicy,
       [](Bench& b) { b.policy = Crisp{}, b.attention.causal = false; },
       {"causal", "false", "Crisp"}},
      {"FlexPrefill without causality",
       kPolicy,
       [](Bench& b) { b.policy = FlexPrefill{}, b.attention.causal = false; },
       {"causal", "false", "FlexPrefill"}},
      {"Crisp in blocks of 64",
       kPolicy,
       [](Bench& b) { b.policy = Crisp{}, b.block_mask = mask_for(b.attention, 64); },
       {"mask.block_size", "64", "128"}},
      {"a mask of another shape",
       kPolicy,
       [](Bench& b) {
         b.policy = UserMask{{b.policy_mask.mask.words, 4, 3, 2, 128}};
       },
       {"policy.mask.num_q_blocks", "3", "4"}},
      {"a mask without words",
       kSelects,
       [](Bench& b) { b.policy = UserMask{mask_for(b.attention, 128)}; },
       {"policy.mask.words", "null"}},
      {"a mask onto itself",
       kSelects,
       [](Bench& b) { b.policy = UserMask{b.block_mask}; },
       {"mask.words", "overlaps"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, MaskForAndCounts) {
  const Bench bench(0);
  EXPECT_THROW(mask_for(bench.attention, 256), Error);
  EXPECT_THROW(num_causal_blocks(bench.attention, 0), Error);
}

// The two tensors must have one shape, and arrays of lse one entry a row.
TEST(Refusals, Merge) {
  std::vector<float> a(4 * 2 * 8), b(a), lse(8);
  Guarded out(a.size() * 4), out_lse(8 * 4);
  const ConstTensor first{a.data(), DType::kFloat32, 4, 2, 8, 16, 8},
      second{b.data(), DType::kFloat32, 4, 2, 8, 16, 8};
  const Tensor result{out.data(), DType::kFloat32, 4, 2, 8, 16, 8};
  struct Arguments {
    ConstTensor a, b;
    std::span<const float> lse_a, lse_b;
    Tensor out;
    std::span<float> lse;
  };
  const std::pair<std::function<void(Arguments&)>, const char*> refusals[] = {
      {[](Arguments& m) { m.b.num_tokens = 3; }, "out_b"},
      {[](Arguments& m) { m.out.num_heads = 1; }, "out"},
      {[](Arguments& m) { m.a.head_dim = 12; }, "out_a.head_dim"},
      {[](Arguments& m) { m.lse_a = m.lse_a.first(7); }, "lse_a"},
      {[](Arguments& m) { m.lse_b = {}; }, "lse_b"},
      {[](Arguments& m) { m.lse = m.lse.first(5); }, "lse"},
      {[](Arguments& m) { m.a.data = nullptr; }, "out_a.data"},
      {[](Arguments& m) { m.out.token_stride = 8; }, "out.token_stride"},
      {[](Arguments& m) { m.out.data = const_cast<void*>(m.b.data); }, "out"},
  };
  for (const auto& [spoil, says] : refusals) {
    Arguments m{first, second, lse, lse, result, out_lse.as<float>()};
    spoil(m);
    try {
      merge_states(m.a, m.lse_a, m.b, m.lse_b, m.out, m.lse, Context{});
      ADD_FAILURE() << "accepted: " << says;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
    EXPECT_TRUE(out.untouched() && out_lse.untouched());
  }
}

}  // namespace
}  // namespace crisp::test
