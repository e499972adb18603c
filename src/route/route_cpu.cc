#include <cmath>

#include "route/route.h"

namespace crisp {
namespace {

// p ln(p / m), 0 where p is 0; NaN stays NaN.
double relative_entropy_term(double p, double m) { return p == 0 ? 0 : p * std::log(p / m); }

// sqrt(0.5 sum p ln(p / m) + 0.5 sum q ln(q / m)), m = (p + q) / 2. In [0, sqrt(ln 2)].
double js_distance(const float* p, const float* q, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double m = (double{p[i]} + q[i]) / 2;
    sum += 0.5 * relative_entropy_term(p[i], m) + 0.5 * relative_entropy_term(q[i], m);
  }
  return sum < 0 ? 0 : std::sqrt(sum);  // rounding may leave -1e-17 between equal arrays
}

}  // namespace

void route_by_structural_mass_cpu(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                  const Routes& routes) {
  for (int64_t head = 0; head < batch.num_heads; ++head) {
    const float mass = map.structural_mass[head];
    routes.pattern[head] = !std::isfinite(mass) ? Pattern::kDense
                           : mass >= tau_proxy  ? Pattern::kVerticalSlash
                                                : Pattern::kPooled;
  }
}

void route_by_js_distance_cpu(const HeadBatch& batch, const ProxyMap& map, float tau,
                              const Routes& routes) {
  for (int64_t head = 0; head < batch.num_heads; ++head) {
    const int64_t first = head * map.num_blocks;
    const auto distance = static_cast<float>(
        js_distance(map.pooled_estimate + first, map.vertical + first, map.num_blocks));
    const bool is_finite = std::isfinite(distance) && std::isfinite(map.structural_mass[head]);
    routes.js_distance[head] = distance;
    routes.pattern[head] = !is_finite       ? Pattern::kDense
                           : distance < tau ? Pattern::kPooled
                                            : Pattern::kVerticalSlash;
  }
}

}  // namespace crisp
