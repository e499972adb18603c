// token_budget.h - how many blocks FlexPrefill's published code gives a head, from token masses.
//
// Token masses do not fit in a block map, so this goes over the keys a second time, now with the
// known normaliser of each proxy row, and keeps only counts and the left-aligned slash buckets.
#pragma once

#include <cstdint>

#include "core/head_batch.h"
#include "core/run.h"
#include "proxy/proxy.h"
#include "route/route.h"

namespace crisp {

// Of Vertical-Slash heads num_* are, per direction, with m = 1 + the tokens whose cumulative mass,
// heaviest first, is <= gamma:
//   num = min(max(m / 128 + 1, min_blocks), num_blocks)        blocks, though m counts tokens
// Dense and pooled heads: unset. Dense heads: the slash mass as well.
struct TokenBudget {
  int64_t* num_vertical = nullptr;  // [num_heads]
  int64_t* num_slash = nullptr;     // [num_heads]
  // [num_heads, num_blocks] by Delta: slash mass bucketed by the column t = kv_len - 1 - offset
  // that the diagonal meets in the last row, Delta = num_blocks - 1 - t / 128. This is map.slash
  // where kv_len is a multiple of 128: then Delta = offset / 128.
  float* left_aligned_slash = nullptr;
};

TokenBudget count_token_budget(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                               float gamma, int64_t min_blocks, Run& run);

// ---- between token_budget.cc and its kernels

// One head at a time per worker; pointers are worker 0's.
struct TokenScratch {
  // Lanes of a panel that lie before the first or after the last offset fall into the margins.
  static constexpr int64_t kMargin = ProxyRows::kSlotAlignment;
  float* vertical = nullptr;  // [num_workers, kv_len] by key
  float* slash = nullptr;     // [num_workers, kMargin + kv_len + kMargin] by offset, from -kMargin
  float* queries = nullptr;   // [num_workers, num_slots * head_dim] packed panels
  float* keys = nullptr;      // [num_workers, 128 * head_dim]
  float* scores = nullptr;    // [num_workers, 128 * kSlotAlignment]
  float* columns = nullptr;   // [num_workers, 128 * kSlotAlignment] column sums, one per lane

  TokenScratch of_worker(int worker, int64_t kv_len, int64_t num_slots, int64_t head_dim) const {
    constexpr int64_t panel_floats = kBlockSize * ProxyRows::kSlotAlignment;
    return {vertical + worker * kv_len,
            slash + worker * (kv_len + 2 * kMargin),
            queries + worker * num_slots * head_dim,
            keys + worker * kBlockSize * head_dim,
            scores + worker * panel_floats,
            columns + worker * panel_floats};
  }
};

// CUDA: by key block of 128 keys, of as many heads at a time as fit.
struct TokenCudaScratch {
  static constexpr int64_t kDiagonals = 256;  // of a tile of 128 x 128, and one that stays zero
  int64_t num_heads = 0;                      // at a time
  float* columns = nullptr;                   // [num_heads, num_blocks, 128] mass of a key
  float* diagonals = nullptr;  // [num_heads, num_blocks, kDiagonals] mass of row - key + 127
};

struct TokenBudgetJob {
  const HeadBatch& batch;
  const ProxyMap& map;
  const Routes& routes;
  float gamma;
  int64_t min_blocks;
  ProxyRows rows;
  TokenBudget budget;
  TokenScratch scratch;
  int num_workers;
  TokenCudaScratch cuda = {};
  bool shares_slash() const { return budget.left_aligned_slash == map.slash; }
};

void token_budget_cpu(const TokenBudgetJob& job);
// Pointers of the job are device memory. Three launches per cuda.num_heads heads.
void token_budget_cuda(const TokenBudgetJob& job, CUstream_st* stream);

}  // namespace crisp
