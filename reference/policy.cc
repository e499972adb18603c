#include "reference/policy.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "reference/pooled.h"
#include "reference/proxy.h"

namespace crisp::reference {
namespace {

void check_causal(const Head& head) {
  if (!head.causal) throw std::invalid_argument("head is not causal; a selector needs causal");
  if (head.q_len() > head.kv_len()) {
    throw std::invalid_argument("q_len is " + std::to_string(head.q_len()) +
                                ", must be at most kv_len " + std::to_string(head.kv_len()));
  }
}

// The pooled map's prefix into the selection; false, and nothing done, if the map is not finite.
bool select_pooled(const Head& head, double gamma, bool exclusive, Selection& selection) {
  const Matrix map = pooled_map(head);
  for (double x : map.values) {
    if (!std::isfinite(x)) return false;
  }
  selection.pooled = pooled_prefix(map, selection.pooled.first_q_block, gamma, exclusive);
  return true;
}

// The selection with every causal block kept, its statistics as they are.
Selection keep_dense(const Head& head, Selection selection) {
  const size_t num_blocks = static_cast<size_t>(ceil_div(head.kv_len(), kBlockSize));
  selection.pattern = Pattern::kDense;
  selection.vertical.assign(num_blocks, false);
  selection.slash.assign(num_blocks, false);
  selection.pooled = empty_blocks(head);
  selection.blocks = all_blocks(head);
  return selection;
}

}  // namespace

FlexPrefillOptions FlexPrefillOptions::official() {
  FlexPrefillOptions options;
  options.token_count_budget = true;
  options.left_aligned_slash = true;
  options.pooled_keeps_budget = true;
  options.exclusive_pooled_prefix = true;
  return options;
}

Pattern route_by_structural_mass(double structural_mass, double tau_proxy) {
  if (!std::isfinite(structural_mass)) return Pattern::kDense;
  return structural_mass >= tau_proxy ? Pattern::kVerticalSlash : Pattern::kPooled;
}

Pattern route_by_js_distance(double js_distance, double tau, bool nan_routes_vertical_slash) {
  if (!std::isfinite(js_distance)) {
    return nan_routes_vertical_slash ? Pattern::kVerticalSlash : Pattern::kDense;
  }
  return js_distance < tau ? Pattern::kPooled : Pattern::kVerticalSlash;
}

std::vector<bool> crisp_direction(const std::vector<double>& mass, int64_t first_tokens,
                                  int64_t last_tokens, const CrispOptions& options) {
  const int64_t num_blocks = static_cast<int64_t>(mass.size());
  const std::vector<bool> forced = forced_blocks(num_blocks, first_tokens);
  const std::vector<bool> keep =
      options.selection == SelectionRule::kCoverage
          ? select_coverage(mass, forced, options.gamma)
          : select_above_noise_floor(mass, background_blocks(num_blocks, first_tokens, last_tokens),
                                     forced, options.alpha, options.noise_floor);
  return top_up(mass, keep, ceil_div(options.min_budget_tokens, kBlockSize));
}

BlockSet unite(const std::vector<bool>& vertical, const std::vector<bool>& slash,
               const BlockSet& pooled) {
  BlockSet blocks = pooled;
  for (int64_t r = 0; r < blocks.rows; ++r) {
    const int64_t i = blocks.first_q_block + r;
    for (int64_t j = 0; j < blocks.cols && j <= i; ++j) {
      if (vertical[static_cast<size_t>(j)] || slash[static_cast<size_t>(i - j)]) {
        blocks.at(r, j) = true;
      }
    }
  }
  return blocks;
}

// CRISP, in the order of its algorithms 2 to 4.
Selection select_crisp(const Head& head, const CrispOptions& options) {
  check_causal(head);
  Selection selection;
  if (head.q_len() == 0 || head.kv_len() < options.dense_below_tokens) {
    return keep_dense(head, selection);
  }
  const ProxyMap proxy = proxy_map(head, options.sink_tokens, options.recency_tokens);
  selection.structural_mass = proxy.structural_mass;
  selection.js_distance = js_distance(pooled_estimate(head), proxy.p_v);
  selection.pooled = empty_blocks(head);

  selection.pattern = options.routing == Routing::kStructuralMass
                          ? route_by_structural_mass(proxy.structural_mass, options.tau_proxy)
                          : route_by_js_distance(selection.js_distance, options.tau_js);
  if (selection.pattern == Pattern::kDense) return keep_dense(head, selection);

  if (selection.pattern == Pattern::kVerticalSlash) {
    selection.vertical =
        crisp_direction(proxy.p_v, options.sink_tokens, options.recency_tokens, options);
    selection.slash =
        crisp_direction(proxy.p_s, options.recency_tokens, options.sink_tokens, options);
  } else {
    if (!select_pooled(head, options.gamma, /*exclusive=*/false, selection)) {
      return keep_dense(head, selection);
    }
    const int64_t k_min =
        options.pooled_keeps_budget ? ceil_div(options.min_budget_tokens, kBlockSize) : 0;
    const int64_t num_blocks = static_cast<int64_t>(proxy.p_v.size());
    selection.vertical = top_up(proxy.p_v, forced_blocks(num_blocks, options.sink_tokens), k_min);
    selection.slash = top_up(proxy.p_s, forced_blocks(num_blocks, options.recency_tokens), k_min);
  }
  selection.blocks = unite(selection.vertical, selection.slash, selection.pooled);
  return selection;
}

// FlexPrefill, in the order of its algorithms 2 to 4.
Selection select_flex_prefill(const Head& head, const FlexPrefillOptions& options) {
  check_causal(head);
  Selection selection;
  if (head.q_len() == 0 || head.kv_len() < options.dense_below_tokens) {
    return keep_dense(head, selection);
  }
  const ProxyMap proxy = proxy_map(head, kBlockSize, kBlockSize, options.bf16_logits);
  const std::vector<double> p_s =
      options.left_aligned_slash ? left_aligned_slash_sums(proxy.a_s) : proxy.p_s;
  selection.structural_mass = proxy.structural_mass;
  selection.js_distance =
      js_distance(pooled_estimate(head), proxy.p_v, options.nan_routes_vertical_slash);
  selection.pooled = empty_blocks(head);

  selection.pattern =
      route_by_js_distance(selection.js_distance, options.tau, options.nan_routes_vertical_slash);
  if (selection.pattern == Pattern::kDense) return keep_dense(head, selection);

  const int64_t min_blocks = ceil_div(options.min_budget_tokens, kBlockSize);
  const std::vector<bool> forced = forced_blocks(static_cast<int64_t>(p_s.size()), kBlockSize);
  int64_t k_v = min_blocks, k_s = min_blocks;  // blocks to keep of each direction, at least
  std::vector<bool> base_v = forced, base_s = forced;
  if (selection.pattern == Pattern::kPooled) {
    if (!select_pooled(head, options.gamma, options.exclusive_pooled_prefix, selection)) {
      return keep_dense(head, selection);
    }
    if (!options.pooled_keeps_budget) k_v = k_s = 0;
  } else if (options.token_count_budget) {
    k_v = token_count_budget(proxy.a_v, options.gamma, min_blocks);
    k_s = token_count_budget(proxy.a_s, options.gamma, min_blocks);
  } else {
    base_v = select_coverage(proxy.p_v, forced, options.gamma);
    base_s = select_coverage(p_s, forced, options.gamma);
  }
  selection.vertical = top_up(proxy.p_v, base_v, k_v);
  selection.slash = top_up(p_s, base_s, k_s);
  selection.blocks = unite(selection.vertical, selection.slash, selection.pooled);
  return selection;
}

Selection select_dense(const Head& head) { return keep_dense(head, {}); }

}  // namespace crisp::reference
