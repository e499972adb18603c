// crisp.cc - CRISP (arXiv 2609.01925), algorithms 2 to 4, and its ablations.
#include "core/head_batch.h"
#include "core/run.h"
#include "mask/mask.h"
#include "policy/policy.h"
#include "policy/tokens.h"
#include "proxy/proxy.h"
#include "route/route.h"
#include "select/pooled.h"
#include "select/select.h"

namespace crisp {
namespace {

// Selects for the heads of one batch. With a counting workspace only the memory is taken.
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

void select(const Attention& attention, const Crisp& policy, const BlockMask& mask,
            std::span<HeadReport> report, Run& run) {
  for_each_head_batch(attention, kBlockSize, proxy_heads_per_batch, [&](const HeadBatch& batch) {
    if (keeps_dense(batch.segment, policy.dense_below_tokens)) {
      return fill_dense(batch, mask, batch.rows_of(report), run);
    }
    const size_t mark = run.workspace.mark();
    select_batch(batch, policy, mask, batch.rows_of(report), run);
    run.workspace.rewind(mark);
  });
}

}  // namespace

size_t select_workspace_bytes(const Attention& attention, const Crisp& policy,
                              const Context& context) {
  Workspace counting = Workspace::counting();
  Run run{context, counting};
  select(attention, policy, {}, {}, run);
  return counting.peak_bytes();
}

void run_policy(const Attention& attention, const Crisp& policy, const BlockMask& mask,
                const Context& context, std::span<HeadReport> report) {
  Workspace workspace(context.workspace);
  Run run{context, workspace};
  select(attention, policy, mask, report, run);
}

}  // namespace crisp
