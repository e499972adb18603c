#include "route/route.h"

namespace crisp {

Routes route_by_structural_mass(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                Run& run) {
  const Routes routes{run.workspace.take<Pattern>(batch.num_heads), nullptr};
  if (run.is_counting()) return routes;
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) {
    route_by_structural_mass_cuda(batch, map, tau_proxy, routes, run.context.stream);
    run.finished(Stage::kRoute);
    return routes;
  }
#endif
  run.require_cpu();
  route_by_structural_mass_cpu(batch, map, tau_proxy, routes);
  run.finished(Stage::kRoute);
  return routes;
}

Routes route_by_js_distance(const HeadBatch& batch, const ProxyMap& map, float tau, Run& run) {
  const Routes routes{run.workspace.take<Pattern>(batch.num_heads),
                      run.workspace.take<float>(batch.num_heads)};
  if (run.is_counting()) return routes;
  CRISP_ASSERT(map.pooled_estimate != nullptr);
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) {
    route_by_js_distance_cuda(batch, map, tau, routes, run.context.stream);
    run.finished(Stage::kRoute);
    return routes;
  }
#endif
  run.require_cpu();
  route_by_js_distance_cpu(batch, map, tau, routes);
  run.finished(Stage::kRoute);
  return routes;
}

}  // namespace crisp
