// bench_gate.h - from how many tokens on a policy pays: the figure behind dense_below_tokens.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace crisp::cli {

// One length: a whole layer under the policy, selection and attention, and dense attention.
struct GatePoint {
  int64_t tokens = 0;
  double density = 0, layer_ms = 0, dense_ms = 0;
};

// The shortest measured length from which on the layer is never slower than dense; -1 if it is
// slower at the longest one. Points ascend in tokens.
int64_t gate_of(const std::vector<GatePoint>& points);

// [{"tokens", "density", "layer_ms", "dense_ms"}, ...]
nlohmann::ordered_json points_json(const std::vector<GatePoint>& points);

}  // namespace crisp::cli
