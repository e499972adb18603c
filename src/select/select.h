// select.h - block masses -> the vertical and slash blocks each head keeps.
#pragma once

#include <cstdint>

#include "core/head_batch.h"
#include "core/run.h"
#include "crisp/crisp.h"
#include "proxy/proxy.h"
#include "route/route.h"
#include "select/token_budget.h"

namespace crisp {

// Bit sets of one batch. A slash set is stored reversed, bit num_blocks - 1 - Delta, so that the
// row of q_block i is vertical | (slash >> (num_blocks - 1 - i)). Heads routed kDense hold no bits.
struct Kept {
  int64_t num_blocks = 0;
  uint32_t* vertical = nullptr;  // [num_heads, words()]
  uint32_t* slash = nullptr;     // [num_heads, words()]
  int64_t words() const { return ceil_div(num_blocks, 32); }
};

// Which blocks a direction keeps whatever their mass, and at least how many in all. The blocks of
// the sink window come first in the vertical and last in the slash direction, those of the recency
// window the other way round.
struct Forced {
  int64_t sink_blocks = 1, recency_blocks = 1;  // V[0, sink_blocks) and S[0, recency_blocks)
  int64_t min_blocks = 8;                       // per direction, forced blocks counted
  bool pooled_keeps_budget = true;              // false: pooled heads keep the forced blocks only
};

// CRISP Alg 3. mu_d is the mean (or median) mass of the direction's blocks outside both windows;
// keeps forced U {p > alpha mu_d}, of the forced only if mu_d is 0, topped up to min_blocks by
// (mass descending, index ascending). Pooled heads: forced, topped up.
Kept select_above_noise_floor(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                              const Forced& forced, float alpha, NoiseFloor noise_floor, Run& run);

// FlexPrefill Alg 3 at block level: forced U the smallest prefix, by (mass descending, index
// ascending), that holds gamma of the direction's mass; topped up. Pooled heads: forced, topped up.
Kept select_coverage(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                     const Forced& forced, float gamma, Run& run);

// FlexPrefill's published code: forced, topped up to the head's block budgets; slash masses are the
// left-aligned ones. Pooled heads: forced, topped up to min_blocks.
Kept select_token_budget(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                         const TokenBudget& budget, const Forced& forced, Run& run);

// ---- between select.cc and its kernels

enum class Rule : uint8_t { kNoiseFloor, kCoverage, kTokenBudget };

struct SelectJob {
  const HeadBatch& batch;
  const ProxyMap& map;
  const Routes& routes;
  Forced forced;
  Rule rule = Rule::kNoiseFloor;
  float alpha = 1, gamma = 1;
  NoiseFloor noise_floor = NoiseFloor::kMean;
  TokenBudget budget{};      // kTokenBudget only
  Kept kept{};               // written
  int32_t* order = nullptr;  // [num_workers, num_blocks] scratch, CPU only
  float* masses = nullptr;   // [num_workers, num_blocks] scratch, CPU only
  int num_threads = 1;
};

void select_cpu(const SelectJob& job);
void select_cuda(const SelectJob& job, CUstream_st* stream);

}  // namespace crisp
