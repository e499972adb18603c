// pooled_cuda.cu - the pooled prefix in one cooperative launch. Which heads are pooled is known on
// the device only, so the kernel walks over them by itself, a few at a time, in phases that the
// whole grid finishes together; a layer without pooled heads costs one empty launch.
//
// Scores add up dimension by dimension, means token by token, as on the CPU: up to the softmax the
// two agree bit by bit.
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cmath>

#include "core/cuda.h"
#include "core/mask_rows.h"
#include "select/pooled.h"
#include "select/prefix_cuda.cuh"
#include "select/rows_cuda.cuh"

namespace crisp {
namespace {

using namespace select_cuda;  // NOLINT(google-build-using-namespace): the kernels' own vocabulary

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kBlocksPerSm = 2;
constexpr int kMaxHeads = 256;  // of one launch
constexpr int kTile = static_cast<int>(PooledCudaScratch::kTile);
constexpr int kSlab = 16;            // dimensions of the means in shared memory at a time
constexpr int kSlabRow = kSlab + 4;  // floats; eight rows, read at once, lie in different banks
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
  float slabs[2][2][kTile * kSlabRow];  // [stage][queries, keys]
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

__device__ void list_heads(const Arguments& a, Heads& list) {
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
#pragma unroll 8
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

__device__ float4 mean_of_tokens(const Rows& rows, int head, int64_t first, int count, int dim) {
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

__device__ void mean_query(const Arguments& a, const Heads& list, int slot, int row, int dim) {
  const int64_t position = static_cast<int64_t>(a.first_q_block + row) * kBlockSize;
  const int64_t begin = max(position - a.q_offset, int64_t{0});
  const int64_t end = min(position + kBlockSize - a.q_offset, a.q_len);
  float4 mean = mean_of_tokens(a.q, list.of_slot(slot), begin, static_cast<int>(end - begin), dim);
  mean.x *= a.scale, mean.y *= a.scale, mean.z *= a.scale, mean.w *= a.scale;
  const int64_t at = (static_cast<int64_t>(slot) * a.num_rows + row) * a.head_dim + dim;
  *reinterpret_cast<float4*>(a.scratch.queries + at) = mean;
}

__device__ void mean_key(const Arguments& a, const Heads& list, int kv_head, int col, int dim) {
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
__device__ void compute_means(const Arguments& a, const Heads& list) {
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
  if (thread < list.slots) a.scratch.prefixes[thread] = {};
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

// Base-2 logits of the listed tile. Its place is read again after the product: in registers it would
// be in the way.
__device__ void score_tile(const Arguments& a, const Heads& list, Shared& shared) {
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
__device__ int panel_of_tile(const Arguments& a, int64_t tile) {
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

__device__ void compute_scores(const Arguments& a, Heads& list, Shared& shared) {
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

// ---- passes over the rows

// Calls visit(slot, row) warp by warp and flush(slot) with the whole block after its last row of a
// slot. A block takes a run of rows, long and short ones by turns, so that it meets few slots.
template <class Visit, class Flush>
__device__ void for_each_row(const Arguments& a, const Heads& list, Visit visit, Flush flush) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t groups = (a.num_rows + kWarps - 1) / kWarps, total = list.slots * groups;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
  for (int64_t item = total * blockIdx.x / gridDim.x; item < end; ++item) {
    const auto slot = static_cast<int>(item / groups);
    const int64_t at = item % groups;
    const int64_t group = at % 2 == 0 ? at / 2 : groups - 1 - at / 2;
    const auto row = static_cast<int>(group * kWarps + warp);
    if (row < a.num_rows) visit(slot, row);
    if (item + 1 == end || (item + 1) / groups != slot) flush(slot);
  }
}

// Calls visit(col, quad) with the entries [col, col + 4) of a row, four of them loaded ahead. All
// lanes call it equally often; entries from `limit` on are to be ignored.
template <class Visit>
__device__ __forceinline__ void for_each_quad(const float* row, int limit, Visit visit) {
  constexpr int kAhead = 4, kStep = 4 * kWarp;
  const int first = static_cast<int>(threadIdx.x) % kWarp * 4;
  for (int base = 0; base < limit; base += kAhead * kStep) {
    float4 quads[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int col = base + i * kStep + first;
      quads[i] = col < limit ? *reinterpret_cast<const float4*>(row + col) : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * kStep < limit) visit(base + i * kStep + first, quads[i]);
    }
  }
}

__device__ void flush_histogram(const Arguments& a, Histogram& histogram, int slot, int digit) {
  using Word = unsigned long long;
  auto* counts = reinterpret_cast<Word*>(a.bins_of(slot, digit));
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < kMaxBins; bin += kThreads) {
    if (histogram.count[bin] == 0) continue;
    atomicAdd(counts + bin, Word{histogram.count[bin]});
    const auto low = static_cast<Word>(histogram.low_sum(bin));
    if (low != 0) atomicAdd(counts + kMaxBins + bin, low);
    histogram.count[bin] = histogram.low[bin] = histogram.carry[bin] = 0;
  }
  __syncthreads();
}

// A row's maximum, and its sum of exp2(score - maximum), equal in all lanes.
__device__ float2 softmax_of(const float* row, int limit) {
  float max = -INFINITY, sum = 0;
  for_each_quad(row, limit, [&](int col, float4 x) {
    if (col + 1 >= limit) x.y = -INFINITY;
    if (col + 2 >= limit) x.z = -INFINITY;
    if (col + 3 >= limit) x.w = -INFINITY;
    if (col >= limit) x.x = -INFINITY;
    const float new_max = fmaxf(fmaxf(max, fmaxf(x.x, x.y)), fmaxf(x.z, x.w));
    if (new_max > max) sum *= exp2_flushed(max - new_max);
    max = new_max;
    if (max == -INFINITY) return;
    sum += (exp2_flushed(x.x - max) + exp2_flushed(x.y - max)) +
           (exp2_flushed(x.z - max) + exp2_flushed(x.w - max));
  });
  float row_max = max;
  for (int step = 1; step < kWarp; step *= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, step));
  }
  sum *= exp2_flushed(max - row_max);
  for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return {row_max, sum};
}

// Scores become masses, which are counted by their first digit.
__device__ void normalise(const Arguments& a, const Heads& list, Shared& shared) {
  clear(shared.histogram);
  __syncthreads();
  const auto visit = [&](int slot, int row) {
    float* entries = a.map_row(slot, row);
    const int limit = a.limit_of(row);
    const float2 softmax = softmax_of(entries, limit);
    bool is_finite = true;
    for_each_quad(entries, limit, [&](int col, float4 x) {
      const auto mass = [&](int offset, float score) {
        const float value = exp2_flushed(score - softmax.x) / softmax.y;
        const uint32_t bits = __float_as_uint(value);
        const bool is_inside = col + offset < limit;
        is_finite &= !is_inside || bits < kEndBits;
        add(shared.histogram, 0, is_inside && bits < kEndBits, bits);
        return value;
      };
      x.x = mass(0, x.x), x.y = mass(1, x.y), x.z = mass(2, x.z), x.w = mass(3, x.w);
      if (col < limit) *reinterpret_cast<float4*>(entries + col) = x;
    });
    if (!is_finite) a.scratch.prefixes[slot].is_not_finite = 1;
  };
  for_each_row(a, list, visit, [&](int slot) { flush_histogram(a, shared.histogram, slot, 0); });
}

__device__ void count_digit(const Arguments& a, const Heads& list, Shared& shared, int digit) {
  clear(shared.histogram);
  __syncthreads();
  const int above = digit_shift(digit - 1);
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (prefix.is_not_finite != 0) return;
    const uint32_t cut = prefix.cut;
    const int limit = a.limit_of(row);
    for_each_quad(a.map_row(slot, row), limit, [&](int col, float4 x) {
      const auto matches = [&](int offset, float value) {
        return col + offset < limit && __float_as_uint(value) >> above == cut;
      };
      const bool matched[4] = {matches(0, x.x), matches(1, x.y), matches(2, x.z), matches(3, x.w)};
      if (!__any_sync(kAllLanes, matched[0] || matched[1] || matched[2] || matched[3])) return;
      add(shared.histogram, digit, matched[0], __float_as_uint(x.x));
      add(shared.histogram, digit, matched[1], __float_as_uint(x.y));
      add(shared.histogram, digit, matched[2], __float_as_uint(x.z));
      add(shared.histogram, digit, matched[3], __float_as_uint(x.w));
    });
  };
  for_each_row(a, list, visit,
               [&](int slot) { flush_histogram(a, shared.histogram, slot, digit); });
}

// The next digit of every slot's cut, and after the last how many equal entries belong to it.
__device__ void choose_digit(const Arguments& a, const Heads& list, Shared& shared, int digit) {
  for (int slot = static_cast<int>(blockIdx.x); slot < list.slots;
       slot += static_cast<int>(gridDim.x)) {
    const PooledPrefix before = a.scratch.prefixes[slot];
    if (before.is_not_finite != 0) {
      if (threadIdx.x == 0) a.pattern[list.of_slot(slot)] = Pattern::kDense;
      continue;
    }
    const uint64_t* bins = a.bins_of(slot, digit);
    const uint32_t prefix = before.cut << digit_width(digit);
    const auto bin_at = [&](int bin, uint64_t& count, double& sum) {
      count = bins[bin];
      sum = sum_of_bin((prefix | static_cast<uint32_t>(bin)) << digit_shift(digit), count,
                       bins[kMaxBins + bin]);
    };
    const bool is_first = digit == 0;
    const Target target = {is_first ? double{a.gamma} : before.target, is_first, false};
    const Crossing crossing = find_crossing<kThreads>(1 << digit_width(digit), bin_at,
                                                      before.covered, target, shared.crossing);
    if (threadIdx.x != 0) continue;
    PooledPrefix after = {prefix | crossing.bin, 0, crossing.above, crossing.target};
    if (digit == kDigits - 1) {
      const double mass = __uint_as_float(after.cut), need = after.target - after.covered;
      after.num_equal = crossing.count;
      after.num_ties = least_reaching(mass, crossing.count, need);
      const bool overshoots = static_cast<double>(after.num_ties) * mass > need;
      if (!a.is_inclusive && overshoots && after.num_ties > 0) --after.num_ties;
    }
    a.scratch.prefixes[slot] = after;
  }
}

// ---- the mask

// Some, not all, of the entries equal to the cut are kept: which depends on the rows before.
__device__ bool is_split(const PooledPrefix& prefix) {
  return prefix.is_not_finite == 0 && prefix.num_ties > 0 && prefix.num_ties < prefix.num_equal;
}

__device__ void count_equals(const Arguments& a, const Heads& list) {
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (!is_split(prefix)) return;
    const float cut = __uint_as_float(prefix.cut);
    const int limit = a.limit_of(row);
    int count = 0;
    for_each_quad(a.map_row(slot, row), limit, [&](int col, float4 x) {
      count += static_cast<int>(col < limit && x.x == cut) +
               static_cast<int>(col + 1 < limit && x.y == cut) +
               static_cast<int>(col + 2 < limit && x.z == cut) +
               static_cast<int>(col + 3 < limit && x.w == cut);
    });
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x % kWarp == 0) {
      a.scratch.row_equals[static_cast<int64_t>(slot) * a.num_rows + row] = count;
    }
  };
  for_each_row(a, list, visit, [](int) {});
}

// How many entries of the row that are equal to the cut are kept; the first ones.
__device__ int equals_kept(const Arguments& a, const PooledPrefix& prefix, int slot, int row) {
  if (!is_split(prefix)) return prefix.num_ties > 0 ? INT32_MAX : 0;
  const int32_t* counts = a.scratch.row_equals + static_cast<int64_t>(slot) * a.num_rows;
  uint64_t before = 0;
  for (int r = static_cast<int>(threadIdx.x) % kWarp; r < row; r += kWarp) {
    before += static_cast<uint64_t>(counts[r]);
  }
  for (int step = 1; step < kWarp; step *= 2) {
    before += __shfl_xor_sync(kAllLanes, before, step);
  }
  if (before >= prefix.num_ties) return 0;
  const uint64_t left = prefix.num_ties - before;
  return left < INT32_MAX ? static_cast<int>(left) : INT32_MAX;
}

__device__ void write_row(const Arguments& a, const float* entries, int limit, uint32_t cut,
                          int equals, uint32_t* words) {
  constexpr int kAhead = 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int base = 0; base < a.words_per_row; base += kWarp) {
    uint32_t mine = 0;  // lane l ends up with word base + l
    for (int step = 0; step < kWarp && (base + step) * kWarp < limit; step += kAhead) {
      uint32_t bits[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int col = (base + step + i) * kWarp + lane;
        bits[i] = col < limit ? __float_as_uint(entries[col]) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool is_inside = (base + step + i) * kWarp + lane < limit;
        const bool is_equal = is_inside && bits[i] == cut;
        const uint32_t equal = __ballot_sync(kAllLanes, is_equal);
        const bool is_kept = (is_inside && bits[i] > cut) ||
                             (is_equal && __popc(equal & ((1u << lane) - 1)) < equals);
        const uint32_t kept = __ballot_sync(kAllLanes, is_kept);
        equals = max(equals - __popc(equal), 0);
        if (lane == step + i) mine = kept;
      }
    }
    if (base + lane < a.words_per_row) words[base + lane] = mine;
  }
}

__device__ void write_rows(const Arguments& a, const Heads& list) {
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (prefix.is_not_finite != 0) return;
    uint32_t* words = a.mask + list.of_slot(slot) * a.mask_head_stride +
                      static_cast<int64_t>(row) * a.words_per_row;
    write_row(a, a.map_row(slot, row), a.limit_of(row), prefix.cut,
              equals_kept(a, prefix, slot, row), words);
  };
  for_each_row(a, list, visit, [](int) {});
}

// No phase reads memory that another block writes in the same phase. What a slot holds is written
// again two phases after its last reader at the earliest: the means, and the bins, by
// compute_means; the maps by compute_scores.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_prefixes(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  __shared__ Heads list;
  list_heads(a, list);
  if (list.count == 0) return;  // in every block: nobody changes a pattern before the first sync
  const auto grid = cooperative_groups::this_grid();
  for (int first = 0; first < list.count; first += static_cast<int>(a.scratch.num_heads)) {
    __syncthreads();
    if (threadIdx.x == 0) {
      list.first = first;
      list.slots = min(list.count - first, static_cast<int>(a.scratch.num_heads));
    }
    __syncthreads();
    compute_means(a, list);
    grid.sync();
    compute_scores(a, list, shared);
    grid.sync();
    normalise(a, list, shared);
    grid.sync();
    choose_digit(a, list, shared, 0);
    grid.sync();
    count_digit(a, list, shared, 1);
    grid.sync();
    choose_digit(a, list, shared, 1);
    grid.sync();
    count_digit(a, list, shared, 2);
    grid.sync();
    choose_digit(a, list, shared, 2);
    grid.sync();
    count_equals(a, list);
    grid.sync();
    write_rows(a, list);
  }
}

Arguments arguments_of(const PooledJob& job, int64_t first_head, int64_t num_heads) {
  constexpr float kLog2E = 1.44269504f;  // of panels-inl.h
  const HeadBatch& batch = job.batch;
  const Attention& attention = *batch.attention;
  const SegmentShape& segment = batch.segment;
  const int64_t kv_head = batch.kv_head_of(first_head), group = group_size(attention);
  Arguments a = {};
  a.q = rows_from(q_rows(attention, segment, batch.first_head + first_head), attention.q);
  a.k = rows_from(k_rows(attention, segment, kv_head), attention.k);
  a.pattern = job.routes.pattern + first_head;
  a.mask = mask_row(job.mask, segment, batch.first_head + first_head, 0);
  a.mask_head_stride = job.mask.num_q_blocks * job.mask.words_per_row();
  a.num_cols = static_cast<int32_t>(segment.num_kv_blocks);
  a.head_dim = static_cast<int32_t>(attention.q.head_dim);
  a.key_means =
      job.map.key_means + (kv_head - batch.first_kv_head()) * segment.num_kv_blocks * a.head_dim;
  a.scratch = job.cuda;
  a.map_floats = PooledCudaScratch::floats_of_map(segment);
  a.q_offset = segment.q_offset;
  a.q_len = segment.q_len;
  a.kv_len = segment.kv_len;
  a.num_heads = static_cast<int32_t>(num_heads);
  a.group_size = static_cast<int32_t>(group);
  a.first_in_group = static_cast<int32_t>((batch.first_head + first_head) % group);
  a.num_kv_heads = static_cast<int32_t>(batch.kv_head_of(first_head + num_heads - 1) - kv_head + 1);
  a.num_rows = static_cast<int32_t>(segment.num_q_blocks);
  a.first_q_block = static_cast<int32_t>(segment.first_q_block);
  a.first_panel_tiles = static_cast<int32_t>(PooledCudaScratch::first_panel_tiles(segment));
  a.words_per_row = static_cast<int32_t>(job.mask.words_per_row());
  a.scale = attention.softmax_scale * kLog2E;
  a.gamma = job.rule.gamma;
  a.is_inclusive = job.rule.is_inclusive;
  return a;
}

}  // namespace

void pooled_cuda(const PooledJob& job, CUstream_st* stream) {
  if (job.batch.segment.num_q_blocks == 0) return;
  int device = 0, num_sms = 0, per_sm = 0;
  CRISP_CUDA_CHECK(cudaGetDevice(&device));
  CRISP_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  CRISP_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, select_prefixes, kThreads, 0));
  const dim3 grid(static_cast<unsigned>(num_sms * per_sm));
  for (int64_t first = 0; first < job.batch.num_heads; first += kMaxHeads) {
    Arguments a =
        arguments_of(job, first, std::min<int64_t>(kMaxHeads, job.batch.num_heads - first));
    void* arguments[] = {&a};
    CRISP_CUDA_CHECK(cudaLaunchCooperativeKernel(select_prefixes, grid, dim3(kThreads), arguments,
                                                 size_t{0}, stream));
  }
}

}  // namespace crisp
