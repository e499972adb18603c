// crisp.cc - CRISP (arXiv 2609.01925), algorithms 2 to 4, and its ablations.
#include "policy/batched.h"
#include "policy/policy.h"
#include "route/route.h"
#include "select/pooled.h"
#include "select/select.h"

namespace crisp {
namespace {

void select_batch(const HeadBatch& batch, const Crisp& policy, const BlockMask& mask,
                  HeadReport* report, Run& run) {
  const bool by_distance = policy.routing == Routing::kJsDistance;
  const Forced forced = {blocks_of(policy.sink_tokens), blocks_of(policy.recency_tokens),
                         blocks_of(policy.min_budget_tokens), policy.pooled_keeps_budget};

  const ProxyMap map = compute_proxy_map(
      batch, {policy.sink_tokens, policy.recency_tokens, /*pooled_estimate=*/by_distance}, run);
  const Routes routes = by_distance ? route_by_js_distance(batch, map, policy.tau_js, run)
                                    : route_by_structural_mass(batch, map, policy.tau_proxy, run);
  const Kept kept = policy.selection == Selection::kNoiseFloor
                        ? select_above_noise_floor(batch, map, routes, forced, policy.alpha,
                                                   policy.noise_floor, run)
                        : select_coverage(batch, map, routes, forced, policy.gamma, run);
  select_pooled(batch, map, routes, {policy.gamma, /*is_inclusive=*/true}, mask, run);
  fill_mask(batch, map, routes, kept, mask, report, run);
}

}  // namespace

size_t select_workspace_bytes(const Attention& attention, const Crisp& policy,
                              const Context& context) {
  return batched_workspace_bytes(attention, policy, select_batch, context);
}

void run_policy(const Attention& attention, const Crisp& policy, const BlockMask& mask,
                const Context& context, std::span<HeadReport> report) {
  run_in_batches(attention, policy, select_batch, mask, context, report);
}

}  // namespace crisp
