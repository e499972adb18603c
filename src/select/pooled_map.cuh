// pooled_map.cuh - the first half of pooled_cuda.cu: means of q and k, and the scores of the pooled
// maps. Scores add up dimension by dimension, means token by token, as on the CPU: up to the
// softmax the two agree bit by bit.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cmath>

#include "select/pooled.h"
#include "select/prefix_cuda.cuh"
#include "select/rows_cuda.cuh"

namespace crisp::pooled_map {

using namespace select_cuda;  // NOLINT(google-build-using-namespace): the kernels' own vocabulary

inline constexpr int kThreads = 256, kWarps = kThreads / kWarp, kBlocksPerSm = 2;
inline constexpr int kMaxHeads = 256;  // of one launch
inline constexpr int kTile = static_cast<int>(PooledCudaScratch::kTile);
inline constexpr int kSlab = 16;  // dimensions of the means in shared memory at a time
inline constexpr int kSlabRow =
    kSlab + 4;  // floats; eight rows, read at once, lie in different banks
static_assert(kDigits == PooledCudaScratch::kDigits && kMaxBins == PooledScratch::kMaxBins);

struct Arguments {
  Rows q, k;         // of the launch's first head, and of its kv head
  Pattern* pattern;  // [num_heads]
  uint32_t* mask;    // first mask row of the first head
  int64_t mask_head_stride;
  float* key_means;  // [num_kv_heads, num_cols, head_dim]
  PooledCudaScratch scratch;
  int64_t map_floats;
  int64_t q_offset, q_len, kv_len;
  int32_t num_heads, group_size, first_in_group, num_kv_heads;
  int32_t num_rows, num_cols, first_q_block, first_panel_tiles, words_per_row, head_dim;
  float scale, gamma;
  bool is_inclusive;

  __device__ int kv_head_of(int head) const { return (first_in_group + head) / group_size; }
  __device__ int limit_of(int row) const { return min(first_q_block + row + 1, num_cols); }
  __device__ int64_t tiles_before(int panel) const {
    return static_cast<int64_t>(panel) * (panel - 1) / 2 +
           static_cast<int64_t>(panel) * first_panel_tiles;
  }
  // Of one row of the panel.
  __device__ int panel_width(int panel) const {
    const int end = min(first_q_block + (panel + 1) * kTile, num_cols);
    return (end + kTile - 1) / kTile * kTile;
  }
  __device__ float* map_row(int slot, int row) const {
    const int panel = row / kTile;
    return scratch.maps + slot * map_floats + tiles_before(panel) * (kTile * kTile) +
           static_cast<int64_t>(row % kTile) * panel_width(panel);
  }
  __device__ uint64_t* bins_of(int slot, int digit) const {
    return scratch.bins + (static_cast<int64_t>(slot) * kDigits + digit) * 2 * kMaxBins;
  }
};

union Shared {
  alignas(16) float slabs[2][2][kTile * kSlabRow];  // [stage][queries, keys]
  Histogram histogram;
  CrossingScratch<kThreads> crossing;
};

// The pooled heads of the launch, and those worked on: slot s is heads[first + s].
struct Heads {
  int count, first, slots;
  int16_t heads[kMaxHeads];
  bool is_pooled[kMaxHeads];
  int slot, panel, tile_col;  // the tile that the block computes
  __device__ int of_slot(int slot) const { return heads[first + slot]; }
};

__device__ inline void list_heads(const Arguments& a, Heads& list) {
  if (threadIdx.x < kWarp) {
    const int lane = static_cast<int>(threadIdx.x);
    int count = 0;
    for (int base = 0; base < a.num_heads; base += kWarp) {
      const int head = base + lane;
      const bool is_pooled = head < a.num_heads && a.pattern[head] == Pattern::kPooled;
      const uint32_t pooled = __ballot_sync(kAllLanes, is_pooled);
      if (head < a.num_heads) list.is_pooled[head] = is_pooled;
      if (is_pooled) {
        list.heads[count + __popc(pooled & ((1u << lane) - 1))] = static_cast<int16_t>(head);
      }
      count += __popc(pooled);
    }
    if (lane == 0) list.count = count;
  }
  __syncthreads();
}

// ---- means

// Four neighbouring dimensions of a token.
template <bool kHalf, bool kWide>
__device__ __forceinline__ float4 load_quad(const uint16_t* at) {
  if constexpr (kWide) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(at));
    return {widen<kHalf>(raw.x & 0xffffu), widen<kHalf>(raw.x >> 16), widen<kHalf>(raw.y & 0xffffu),
            widen<kHalf>(raw.y >> 16)};
  } else {
    return {widen<kHalf>(__ldg(at)), widen<kHalf>(__ldg(at + 1)), widen<kHalf>(__ldg(at + 2)),
            widen<kHalf>(__ldg(at + 3))};
  }
}

__device__ __forceinline__ void add_quad(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// Sum of dimensions [dim, dim + 4) over tokens [first, first + count).
template <bool kHalf, bool kWide>
__device__ float4 sum_tokens(const Rows& rows, int head, int64_t first, int count, int dim) {
  float4 sum = {0, 0, 0, 0};
  if (rows.pages == nullptr) {
    const uint16_t* at = rows.row(head, first) + dim;
#pragma unroll 16
    for (int t = 0; t < count; ++t, at += rows.token_stride) {
      add_quad(sum, load_quad<kHalf, kWide>(at));
    }
    return sum;
  }
  int64_t page = (rows.first_token + first) / rows.page_size;
  int64_t slot = (rows.first_token + first) % rows.page_size;
#pragma unroll 4
  for (int t = 0; t < count; ++t) {
    const uint16_t* at = rows.paged_row(head, page, slot);
    add_quad(sum, at == nullptr ? float4{NAN, NAN, NAN, NAN} : load_quad<kHalf, kWide>(at + dim));
    if (++slot == rows.page_size) slot = 0, ++page;
  }
  return sum;
}

__device__ inline float4 mean_of_tokens(const Rows& rows, int head, int64_t first, int count,
                                        int dim) {
  const bool is_wide = rows.alignment >= 4;
  float4 sum;
  if (rows.is_half) {
    sum = is_wide ? sum_tokens<true, true>(rows, head, first, count, dim)
                  : sum_tokens<true, false>(rows, head, first, count, dim);
  } else {
    sum = is_wide ? sum_tokens<false, true>(rows, head, first, count, dim)
                  : sum_tokens<false, false>(rows, head, first, count, dim);
  }
  const auto divisor = static_cast<float>(count);
  return {sum.x / divisor, sum.y / divisor, sum.z / divisor, sum.w / divisor};
}

__device__ inline void mean_query(const Arguments& a, const Heads& list, int slot, int row,
                                  int dim) {
  const int64_t position = static_cast<int64_t>(a.first_q_block + row) * kBlockSize;
  const int64_t begin = max(position - a.q_offset, int64_t{0});
  const int64_t end = min(position + kBlockSize - a.q_offset, a.q_len);
  float4 mean = mean_of_tokens(a.q, list.of_slot(slot), begin, static_cast<int>(end - begin), dim);
  mean.x *= a.scale, mean.y *= a.scale, mean.z *= a.scale, mean.w *= a.scale;
  const int64_t at = (static_cast<int64_t>(slot) * a.num_rows + row) * a.head_dim + dim;
  *reinterpret_cast<float4*>(a.scratch.queries + at) = mean;
}

__device__ inline void mean_key(const Arguments& a, const Heads& list, int kv_head, int col,
                                int dim) {
  const int begin_head = max(kv_head * a.group_size - a.first_in_group, 0);
  const int end_head = min((kv_head + 1) * a.group_size - a.first_in_group, a.num_heads);
  bool is_wanted = false;
  for (int head = begin_head; head < end_head; ++head) is_wanted |= list.is_pooled[head];
  if (!is_wanted) return;
  const int64_t begin = static_cast<int64_t>(col) * kBlockSize;
  const int64_t end = min(begin + kBlockSize, a.kv_len);
  const int64_t at = (static_cast<int64_t>(kv_head) * a.num_cols + col) * a.head_dim + dim;
  *reinterpret_cast<float4*>(a.key_means + at) =
      mean_of_tokens(a.k, kv_head, begin, static_cast<int>(end - begin), dim);
}

// Mean queries of the slots, with the first of them all mean keys; empties the bins. Threads take
// neighbouring dimensions, so that a warp reads whole rows.
__device__ inline void compute_means(const Arguments& a, const Heads& list) {
  const int quads = a.head_dim / 4;
  const int64_t num_keys =
      list.first == 0 ? static_cast<int64_t>(a.num_kv_heads) * a.num_cols * quads : 0;
  const int64_t num_queries = static_cast<int64_t>(list.slots) * a.num_rows * quads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = thread; item < num_keys + num_queries; item += num_threads) {
    const bool is_key = item < num_keys;
    const int64_t at = is_key ? item : item - num_keys;
    const int64_t block = at / quads;
    const int dim = static_cast<int>(at % quads) * 4;
    const int per_head = is_key ? a.num_cols : a.num_rows;
    const auto head = static_cast<int>(block / per_head),
               index = static_cast<int>(block % per_head);
    if (is_key) {
      mean_key(a, list, head, index, dim);
    } else {
      mean_query(a, list, head, index, dim);
    }
  }
  const int64_t num_bins = static_cast<int64_t>(list.slots) * kDigits * 2 * kMaxBins;
  for (int64_t bin = thread; bin < num_bins; bin += num_threads) a.scratch.bins[bin] = 0;
}

// ---- scores

// Dimensions [dim, dim + kSlab) of up to kTile rows of means; zero past the last row and dimension.
__device__ __forceinline__ void load_slab(const float* means, int num_rows, int head_dim, int dim,
                                          float* slab) {
  constexpr int kQuads = kSlab / 4, kRows = kThreads / kQuads;
  // Not known to be the loop's next one: a pointer per row and loop would cost too many registers.
  asm volatile("" : "+r"(dim));
  const int row = static_cast<int>(threadIdx.x) / kQuads;
  const int quad = static_cast<int>(threadIdx.x) % kQuads * 4;
#pragma unroll
  for (int more = 0; more < kTile; more += kRows) {
    const bool is_inside = row + more < num_rows && dim + quad < head_dim;
    const int at = is_inside ? (row + more) * head_dim + dim + quad : 0;
    __pipeline_memcpy_async(slab + (row + more) * kSlabRow + quad, means + at, 16,
                            is_inside ? 0 : 16);
  }
}

// Thread (y, x) of a warp holds rows y + 4 i and columns x + 8 j of the warp's 32 x 64.
struct Accumulator {
  float at[8][8];
};

__device__ __forceinline__ void multiply_slab(const float* queries, const float* keys,
                                              Accumulator& sum) {
#pragma unroll 1  // more would not fit the registers; four warps per scheduler hide the loads
  for (int dim = 0; dim < kSlab; dim += 2) {
    float2 query[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[i] = *reinterpret_cast<const float2*>(queries + i * 4 * kSlabRow + dim);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 key = *reinterpret_cast<const float2*>(keys + j * 8 * kSlabRow + dim);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum.at[i][j] = fmaf(query[i].x, key.x, sum.at[i][j]);
        sum.at[i][j] = fmaf(query[i].y, key.y, sum.at[i][j]);
      }
    }
  }
}

// Base-2 logits of the listed tile. Its place is read again after the product: in registers it
// would be in the way.
__device__ inline void score_tile(const Arguments& a, const Heads& list, Shared& shared) {
  const int first_row = list.panel * kTile, first_col = list.tile_col * kTile;
  const int num_rows = min(kTile, a.num_rows - first_row);
  const int num_cols = min(kTile, a.num_cols - first_col);
  const float* queries =
      a.scratch.queries + (static_cast<int64_t>(list.slot) * a.num_rows + first_row) * a.head_dim;
  const int64_t kv_head = a.kv_head_of(list.of_slot(list.slot));
  const float* keys = a.key_means + (kv_head * a.num_cols + first_col) * a.head_dim;
  const auto load = [&](int slab) {
    float(&to)[2][kTile * kSlabRow] = shared.slabs[slab % 2];
    load_slab(queries, num_rows, a.head_dim, slab * kSlab, to[0]);
    load_slab(keys, num_cols, a.head_dim, slab * kSlab, to[1]);
    __pipeline_commit();
  };

  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const int row = warp / 2 * 32 + thread % kWarp / 8, col = warp % 2 * 64 + thread % 8;
  Accumulator sum = {};
  load(0);
#pragma unroll 1
  for (int slab = 0; slab * kSlab < a.head_dim; ++slab) {
    if ((slab + 1) * kSlab < a.head_dim) {
      load(slab + 1);
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncthreads();
    multiply_slab(shared.slabs[slab % 2][0] + row * kSlabRow,
                  shared.slabs[slab % 2][1] + col * kSlabRow, sum);
    __syncthreads();
  }
  const int panel = list.panel, rows_left = a.num_rows - panel * kTile - row;
  const int64_t width = a.panel_width(panel);
  float* to = a.map_row(list.slot, panel * kTile) + row * width + list.tile_col * kTile + col;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (4 * i >= rows_left) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) to[4 * i * width + 8 * j] = sum.at[i][j];
  }
}

// The last panel that begins at or before the tile.
__device__ inline int panel_of_tile(const Arguments& a, int64_t tile) {
  int low = 0, high = (a.num_rows - 1) / kTile;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (a.tiles_before(middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Also starts the prefixes anew: only now has every block written the rows of the heads before.
__device__ inline void compute_scores(const Arguments& a, Heads& list, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int slot = thread; blockIdx.x == 0 && slot < list.slots; slot += kThreads) {
    a.scratch.prefixes[slot] = {};
  }
  const int64_t num_tiles = a.map_floats / (kTile * kTile);
  for (int64_t item = blockIdx.x; item < list.slots * num_tiles; item += gridDim.x) {
    if (threadIdx.x == 0) {
      const int64_t tile = item % num_tiles;
      list.slot = static_cast<int>(item / num_tiles);
      list.panel = panel_of_tile(a, tile);
      list.tile_col = static_cast<int>(tile - a.tiles_before(list.panel));
    }
    __syncthreads();
    score_tile(a, list, shared);
    __syncthreads();
  }
}

}  // namespace crisp::pooled_map
