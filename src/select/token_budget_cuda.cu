// token_budget_cuda.cu - token masses of both directions tile by tile, then their counts.
//
// A tile is the proxy rows against one key block. Its 255 diagonals are kept apart, so that no two
// blocks add to one mass: an offset is the sum of two of them, x = first position + 127 - offset
// being
//   254 - x % 128   in key block x / 128
//   126 - x % 128   in the key block before
#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cmath>

#include "core/cuda.h"
#include "select/prefix_cuda.cuh"
#include "select/rows_cuda.cuh"
#include "select/token_budget.h"

namespace crisp {
namespace {

using namespace select_cuda;  // NOLINT(google-build-using-namespace): the kernels' own vocabulary

constexpr int kTile = static_cast<int>(kBlockSize);
constexpr int kDiagonals = static_cast<int>(TokenCudaScratch::kDiagonals);
static_assert(kTile == kProxyRows && kDiagonals == 2 * kTile);

struct Arguments {
  Rows q, k;               // of the first head, and of the kv head it reads
  const Pattern* pattern;  // [num_heads]
  const float* row_lse;    // of the first head's first proxy row
  float* columns;
  float* diagonals;
  int64_t* num_vertical;
  int64_t* num_slash;
  float* left_aligned;
  int64_t num_slots, num_blocks, min_blocks, first_position, kv_len, first_query;
  int32_t num_heads, group_size, first_in_group, head_dim, num_rows;
  float scale, gamma;

  __device__ int kv_head_of(int head) const { return (first_in_group + head) / group_size; }
};

// ---- masses

constexpr int kMassThreads = 256;
constexpr int kSlab = 64;            // dimensions in shared memory at a time
constexpr int kSlabRow = kSlab + 8;  // elements; the words of a fragment lie in different banks
constexpr int kMassRow = kTile + 8;  // floats; likewise for the pairs of an accumulator

union MassShared {
  alignas(16) uint16_t slabs[2][2][kTile * kSlabRow];  // [stage][queries, keys]
  float masses[kTile * kMassRow];
};

// Dimensions [dim, dim + 8) of the row at `row` (null: NaN), as many as there are.
__device__ __forceinline__ void load_unaligned(const uint16_t* row, int dim, bool is_inside,
                                               uint16_t* to) {
  constexpr uint16_t kNaN = 0x7fff;  // of both dtypes
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = !is_inside ? uint16_t{0} : row == nullptr ? kNaN : __ldg(row + dim + i);
  }
}

// Dimensions [dim, dim + kSlab) of up to kTile tokens from `first` on; zero past the last.
__device__ void load_slab(const Rows& rows, int head, int64_t first, int num_tokens, int head_dim,
                          int dim, uint16_t* slab) {
  constexpr int kChunks = kSlab / 8, kStep = kMassThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks * 8;
  for (int token = static_cast<int>(threadIdx.x) / kChunks; token < kTile; token += kStep) {
    const bool is_inside = token < num_tokens && dim + chunk < head_dim;
    const uint16_t* row = is_inside ? rows.row(head, first + token) : rows.data;
    uint16_t* to = slab + token * kSlabRow + chunk;
    if (rows.alignment >= 8 && row != nullptr) {
      __pipeline_memcpy_async(to, is_inside ? row + dim + chunk : row, 16, is_inside ? 0 : 16);
    } else {
      load_unaligned(row, dim + chunk, is_inside, to);
    }
  }
}

// c += a b^T of 16 rows and 8 columns over 16 dimensions.
template <bool kHalf>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

__device__ __forceinline__ uint32_t pair_at(const uint16_t* at) {
  return *reinterpret_cast<const uint32_t*>(at);
}

// A warp's 32 rows x 64 keys as 2 x 8 tiles of the tensor cores: thread (g, t) = (lane / 4,
// lane % 4) holds rows g and g + 8, keys 2 t and 2 t + 1 of each.
struct Accumulator {
  float at[2][8][4];
};

template <bool kHalf>
__device__ __forceinline__ void multiply_slab(const uint16_t* queries, const uint16_t* keys,
                                              Accumulator& sum) {
#pragma unroll
  for (int dim = 0; dim < kSlab; dim += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint16_t* at = queries + m * 16 * kSlabRow + dim;
      a[m][0] = pair_at(at);
      a[m][1] = pair_at(at + 8 * kSlabRow);
      a[m][2] = pair_at(at + 8);
      a[m][3] = pair_at(at + 8 * kSlabRow + 8);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint16_t* at = keys + n * 8 * kSlabRow + dim;
      const uint32_t b[2] = {pair_at(at), pair_at(at + 8)};
      multiply<kHalf>(sum.at[0][n], a[0], b);
      multiply<kHalf>(sum.at[1][n], a[1], b);
    }
  }
}

// Column sums by the first four warps, diagonals by the others: 128 terms each, in the order of the
// rows. Diagonals t and t + 128 have 128 together: the first ends at row t, the second begins
// there.
__device__ void sum_masses(const Arguments& a, const float* masses, int64_t tile) {
  const float inverse_rows = 1.0f / static_cast<float>(a.num_rows);
  const int t = static_cast<int>(threadIdx.x) % kTile;
  float sum = 0, second = 0;
  if (threadIdx.x < kTile) {
#pragma unroll 8
    for (int row = 0; row < kTile; ++row) sum += masses[row * kMassRow + t];
    a.columns[tile * kTile + t] = sum * inverse_rows;
    return;
  }
#pragma unroll 8
  for (int row = 0; row < kTile; ++row) {
    const float mass = masses[row * kMassRow + ((row + kTile - 1 - t) & (kTile - 1))];
    if (row <= t) {
      sum += mass;
    } else {
      second += mass;
    }
  }
  a.diagonals[tile * kDiagonals + t] = sum * inverse_rows;
  a.diagonals[tile * kDiagonals + kTile + t] = second * inverse_rows;
}

template <bool kHalf>
__device__ void store_masses(const Arguments& a, const Accumulator& sum, int64_t head,
                             int64_t first_key, float* masses) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int first_col = warp % 2 * 64 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp / 2 * 32 + m * 16 + half * 8 + lane / 4;
      const float lse = row < a.num_rows ? a.row_lse[head * a.num_slots + row] : INFINITY;
      // Keys of the block that the row sees.
      const int64_t seen = row < a.num_rows ? a.first_position + row + 1 - first_key : 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int col = first_col + n * 8;
        const float x = exp2_flushed(fmaf(sum.at[m][n][2 * half], a.scale, -lse));
        const float y = exp2_flushed(fmaf(sum.at[m][n][2 * half + 1], a.scale, -lse));
        *reinterpret_cast<float2*>(masses + row * kMassRow + col) = {col < seen ? x : 0.0f,
                                                                     col + 1 < seen ? y : 0.0f};
      }
    }
  }
}

// One key block of one head; heads of one key block follow each other, so that they share its keys
// in the cache.
template <bool kHalf>
__global__ void __launch_bounds__(kMassThreads, 2)
    sum_token_masses(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  MassShared& shared = *reinterpret_cast<MassShared*>(memory);
  const auto head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.num_heads));
  const int64_t block = blockIdx.x / static_cast<unsigned>(a.num_heads);
  if (a.pattern[head] == Pattern::kDense) return;
  const int64_t first_key = block * kTile;
  const auto num_keys = static_cast<int>(min(a.kv_len - first_key, int64_t{kTile}));
  const auto load = [&](int slab) {
    uint16_t(&to)[2][kTile * kSlabRow] = shared.slabs[slab % 2];
    load_slab(a.q, head, a.first_query, a.num_rows, a.head_dim, slab * kSlab, to[0]);
    load_slab(a.k, a.kv_head_of(head), first_key, num_keys, a.head_dim, slab * kSlab, to[1]);
    __pipeline_commit();
  };

  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int query = (warp / 2 * 32 + lane / 4) * kSlabRow + lane % 4 * 2;
  const int key = (warp % 2 * 64 + lane / 4) * kSlabRow + lane % 4 * 2;
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
    multiply_slab<kHalf>(shared.slabs[slab % 2][0] + query, shared.slabs[slab % 2][1] + key, sum);
    __syncthreads();
  }
  store_masses<kHalf>(a, sum, head, first_key, shared.masses);
  __syncthreads();
  sum_masses(a, shared.masses, head * a.num_blocks + block);
}

// ---- counts

// Slash mass of the offset first_position + 127 - x.
__device__ __forceinline__ float slash_mass(const Arguments& a, int64_t head, int64_t x) {
  const float* diagonals = a.diagonals + head * a.num_blocks * kDiagonals;
  const int64_t block = x / kTile;
  const auto at = static_cast<int>(x % kTile);
  const float before =
      block > 0 && at < kTile - 1 ? diagonals[(block - 1) * kDiagonals + kTile - 2 - at] : 0.0f;
  return block < a.num_blocks ? before + diagonals[block * kDiagonals + 2 * kTile - 2 - at]
                              : before;
}

// The bucket t / 128 of columns t = kv_len - 1 - offset of the last row, a warp each.
constexpr int kBucketThreads = 256, kBuckets = kBucketThreads / kWarp;
__global__ void __launch_bounds__(kBucketThreads)
    sum_left_aligned(const __grid_constant__ Arguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t head = blockIdx.y;
  const int64_t bucket = static_cast<int64_t>(blockIdx.x) * kBuckets + threadIdx.x / kWarp;
  if (bucket >= a.num_blocks || a.pattern[head] == Pattern::kDense) return;
  double sum = 0;
  for (int i = lane; i < kTile; i += kWarp) {
    const int64_t t = bucket * kTile + i;
    if (t < a.kv_len) sum += slash_mass(a, head, kTile - a.num_rows + t);
  }
  for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane == 0) {
    a.left_aligned[head * a.num_blocks + a.num_blocks - 1 - bucket] = static_cast<float>(sum);
  }
}

// Adds the masses whose digits before `digit` are `prefix`, a warp's worth at a time.
template <int kThreads, class MassAt>
__device__ void count_digit(Histogram& histogram, int digit, uint32_t prefix, int64_t num_tokens,
                            MassAt mass_at) {
  constexpr int kAhead = 4;
  for (int64_t base = 0; base < num_tokens; base += kAhead * kThreads) {
    uint32_t bits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t token = base + i * kThreads + threadIdx.x;
      bits[i] = token < num_tokens ? min(__float_as_uint(mass_at(token)), kEndBits - 1) : kEndBits;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool matches =
          bits[i] < kEndBits && (digit == 0 || bits[i] >> digit_shift(digit - 1) == prefix);
      const uint32_t value[1] = {bits[i]};
      const bool is_counted[1] = {matches};
      add_values(histogram, digit, value, is_counted);
    }
  }
}

// Blocks of one head and direction (blockIdx.x: vertical, slash).
constexpr int kCountThreads = 1024;
__global__ void __launch_bounds__(kCountThreads) count_blocks(const __grid_constant__ Arguments a) {
  __shared__ Histogram histogram;
  __shared__ CrossingScratch<kCountThreads> scratch;
  const int64_t head = blockIdx.y;
  if (a.pattern[head] != Pattern::kVerticalSlash) return;
  const bool is_slash = blockIdx.x == 1;
  const float* columns = a.columns + head * a.num_blocks * kTile;
  const auto mass_at = [&](int64_t token) {
    return is_slash ? slash_mass(a, head, kTile - a.num_rows + token) : columns[token];
  };

  Crossing crossing = {0, 0, 0, 0, 0};
  uint32_t cut = 0;
  uint64_t count = 1;
  for (int digit = 0; digit < kDigits; ++digit) {
    clear(histogram);
    __syncthreads();
    count_digit<kCountThreads>(histogram, digit, cut, a.kv_len, mass_at);
    __syncthreads();
    cut <<= digit_width(digit);
    const auto bin_at = [&](int bin, uint64_t& bin_count, double& sum) {
      bin_count = histogram.count[bin];
      sum = sum_of_bin((cut | static_cast<uint32_t>(bin)) << digit_shift(digit), bin_count,
                       histogram.low_sum(bin));
    };
    // Strictly: tokens without mass behind the one that reaches gamma exactly still count.
    crossing = find_crossing<kCountThreads>(1 << digit_width(digit), bin_at, crossing.above,
                                            {double{a.gamma}, false, true}, scratch);
    cut |= crossing.bin;
    count += crossing.count_above;
  }
  if (threadIdx.x != 0) return;
  count += most_within(__uint_as_float(cut), crossing.count, double{a.gamma} - crossing.above);
  const int64_t num_blocks =
      min(max(static_cast<int64_t>(count) / kTile + 1, a.min_blocks), a.num_blocks);
  (is_slash ? a.num_slash : a.num_vertical)[head] = num_blocks;
}

Arguments arguments_of(const TokenBudgetJob& job, int64_t first_head, int64_t num_heads) {
  constexpr float kLog2E = 1.44269504f;  // of panels-inl.h
  const HeadBatch& batch = job.batch;
  const Attention& attention = *batch.attention;
  const SegmentShape& segment = batch.segment;
  const int64_t group = group_size(attention);
  Arguments a = {};
  a.q = rows_from(q_rows(attention, segment, batch.first_head + first_head), attention.q);
  a.k = rows_from(k_rows(attention, segment, batch.kv_head_of(first_head)), attention.k);
  a.pattern = job.routes.pattern + first_head;
  a.row_lse = job.map.row_lse + first_head * job.rows.num_slots + job.rows.first_slot();
  a.columns = job.cuda.columns;
  a.diagonals = job.cuda.diagonals;
  a.num_vertical = job.budget.num_vertical + first_head;
  a.num_slash = job.budget.num_slash + first_head;
  a.left_aligned = job.budget.left_aligned_slash + first_head * job.map.num_blocks;
  a.num_slots = job.rows.num_slots;
  a.num_blocks = job.map.num_blocks;
  a.min_blocks = job.min_blocks;
  a.first_position = job.rows.first_position;
  a.kv_len = segment.kv_len;
  a.first_query = segment.q_len - job.rows.num_rows;
  a.num_heads = static_cast<int32_t>(num_heads);
  a.group_size = static_cast<int32_t>(group);
  a.first_in_group = static_cast<int32_t>((batch.first_head + first_head) % group);
  a.head_dim = static_cast<int32_t>(attention.q.head_dim);
  a.num_rows = static_cast<int32_t>(job.rows.num_rows);
  a.scale = attention.softmax_scale * kLog2E;
  a.gamma = job.gamma;
  return a;
}

template <bool kHalf>
void launch_masses(const Arguments& a, CUstream_st* stream) {
  constexpr auto kBytes = static_cast<int>(sizeof(MassShared));
  CRISP_CUDA_CHECK(cudaFuncSetAttribute(sum_token_masses<kHalf>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(static_cast<unsigned>(a.num_blocks * a.num_heads));
  sum_token_masses<kHalf><<<grid, kMassThreads, kBytes, stream>>>(a);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void token_budget_cuda(const TokenBudgetJob& job, CUstream_st* stream) {
  for (int64_t first = 0; first < job.batch.num_heads; first += job.cuda.num_heads) {
    const int64_t num_heads = std::min(job.cuda.num_heads, job.batch.num_heads - first);
    const Arguments a = arguments_of(job, first, num_heads);
    if (a.q.is_half) {
      launch_masses<true>(a, stream);
    } else {
      launch_masses<false>(a, stream);
    }
    const auto heads = static_cast<unsigned>(num_heads);
    const dim3 buckets(static_cast<unsigned>(ceil_div(a.num_blocks, kBuckets)), heads);
    sum_left_aligned<<<buckets, kBucketThreads, 0, stream>>>(a);
    CRISP_CUDA_CHECK(cudaGetLastError());
    count_blocks<<<dim3(2, heads), kCountThreads, 0, stream>>>(a);
    CRISP_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace crisp
