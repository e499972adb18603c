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

// CUDA holds whole maps, of as many pooled heads at a time as fit.
struct PooledPrefix {  // of one head, while its end is searched
  uint32_t cut = 0;    // bits of the last mass of the prefix, as far as they are known
  uint32_t is_not_finite = 0;
  double covered = 0, target = 0;        // mass above the cut; of the whole prefix
  uint64_t num_equal = 0, num_ties = 0;  // entries equal to the cut; how many are in the prefix
};
struct PooledCudaScratch {
  static constexpr int64_t kTile = 128;  // rows and columns of a tile of the map
  static constexpr int64_t kDigits = 3;
  int64_t num_heads = 0;             // at a time
  float* queries = nullptr;          // [num_heads, num_q_blocks, head_dim] mean queries, scaled
  float* maps = nullptr;             // [num_heads, floats_of_map()]
  PooledPrefix* prefixes = nullptr;  // [num_heads]
  uint64_t* bins = nullptr;          // [num_heads, kDigits, 2, kMaxBins] counts, sums of lower bits
  int32_t* row_equals = nullptr;     // [num_heads, num_q_blocks] entries equal to the cut

  // A map is stored by panels of kTile rows, each as wide, in whole tiles, as its last row. The
  // panels before one hold panel * (panel - 1) / 2 + panel * first_panel_tiles() tiles.
  static int64_t first_panel_tiles(const SegmentShape& segment) {
    return ceil_div(segment.first_q_block + kTile, kTile);
  }
  static int64_t floats_of_map(const SegmentShape& segment) {
    if (segment.num_q_blocks == 0) return 0;
    const int64_t panel = (segment.num_q_blocks - 1) / kTile;  // the last one, up to the last block
    return kTile * kTile *
           (panel * (panel - 1) / 2 + panel * first_panel_tiles(segment) +
            ceil_div(segment.num_kv_blocks, kTile));
  }
};

struct PooledJob {
  const HeadBatch& batch;
  const ProxyMap& map;
  const Routes& routes;
  PooledRule rule;
  const BlockMask& mask;
  PooledScratch scratch;
  int num_workers;
  PooledCudaScratch cuda = {};
};

void pooled_cpu(const PooledJob& job);
// Pointers of the job are device memory. Fills map.key_means for the kv heads it needs. One launch
// per 256 heads, which returns at once where no head is pooled.
void pooled_cuda(const PooledJob& job, CUstream_st* stream);

}  // namespace crisp
