// flex_prefill.cc - FlexPrefill (arXiv 2502.20766): the published code, or the paper's form.
#include "policy/batched.h"
#include "policy/policy.h"
#include "route/route.h"
#include "select/pooled.h"
#include "select/select.h"
#include "select/token_budget.h"

namespace crisp {
namespace {

// The paper's form is CRISP with both of its ablations.
Crisp as_crisp(const FlexPrefill& policy) {
  Crisp crisp;
  crisp.gamma = policy.gamma;
  crisp.min_budget_tokens = policy.min_budget_tokens;
  crisp.dense_below_tokens = policy.dense_below_tokens;
  crisp.pooled_keeps_budget = false;
  crisp.routing = Routing::kJsDistance;
  crisp.selection = Selection::kCoverage;
  crisp.tau_js = policy.tau;
  return crisp;
}

// The published code.
void select_batch(const HeadBatch& batch, const FlexPrefill& policy, const BlockMask& mask,
                  HeadReport* report, Run& run) {
  Forced forced;
  forced.min_blocks = blocks_of(policy.min_budget_tokens);

  const ProxyMap map = compute_proxy_map(batch, {kBlockSize, kBlockSize, true}, run);
  const Routes routes = route_by_js_distance(batch, map, policy.tau, run);
  const TokenBudget budget =
      count_token_budget(batch, map, routes, policy.gamma, forced.min_blocks, run);
  const Kept kept = select_token_budget(batch, map, routes, budget, forced, run);
  select_pooled(batch, map, routes, {policy.gamma, /*is_inclusive=*/false}, mask, run);
  fill_mask(batch, map, routes, kept, mask, report, run);
}

}  // namespace

size_t select_workspace_bytes(const Attention& attention, const FlexPrefill& policy,
                              const Context& context) {
  if (policy.variant == FlexPrefill::Variant::kPaper) {
    return select_workspace_bytes(attention, as_crisp(policy), context);
  }
  return batched_workspace_bytes(attention, policy, select_batch, context);
}

void run_policy(const Attention& attention, const FlexPrefill& policy, const BlockMask& mask,
                const Context& context, std::span<HeadReport> report) {
  if (policy.variant == FlexPrefill::Variant::kPaper) {
    return run_policy(attention, as_crisp(policy), mask, context, report);
  }
  run_in_batches(attention, policy, select_batch, mask, context, report);
}

}  // namespace crisp
