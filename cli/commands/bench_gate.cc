#include "commands/bench_gate.h"

namespace crisp::cli {

int64_t gate_of(const std::vector<GatePoint>& points) {
  int64_t gate = -1;
  for (auto point = points.rbegin(); point != points.rend(); ++point) {
    if (point->layer_ms > point->dense_ms) break;
    gate = point->tokens;
  }
  return gate;
}

nlohmann::ordered_json points_json(const std::vector<GatePoint>& points) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const GatePoint& point : points) {
    out.push_back({{"tokens", point.tokens},
                   {"density", point.density},
                   {"layer_ms", point.layer_ms},
                   {"dense_ms", point.dense_ms}});
  }
  return out;
}

}  // namespace crisp::cli
