#include "route/route.h"

namespace crisp {

Routes route_by_structural_mass(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                Run& run) {
  run.require_cpu();
  const Routes routes{run.workspace.take<Pattern>(batch.num_heads), nullptr};
  if (run.is_counting()) return routes;
  route_by_structural_mass_cpu(batch, map, tau_proxy, routes);
  run.finished(Stage::kRoute);
  return routes;
}

Routes route_by_js_distance(const HeadBatch& batch, const ProxyMap& map, float tau, Run& run) {
  run.require_cpu();
  const Routes routes{run.workspace.take<Pattern>(batch.num_heads),
                      run.workspace.take<float>(batch.num_heads)};
  if (run.is_counting()) return routes;
  CRISP_ASSERT(map.pooled_estimate != nullptr);
  route_by_js_distance_cpu(batch, map, tau, routes);
  run.finished(Stage::kRoute);
  return routes;
}

}  // namespace crisp
