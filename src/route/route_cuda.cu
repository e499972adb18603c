// route_cuda.cu - the pattern of each head: a comparison, or one CTA per head for the distance.
#include <cmath>

#include "core/block_sum.cuh"
#include "core/cuda.h"
#include "route/route.h"

namespace crisp {
namespace {

constexpr int kRouteThreads = 128, kDistanceThreads = 512;

__global__ void __launch_bounds__(kRouteThreads)
    compare_structural_mass(const float* structural_mass, int64_t num_heads, float tau_proxy,
                            Pattern* pattern) {
  const int64_t head = int64_t{blockIdx.x} * kRouteThreads + threadIdx.x;
  if (head >= num_heads) return;
  const float mass = structural_mass[head];
  pattern[head] = !isfinite(mass)     ? Pattern::kDense
                  : mass >= tau_proxy ? Pattern::kVerticalSlash
                                      : Pattern::kPooled;
}

// p ln(p / m), 0 where p is 0; NaN stays NaN.
__device__ double relative_entropy_term(double p, double m) { return p == 0 ? 0 : p * log(p / m); }

struct DistanceCall {
  const float *pooled_estimate, *vertical;  // [num_heads, num_blocks]
  const float* structural_mass;
  int64_t num_blocks;
  float tau;
  Routes routes;
};

// The formula of route_cpu.cc; the sum is taken by threads, so its last bits differ from there.
__global__ void __launch_bounds__(kDistanceThreads) compare_js_distance(const DistanceCall call) {
  const int64_t head = blockIdx.x;
  const float* estimate = call.pooled_estimate + head * call.num_blocks;
  const float* vertical = call.vertical + head * call.num_blocks;
  double sum = 0;
  for (int64_t block = threadIdx.x; block < call.num_blocks; block += kDistanceThreads) {
    const double p = estimate[block], q = vertical[block], m = (p + q) / 2;
    sum += 0.5 * relative_entropy_term(p, m) + 0.5 * relative_entropy_term(q, m);
  }
  sum = block_sum<kDistanceThreads>(sum);
  if (threadIdx.x != 0) return;
  const auto distance = static_cast<float>(sum < 0 ? 0 : sqrt(sum));
  const bool is_finite = isfinite(distance) && isfinite(call.structural_mass[head]);
  call.routes.js_distance[head] = distance;
  call.routes.pattern[head] = !is_finite            ? Pattern::kDense
                              : distance < call.tau ? Pattern::kPooled
                                                    : Pattern::kVerticalSlash;
}

}  // namespace

void route_by_structural_mass_cuda(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                   const Routes& routes, CUstream_st* stream) {
  const auto num_ctas = static_cast<unsigned>(ceil_div(batch.num_heads, kRouteThreads));
  compare_structural_mass<<<num_ctas, kRouteThreads, 0, stream>>>(
      map.structural_mass, batch.num_heads, tau_proxy, routes.pattern);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

void route_by_js_distance_cuda(const HeadBatch& batch, const ProxyMap& map, float tau,
                               const Routes& routes, CUstream_st* stream) {
  const DistanceCall call = {map.pooled_estimate, map.vertical, map.structural_mass,
                             map.num_blocks,      tau,          routes};
  const auto num_ctas = static_cast<unsigned>(batch.num_heads);
  compare_js_distance<<<num_ctas, kDistanceThreads, 0, stream>>>(call);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace crisp
