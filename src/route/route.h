// route.h - ProxyMap -> the pattern of each head.
#pragma once

#include "core/head_batch.h"
#include "core/run.h"
#include "crisp/crisp.h"
#include "proxy/proxy.h"

namespace crisp {

struct Routes {
  Pattern* pattern = nullptr;    // [num_heads]; later stages may only turn a head to kDense
  float* js_distance = nullptr;  // [num_heads], or null where it was not computed
};

// CRISP: Vertical-Slash where C_struct >= tau_proxy, else pooled. A head whose C_struct is not
// finite keeps every block (kDense).
Routes route_by_structural_mass(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                Run& run);

// FlexPrefill: pooled where D < tau, else Vertical-Slash, with D the square root of the
// Jensen-Shannon divergence (natural logarithm, 0 log 0 = 0) between map.pooled_estimate and
// map.vertical. A head whose D or C_struct is not finite keeps every block.
Routes route_by_js_distance(const HeadBatch& batch, const ProxyMap& map, float tau, Run& run);

// ---- between route.cc and its kernels
void route_by_structural_mass_cpu(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                  const Routes& routes);
void route_by_js_distance_cpu(const HeadBatch& batch, const ProxyMap& map, float tau,
                              const Routes& routes);
void route_by_structural_mass_cuda(const HeadBatch& batch, const ProxyMap& map, float tau_proxy,
                                   const Routes& routes, CUstream_st* stream);
void route_by_js_distance_cuda(const HeadBatch& batch, const ProxyMap& map, float tau,
                               const Routes& routes, CUstream_st* stream);

}  // namespace crisp
