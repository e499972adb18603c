// What C adds to crisp.h: struct sizes, codes, messages, enums, defaults; and that both interfaces
// give the same bits.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "crisp/crisp.h"
#include "crisp/crisp_c.h"

namespace crisp {
namespace {

constexpr int64_t kTokens = 1500, kQHeads = 4, kKvHeads = 2, kHeadDim = 16;

crisp_tensor c_tensor(std::vector<float>& values, int64_t heads) {
  crisp_tensor tensor = {};
  tensor.data = values.data();
  tensor.num_tokens = kTokens;
  tensor.num_heads = heads;
  tensor.head_dim = kHeadDim;
  tensor.token_stride = heads * kHeadDim;
  tensor.head_stride = kHeadDim;
  tensor.dtype = CRISP_FLOAT32;
  return tensor;
}

// Accepted arguments with memory of their own.
struct Call {
  std::vector<float> q = std::vector<float>(kTokens * kQHeads * kHeadDim);
  std::vector<float> k = std::vector<float>(kTokens * kKvHeads * kHeadDim), v = k;
  std::vector<float> out = q, lse = std::vector<float>(kTokens * kQHeads);
  std::vector<uint64_t> words;
  std::vector<crisp_head_report> report = std::vector<crisp_head_report>(2 * kQHeads);
  std::vector<crisp_segment> segments = {{0, 1100, 0, 1100, 0}, {1100, 400, 100, 1400, 0}};
  std::vector<std::byte> memory;
  crisp_policy policy = crisp_policy_default(CRISP_CRISP);
  crisp_args args = {};

  Call() {
    std::mt19937 bits(7);
    std::normal_distribution<float> normal;
    for (auto* values : {&q, &k, &v})
      for (float& value : *values) value = normal(bits);
    args.struct_size = sizeof(args);
    args.q = c_tensor(q, kQHeads);
    args.k = c_tensor(k, kKvHeads);
    args.v = c_tensor(v, kKvHeads);
    args.out = c_tensor(out, kQHeads);
    args.lse = lse.data();
    args.softmax_scale = 0.5f;
    args.causal = 1;
    args.segments = segments.data();
    args.num_segments = static_cast<int64_t>(segments.size());
    args.policy = &policy;
    args.report = report.data();
    args.num_threads = 2;
    EXPECT_EQ(crisp_mask_shape(&args, 128, &args.mask), CRISP_OK) << crisp_last_error();
    words.resize(static_cast<size_t>(crisp_mask_bytes(&args.mask) / 8));
    args.mask.words = reinterpret_cast<uint32_t*>(words.data());
    EXPECT_EQ(crisp_workspace_size(&args, &args.workspace_bytes), CRISP_OK) << crisp_last_error();
    memory.resize(args.workspace_bytes + 256);
    args.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  }
  Call(const Call&) = delete;
};

::testing::AssertionResult refuses(int status, const char* part) {
  if (status != CRISP_INVALID_ARGUMENT)
    return ::testing::AssertionFailure() << "returned " << crisp_strerror(status);
  if (std::string(crisp_last_error()).find(part) == std::string::npos)
    return ::testing::AssertionFailure() << "says: " << crisp_last_error();
  return ::testing::AssertionSuccess();
}

TEST(CApi, GivesTheBitsOfTheCppInterface) {
  Call call;
  call.policy.dense_below_tokens = 256;
  call.policy.min_budget_tokens = 128;
  call.policy.tau_proxy = 0.3f;
  ASSERT_EQ(crisp_prefill(&call.args), CRISP_OK) << crisp_last_error();

  Call other;
  const auto view = [](const std::vector<float>& values, int64_t heads) {
    return ConstTensor{values.data(), DType::kFloat32,  kTokens,  heads,
                       kHeadDim,      heads * kHeadDim, kHeadDim, 0};
  };
  const std::vector<Segment> segments = {{0, 1100, 0, 1100, 0}, {1100, 400, 100, 1400, 0}};
  Attention attention{view(other.q, kQHeads),
                      view(other.k, kKvHeads),
                      view(other.v, kKvHeads),
                      0.5f,
                      true,
                      segments,
                      {}};
  BlockMask mask = mask_for(attention);
  ASSERT_EQ(static_cast<size_t>(mask.bytes() / 8), other.words.size());
  mask.words = other.args.mask.words;
  Context context;
  context.num_threads = 1;
  context.workspace = {static_cast<std::byte*>(other.args.workspace), other.args.workspace_bytes};
  const Tensor out{other.out.data(), DType::kFloat32,    kTokens,  kQHeads,
                   kHeadDim,         kQHeads * kHeadDim, kHeadDim, 0};
  std::vector<HeadReport> report(2 * kQHeads);
  const Crisp policy{.tau_proxy = 0.3f, .min_budget_tokens = 128, .dense_below_tokens = 256};
  prefill(attention, policy, mask, out, other.lse, context, report);

  EXPECT_EQ(call.words, other.words);
  EXPECT_EQ(std::memcmp(call.out.data(), other.out.data(), call.out.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(call.lse.data(), other.lse.data(), call.lse.size() * sizeof(float)), 0);
  for (size_t head = 0; head < report.size(); ++head) {
    EXPECT_EQ(call.report[head].num_blocks, report[head].num_blocks);
    EXPECT_EQ(call.report[head].structural_mass, report[head].structural_mass);
    EXPECT_EQ(call.report[head].pattern, static_cast<uint8_t>(report[head].pattern));
  }
  int64_t blocks = 0;
  ASSERT_EQ(crisp_num_causal_blocks(&call.args, 128, &blocks), CRISP_OK);
  EXPECT_EQ(blocks, num_causal_blocks(attention));
}

TEST(CApi, DefaultsAreThoseOfTheCppStructs) {
  const crisp_policy c = crisp_policy_default(CRISP_CRISP);
  const Crisp crisp;
  EXPECT_EQ(c.struct_size, sizeof(crisp_policy));
  EXPECT_EQ(c.tau_proxy, crisp.tau_proxy);
  EXPECT_EQ(c.alpha, crisp.alpha);
  EXPECT_EQ(c.gamma, crisp.gamma);
  EXPECT_EQ(c.tau_js, crisp.tau_js);
  EXPECT_EQ(c.sink_tokens, crisp.sink_tokens);
  EXPECT_EQ(c.recency_tokens, crisp.recency_tokens);
  EXPECT_EQ(c.min_budget_tokens, crisp.min_budget_tokens);
  EXPECT_EQ(c.dense_below_tokens, crisp.dense_below_tokens);
  EXPECT_EQ(c.noise_floor, CRISP_MEAN);
  EXPECT_EQ(c.pooled_keeps_budget, 1);
  EXPECT_EQ(c.routing, CRISP_STRUCTURAL_MASS);
  EXPECT_EQ(c.selection, CRISP_NOISE_FLOOR);
  const crisp_policy flex = crisp_policy_default(CRISP_FLEX_PREFILL);
  EXPECT_EQ(flex.tau_js, FlexPrefill{}.tau);
  EXPECT_EQ(flex.gamma, FlexPrefill{}.gamma);
  EXPECT_EQ(flex.variant, CRISP_OFFICIAL);
  EXPECT_EQ(crisp_policy_default(17).struct_size, 0u);
  EXPECT_NE(std::string(crisp_last_error()).find("kind is 17"), std::string::npos);
}

TEST(CApi, AnOlderSmallerStructIsAccepted) {
  Call call;
  call.args.struct_size = offsetof(crisp_args, on_stage);
  call.args.on_stage = [](int32_t, void*) { FAIL() << "past struct_size: must not be read"; };
  call.policy.struct_size = offsetof(crisp_policy, mask);
  call.policy.mask.block_size = -1;
  EXPECT_EQ(crisp_prefill(&call.args), CRISP_OK) << crisp_last_error();
}

TEST(CApi, RefusesStructsItDoesNotKnow) {
  Call call;
  for (const uint32_t size : {0u, 4u, static_cast<uint32_t>(sizeof(crisp_args) + 8)}) {
    call.args.struct_size = size;
    EXPECT_TRUE(refuses(crisp_prefill(&call.args), "args->struct_size is"));
    EXPECT_NE(crisp_why_unsupported(&call.args), nullptr);
  }
  call.args.struct_size = sizeof(call.args);
  call.policy.struct_size = sizeof(crisp_policy) + 8;
  EXPECT_TRUE(refuses(crisp_prefill(&call.args), "policy->struct_size is"));
  call.policy.struct_size = 8;
  EXPECT_TRUE(refuses(crisp_select(&call.args), "policy->struct_size is 8"));
}

TEST(CApi, RefusesWhatOnlyCCanSay) {
  EXPECT_TRUE(refuses(crisp_prefill(nullptr), "args is NULL"));
  EXPECT_TRUE(refuses(crisp_merge_states(nullptr), "args is NULL"));
  const auto refused = [](auto spoil, const char* part) {
    Call call;
    spoil(call);
    return refuses(crisp_prefill(&call.args), part);
  };
  EXPECT_TRUE(refused([](Call& c) { c.args.policy = nullptr; }, "policy is NULL"));
  EXPECT_TRUE(refused([](Call& c) { c.policy.kind = 4; }, "policy.kind is 4"));
  EXPECT_TRUE(refused([](Call& c) { c.args.q.dtype = 256; }, "q.dtype is 256, must be in [0, 2]"));
  EXPECT_TRUE(refused([](Call& c) { c.args.out.dtype = -1; }, "out.dtype is -1"));
  EXPECT_TRUE(refused([](Call& c) { c.args.device = 256; }, "device is 256"));
  EXPECT_TRUE(refused([](Call& c) { c.args.device = CRISP_CUDA; },
                      kWithCuda ? "must be float16 or bfloat16" : "no CUDA backend"));
  EXPECT_TRUE(refused([](Call& c) { c.args.causal = 2; }, "causal is 2, must be 0 or 1"));
  EXPECT_TRUE(refused([](Call& c) { c.policy.routing = 256; }, "policy.routing is 256"));
  EXPECT_TRUE(refused([](Call& c) { c.args.num_segments = -1; }, "num_segments is -1"));
  EXPECT_TRUE(refused([](Call& c) { c.args.segments = nullptr; }, "segments is NULL"));
  EXPECT_TRUE(refused([](Call& c) { c.args.q.num_tokens = INT64_MAX; }, "q.num_tokens is"));
  EXPECT_TRUE(refused([](Call& c) { c.args.workspace = nullptr; }, "context.workspace is null"));
  Call call;
  EXPECT_TRUE(refuses(crisp_workspace_size(&call.args, nullptr), "bytes is NULL"));
  EXPECT_TRUE(refuses(crisp_mask_shape(&call.args, 128, nullptr), "mask is NULL"));
  EXPECT_TRUE(refuses(crisp_policy_init(nullptr, 8, 0), "policy is NULL"));
}

TEST(CApi, ACallbackThatThrowsBecomesACode) {
  Call call;
  call.args.on_stage = [](int32_t, void*) { throw 42; };
  EXPECT_EQ(crisp_prefill(&call.args), CRISP_INTERNAL_ERROR);
  int calls = 0;
  call.args.on_stage = [](int32_t stage, void* user) {
    EXPECT_GE(stage, CRISP_STAGE_PROXY);
    EXPECT_LE(stage, CRISP_STAGE_ATTEND);
    ++*static_cast<int*>(user);
  };
  call.args.on_stage_user = &calls;
  EXPECT_EQ(crisp_prefill(&call.args), CRISP_OK) << crisp_last_error();
  EXPECT_GT(calls, 1);
}

TEST(CApi, ErrorsBelongToTheirThread) {
  EXPECT_TRUE(refuses(crisp_prefill(nullptr), "args is NULL"));
  std::thread([] { EXPECT_STREQ(crisp_last_error(), ""); }).join();
  EXPECT_STREQ(crisp_strerror(CRISP_OK), "ok");
  EXPECT_STREQ(crisp_strerror(CRISP_INTERNAL_ERROR), "internal error");
  EXPECT_STREQ(crisp_strerror(77), "unknown status");
  EXPECT_EQ(crisp_abi_version(), static_cast<uint32_t>(CRISP_ABI_VERSION));
  EXPECT_STREQ(crisp_version(), version());
}

TEST(CApi, AUserMaskThenAMergeOfItsHalvesIsTheWhole) {
  Call call;
  crisp_policy user = crisp_policy_default(CRISP_USER_MASK);
  std::vector<uint64_t> kept(call.words.size(), ~uint64_t{0});
  user.mask = call.args.mask;
  user.mask.words = reinterpret_cast<uint32_t*>(kept.data());
  call.args.policy = &user;
  ASSERT_EQ(crisp_prefill(&call.args), CRISP_OK) << crisp_last_error();
  const std::vector<float> whole_out = call.out, whole_lse = call.lse;

  // Even kv_blocks, then odd ones: two states over disjoint keys.
  std::vector<float> parts_out[2], parts_lse[2];
  for (const size_t odd : {size_t{0}, size_t{1}}) {
    kept.assign(kept.size(), odd == 1 ? 0xaaaaaaaaaaaaaaaa : 0x5555555555555555);
    ASSERT_EQ(crisp_prefill(&call.args), CRISP_OK) << crisp_last_error();
    parts_out[odd] = call.out;
    parts_lse[odd] = call.lse;
  }
  crisp_merge_args merge = {};
  merge.struct_size = sizeof(merge);
  merge.out_a = merge.out = c_tensor(parts_out[0], kQHeads);
  merge.out_b = c_tensor(parts_out[1], kQHeads);
  merge.lse_a = merge.lse = parts_lse[0].data();
  merge.lse_b = parts_lse[1].data();
  ASSERT_EQ(crisp_merge_states(&merge), CRISP_OK) << crisp_last_error();
  for (size_t i = 0; i < whole_out.size(); ++i) ASSERT_NEAR(parts_out[0][i], whole_out[i], 2e-5);
  for (size_t i = 0; i < whole_lse.size(); ++i) ASSERT_NEAR(parts_lse[0][i], whole_lse[i], 2e-5);
  merge.lse_b = nullptr;
  EXPECT_TRUE(refuses(crisp_merge_states(&merge), "lse_b has 0 entries"));
}

}  // namespace
}  // namespace crisp
