// validate_call.cc - what a call adds to the attention: mask, policy, context.
#include <cmath>

#include "core/parallel.h"
#include "core/validate.h"

namespace crisp {
namespace {

void check_scalar(const char* name, float value, bool accepted, const char* expected) {
  CRISP_CHECK(std::isfinite(value) && accepted, "policy.", name, " is ", value, ", must be ",
              expected);
}

void check_at_least(const char* name, int32_t value, int32_t minimum) {
  CRISP_CHECK(value >= minimum, "policy.", name, " is ", value, ", must be >= ", minimum);
}

template <class Enum>
void check_enum(const char* name, Enum value, int last) {
  CRISP_CHECK(static_cast<int>(value) <= last, "policy.", name, " is ", static_cast<int>(value),
              ", must be in [0, ", last, "]");
}

void check_selects(const char* policy, const Attention& attention, const BlockMask& mask) {
  CRISP_CHECK(attention.causal, "attention.causal is false, must be true for the ", policy,
              " policy (Dense and UserMask accept non-causal attention)");
  CRISP_CHECK(mask.block_size == kBlockSize, "mask.block_size is ", mask.block_size, ", must be ",
              kBlockSize, " for the ", policy, " policy (Dense and UserMask accept 64 as well)");
}

struct PolicyChecker {
  const Attention& attention;
  const BlockMask& mask;

  void operator()(const Dense&) const {}
  void operator()(const Crisp& policy) const {
    check_selects("Crisp", attention, mask);
    check_scalar("tau_proxy", policy.tau_proxy, policy.tau_proxy >= 0, "finite and >= 0");
    check_scalar("alpha", policy.alpha, policy.alpha > 0, "finite and > 0");
    check_scalar("gamma", policy.gamma, policy.gamma > 0 && policy.gamma <= 1, "in (0, 1]");
    check_scalar("tau_js", policy.tau_js, policy.tau_js >= 0, "finite and >= 0");
    check_at_least("sink_tokens", policy.sink_tokens, 1);
    check_at_least("recency_tokens", policy.recency_tokens, 1);
    check_at_least("min_budget_tokens", policy.min_budget_tokens, 0);
    check_at_least("dense_below_tokens", policy.dense_below_tokens, 0);
    check_enum("noise_floor", policy.noise_floor, 1);
    check_enum("routing", policy.routing, 1);
    check_enum("selection", policy.selection, 1);
  }
  void operator()(const FlexPrefill& policy) const {
    check_selects("FlexPrefill", attention, mask);
    check_scalar("tau", policy.tau, policy.tau >= 0, "finite and >= 0");
    check_scalar("gamma", policy.gamma, policy.gamma > 0 && policy.gamma <= 1, "in (0, 1]");
    check_at_least("min_budget_tokens", policy.min_budget_tokens, 0);
    check_at_least("dense_below_tokens", policy.dense_below_tokens, 0);
    check_enum("variant", policy.variant, 1);
  }
  void operator()(const UserMask& policy) const {
    check_mask_shape("policy.mask", policy.mask, attention);
    CRISP_CHECK(policy.mask.block_size == mask.block_size, "policy.mask.block_size is ",
                policy.mask.block_size, ", must equal mask.block_size, which is ", mask.block_size);
  }
};

void check_count(const char* name, const char* field, int64_t value, int64_t expected) {
  CRISP_CHECK(value == expected, name, ".", field, " is ", value, ", must be ", expected,
              " (mask_for gives the shape a call needs)");
}

}  // namespace

void check_block_size(int64_t block_size) {
  CRISP_CHECK(block_size == 64 || block_size == 128, "block_size is ", block_size,
              ", must be 64 or 128");
}

void check_mask_shape(const char* name, const BlockMask& mask, const Attention& attention) {
  CRISP_CHECK(mask.block_size == 64 || mask.block_size == 128, name, ".block_size is ",
              mask.block_size, ", must be 64 or 128");
  const BlockMask expected = mask_for(attention, mask.block_size);
  check_count(name, "num_heads", mask.num_heads, expected.num_heads);
  check_count(name, "num_q_blocks", mask.num_q_blocks, expected.num_q_blocks);
  check_count(name, "num_kv_blocks", mask.num_kv_blocks, expected.num_kv_blocks);
}

void check_policy(const Policy& policy, const Attention& attention, const BlockMask& mask) {
  CRISP_CHECK(!policy.valueless_by_exception(), "policy holds no value, must hold one");
  std::visit(PolicyChecker{attention, mask}, policy);
}

void check_context(const Context& context) {
  CRISP_CHECK(kWithCuda || context.device != Device::kCuda,
              "context.device is kCuda, must be kCpu: this build has no CUDA backend");
  CRISP_CHECK(context.device == Device::kCpu || context.device == Device::kCuda,
              "context.device is ", static_cast<int>(context.device), ", must be kCpu (0)",
              kWithCuda ? " or kCuda (1)" : "");
  CRISP_CHECK(context.num_threads >= 0 && context.num_threads <= kMaxThreads,
              "context.num_threads is ", context.num_threads, ", must be in [0, ", kMaxThreads,
              "]");
}

}  // namespace crisp
