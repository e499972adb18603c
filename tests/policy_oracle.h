// policy_oracle.h - a policy of crisp.h as the reference has it.
#pragma once

#include <variant>

#include "crisp/crisp.h"
#include "reference/reference.h"

namespace crisp::test {

inline reference::CrispOptions options_of(const Crisp& p) {
  reference::CrispOptions o;
  o.tau_proxy = p.tau_proxy;
  o.alpha = p.alpha;
  o.gamma = p.gamma;
  o.sink_tokens = p.sink_tokens;
  o.recency_tokens = p.recency_tokens;
  o.min_budget_tokens = p.min_budget_tokens;
  o.dense_below_tokens = p.dense_below_tokens;
  o.noise_floor = p.noise_floor == NoiseFloor::kMean ? reference::NoiseFloor::kMean
                                                     : reference::NoiseFloor::kMedian;
  o.pooled_keeps_budget = p.pooled_keeps_budget;
  o.routing = p.routing == Routing::kStructuralMass ? reference::Routing::kStructuralMass
                                                    : reference::Routing::kJsDistance;
  o.selection = p.selection == Selection::kNoiseFloor ? reference::SelectionRule::kNoiseFloor
                                                      : reference::SelectionRule::kCoverage;
  o.tau_js = p.tau_js;
  return o;
}

inline reference::Selection expected(const reference::Head& head, const Policy& policy) {
  if (const auto* crisp = std::get_if<Crisp>(&policy)) {
    return reference::select_crisp(head, options_of(*crisp));
  }
  if (const auto* flex = std::get_if<FlexPrefill>(&policy)) {
    auto o = flex->variant == FlexPrefill::Variant::kOfficial
                 ? reference::FlexPrefillOptions::official()
                 : reference::FlexPrefillOptions::paper();
    o.tau = flex->tau;
    o.gamma = flex->gamma;
    o.min_budget_tokens = flex->min_budget_tokens;
    o.dense_below_tokens = flex->dense_below_tokens;
    return reference::select_flex_prefill(head, o);
  }
  return reference::select_dense(head);
}

inline bool routes_by_distance(const Policy& policy) {
  const auto* crisp = std::get_if<Crisp>(&policy);
  return std::holds_alternative<FlexPrefill>(policy) ||
         (crisp != nullptr && crisp->routing == Routing::kJsDistance);
}

}  // namespace crisp::test
