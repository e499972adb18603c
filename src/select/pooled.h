// pooled.h - the blocks a pooled head keeps: a prefix of its whole pooled map.
#pragma once

#include <cstdint>

#include "core/head_batch.h"
#include "core/run.h"
#include "crisp/crisp.h"
#include "proxy/proxy.h"
#include "route/route.h"

namespace crisp {

struct PooledRule {
  float gamma = 0.95f;
  // Inclusive keeps the block that reaches gamma, exclusive (FlexPrefill's code) leaves it out
  // unless it reaches it exactly.
  bool is_inclusive = true;
};

// CRISP and FlexPrefill Alg 4. The pooled map of a head is the causal softmax, row by row, of
// scale * (mean query of a q_block . mean key of a kv_block); short blocks divide by their true
// count. Kept is the prefix of all its entries, by (mass descending, row, column ascending), that
// holds gamma of the map's mass.
//
// The set has one bit per block, just like the mask, so it goes where it ends up: all words of the
// mask rows of pooled heads are written, other rows are not touched. A head whose map is not finite
// is turned to kDense instead.
void select_pooled(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                   const PooledRule& rule, const BlockMask& mask, Run& run);

// ---- between pooled.cc and its kernels

// One head at a time per worker; pointers are worker 0's.
struct PooledScratch {
  // Bins of one digit of a float's bits: values in [0, 2) need 11 + 10 + 9 bits below 2^30.
  static constexpr int64_t kMaxBins = 2048;
  float* queries = nullptr;   // [num_workers, num_slots * head_dim] mean queries as packed panels
  float* rows = nullptr;      // [num_workers, 128 * head_dim]
  float* masses = nullptr;    // [num_workers, num_kv_blocks * kSlotAlignment] rows of the map
  double* sums = nullptr;     // [num_workers, kMaxBins]
  int64_t* counts = nullptr;  // [num_workers, kMaxBins]
  int64_t num_slots = 0;      // num_q_blocks, rounded up to whole panels of every target
};

struct PooledJob {
  const HeadBatch& batch;
  const ProxyMap& map;
  const Routes& routes;
  PooledRule rule;
  const BlockMask& mask;
  PooledScratch scratch;
  int num_workers;
};

void pooled_cpu(const PooledJob& job);

}  // namespace crisp
