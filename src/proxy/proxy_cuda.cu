// proxy_cuda.cu - the CUDA proxy: which kernel goes over the keys, and what is made of its sums.
#include <algorithm>

#include "core/cuda.h"
#include "proxy/proxy_cuda.h"

namespace crisp {
namespace proxy_cuda {
namespace {

constexpr int kBlock = 128;  // keys per block, and the most proxy rows
constexpr float kLog2E = 1.4426950408889634f;

// ---- the keys without wgmma: one head and a range of blocks per CTA, float products

// 256 threads as 16 x 16, each 8 x 8 of the 128 x 128 scores: rows 8 (t / 16) .., keys t % 16 + 16
// j.
constexpr int kDepth = 16;  // columns of q and k in shared memory at a time

struct PlainTile {
  float q[kDepth][kBlock + 4], k[kDepth][kBlock + 4];
};

__device__ __forceinline__ void load_columns(const CudaRows& rows, int64_t head, int64_t first,
                                             int count, int column, float (*to)[kBlock + 4]) {
  for (int i = threadIdx.x; i < kBlock * kDepth; i += 256) {
    const int row = i / kDepth, d = column + i % kDepth;
    float value = 0.f;
    if (row < count && d < rows.head_dim) value = rows.value(rows.row(head, first + row), d);
    to[i % kDepth][row] = value;
  }
}

// Over the 16 lanes that share rows; every lane gets the result.
template <class Op>
__device__ __forceinline__ float reduce16(float x, Op op) {
#pragma unroll
  for (int step = 8; step; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return a + b; }

__device__ void plain_scores(const Call& p, PlainTile& tile, int head, int block,
                             float (&s)[8][8]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int num_keys = min(kBlock, p.kv_len - block * kBlock);
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i / 8][i % 8] = 0.f;
  for (int column = 0; column < p.q.head_dim; column += kDepth) {
    __syncthreads();
    load_columns(p.q, p.first_head + head, p.first_query, p.num_rows, column, tile.q);
    load_columns(p.k, (p.first_head + head) / p.group_size, int64_t{block} * kBlock, num_keys,
                 column, tile.k);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      float a[8], b[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = tile.q[d][ty * 8 + i], b[i] = tile.k[d][tx + 16 * i];
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i / 8][i % 8] = fmaf(a[i / 8], b[i % 8], s[i / 8][i % 8]);
    }
  }
}

__global__ void __launch_bounds__(256, 1) plain_kernel(const __grid_constant__ Call p) {
  __shared__ PlainTile tile;
  const int head = static_cast<int>(blockIdx.x) / p.range_count;
  const int range = static_cast<int>(blockIdx.x) % p.range_count;
  const int begin = range * p.range_blocks, end = min(begin + p.range_blocks, p.num_blocks);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float top[8], sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) top[i] = -INFINITY, sum[i] = 0.f;
  for (int block = begin; block < end; ++block) {
    float s[8][8];
    plain_scores(p, tile, head, block, s);
    const Window window = window_of_block(p, block);
    float* out =
        p.scratch.partials + (static_cast<int64_t>(head) * p.num_blocks + block) * 3 * kBlock;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = ty * 8 + i, position = p.first_position + row;
      const int last_seen = position - block * kBlock, split = position % kBlock;
      float m = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        s[i][j] = tx + 16 * j > last_seen ? -INFINITY : s[i][j] * p.scale_log2;
        m = fmaxf(m, s[i][j]);
      }
      m = reduce16(m, larger);
      const float shift = m == -INFINITY ? 0.f : m;
      float low = 0.f, high = 0.f, edge = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = tx + 16 * j;
        const float e = exp2f(s[i][j] - shift);
        if (c <= split)
          low += e;
        else
          high += e;
        if (c < window.low_end || c >= window.high_begin) edge += e;
      }
      low = reduce16(low, plus), high = reduce16(high, plus), edge = reduce16(edge, plus);
      if (tx == 0) {
        out[row] = m, out[kBlock + row] = low, out[2 * kBlock + row] = high;
        if (window.edge >= 0)
          p.scratch.edges[(static_cast<int64_t>(head) * 2 + window.edge) * kBlock + row] = edge;
      }
      const float t = fmaxf(top[i], m), base = t == -INFINITY ? 0.f : t;
      sum[i] = sum[i] * exp2f(top[i] - base) + (low + high) * exp2f(m - base);
      top[i] = t;
    }
  }
  if (tx != 0) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    p.scratch.ranges[(static_cast<int64_t>(head) * p.range_count + range) * kBlock + ty * 8 + i] =
        make_float2(top[i], sum[i]);
}

// ---- from partial sums to masses

constexpr int kReduceBlocks = 16;  // key blocks per CTA

// Sums of one (head, block) over the proxy rows of the q_block before the last, and of the last.
struct BlockMass {
  float before_low, before_high, last_low, last_high, edge;
};

__device__ BlockMass block_mass(const Call& p, int head, int block, int cut, const float* lse,
                                int lane) {
  BlockMass mass{};
  if (block < 0 || block >= p.num_blocks) return mass;
  const Window window = window_of_block(p, block);
  const float* part =
      p.scratch.partials + (static_cast<int64_t>(head) * p.num_blocks + block) * 3 * kBlock;
  const float* edge =
      p.scratch.edges + (static_cast<int64_t>(head) * 2 + max(window.edge, 0)) * kBlock;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    const int row = i * 32 + lane;
    if (row >= p.num_rows) continue;
    const float weight = exp2f(part[row] - lse[row]);
    const float low = weight * part[kBlock + row], high = weight * part[2 * kBlock + row];
    if (row < cut)
      mass.before_low += low, mass.before_high += high;
    else
      mass.last_low += low, mass.last_high += high;
    if (window.edge >= 0) mass.edge += weight * edge[row];
  }
  float* const sums[5] = {&mass.before_low, &mass.before_high, &mass.last_low, &mass.last_high,
                          &mass.edge};
#pragma unroll
  for (float* x : sums)
#pragma unroll
    for (int step = 16; step; step /= 2) *x += __shfl_xor_sync(~0u, *x, step);
  return mass;
}

// log2-sum-exp2 of every proxy row into lse[128]; 256 threads.
__device__ void row_normalisers(const Call& p, int head, float* lse) {
  const int row = threadIdx.x;
  if (row < kBlock) {
    const float2* r = p.scratch.ranges + static_cast<int64_t>(head) * p.range_count * kBlock + row;
    float top = -INFINITY, sum = 0.f;
    for (int c = 0; c < p.range_count; ++c) top = fmaxf(top, r[c * kBlock].x);
    const float base = top == -INFINITY ? 0.f : top;
    for (int c = 0; c < p.range_count; ++c) sum += r[c * kBlock].y * exp2f(r[c * kBlock].x - base);
    lse[row] = base + log2f(sum);
  }
  __syncthreads();
}

// C_struct: covered blocks and the two edges; warps take blocks in turn. 256 threads.
__device__ void structural_mass(const Call& p, int head, const float* lse, float* out) {
  __shared__ float warps[8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float total = 0.f;
  const int sink_end = min((p.sink_tokens + kBlock - 1) / kBlock, p.num_blocks);
  const int recency_begin =
      max(sink_end, (p.kv_len > p.recency_tokens ? p.kv_len - p.recency_tokens : 0) / kBlock);
  const int count = sink_end + max(p.num_blocks - recency_begin, 0);
  for (int i = warp; i < count; i += 8) {
    const int block = i < sink_end ? i : recency_begin + i - sink_end;
    const Window window = window_of_block(p, block);
    const BlockMass mass = block_mass(p, head, block, kBlock, lse, lane);
    if (window.covers_block) total += mass.before_low + mass.before_high;
    if (window.edge >= 0) total += mass.edge;
  }
  if (lane == 0) warps[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.f;
  for (int w = 0; w < 8; ++w) sum += warps[w];
  *out = sum / static_cast<float>(p.num_rows);
}

struct MapOut {
  float *vertical, *slash, *structural_mass, *row_lse;
  int num_slots, first_slot;
};

// Delta of a slash: last_q_block - block, one less for keys past the row's own column, one less
// again for the rows of the q_block before the last.
__global__ void __launch_bounds__(256)
    reduce_kernel(const __grid_constant__ Call p, const MapOut out) {
  __shared__ float lse[kBlock];
  __shared__ BlockMass masses[kReduceBlocks + 2];  // [i] is of block first - 2 + i
  const int chunks = (p.num_blocks + kReduceBlocks - 1) / kReduceBlocks;
  const int head = static_cast<int>(blockIdx.x) / chunks;
  const int first = static_cast<int>(blockIdx.x) % chunks * kReduceBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  row_normalisers(p, head, lse);
  const int last_q_block = p.num_blocks - 1;
  const int cut = max(last_q_block * kBlock - p.first_position, 0);
  for (int i = warp; i < kReduceBlocks + 2; i += 8) {
    const BlockMass mass = block_mass(p, head, first - 2 + i, cut, lse, lane);
    if (lane == 0) masses[i] = mass;
  }
  __syncthreads();

  const float each = 1.f / static_cast<float>(p.num_rows);
  const int i = threadIdx.x, block = first + i;
  if (i < kReduceBlocks && block < p.num_blocks) {
    const BlockMass &here = masses[i + 2], &one = masses[i + 1], &two = masses[i];
    const int64_t row = static_cast<int64_t>(head) * p.num_blocks;
    out.vertical[row + block] =
        (here.before_low + here.before_high + here.last_low + here.last_high) * each;
    // Blocks b, b - 1 and b - 2 meet in the diagonal Delta = last_q_block - b.
    out.slash[row + last_q_block - block] =
        (here.last_low + (one.last_high + one.before_low) + two.before_high) * each;
  }
  if (first != 0) return;
  structural_mass(p, head, lse, out.structural_mass + head);
  for (int slot = threadIdx.x; slot < out.num_slots; slot += 256) {
    const int row_of = slot - out.first_slot;
    out.row_lse[static_cast<int64_t>(head) * out.num_slots + slot] =
        row_of >= 0 && row_of < p.num_rows ? lse[row_of] : INFINITY;
  }
}

// ---- FlexPrefill's estimate: softmax over blocks of scale * (mean proxy query . mean key)

// A thread adds up two neighbouring dimensions of every key; with 256 threads and few dimensions,
// every key of its share, and shares are added in order.
constexpr int kMeanThreads = 256;

__global__ void __launch_bounds__(kMeanThreads, 4)
    key_means_kernel(const __grid_constant__ Call p, bool pairs_aligned,
                     float* __restrict__ means) {
  __shared__ float2 shares[kMeanThreads];
  const int kv_head = static_cast<int>(blockIdx.x) / p.num_blocks;
  const int block = static_cast<int>(blockIdx.x) % p.num_blocks;
  const int num_keys = min(kBlock, p.kv_len - block * kBlock);
  const int pairs = p.k.head_dim / 2, num_shares = kMeanThreads / pairs;
  const int share = static_cast<int>(threadIdx.x) / pairs, d = threadIdx.x % pairs * 2;
  float2 sum = {0.f, 0.f};
  if (share < num_shares) {
#pragma unroll 8
    for (int t = share; t < num_keys; t += num_shares) {
      const uint16_t* row = p.k.row(p.first_kv_head + kv_head, int64_t{block} * kBlock + t);
      const float2 x = p.k.pair(row, d, pairs_aligned);
      sum.x += x.x, sum.y += x.y;
    }
  }
  shares[threadIdx.x] = sum;
  __syncthreads();
  if (share != 0) return;
  for (int other = 1; other < num_shares; ++other) {
    const float2 x = shares[threadIdx.x + other * pairs];
    sum.x += x.x, sum.y += x.y;
  }
  float* out = means + (static_cast<int64_t>(kv_head) * p.num_blocks + block) * p.k.head_dim + d;
  out[0] = sum.x / static_cast<float>(num_keys);
  out[1] = sum.y / static_cast<float>(num_keys);
}

// Maximum, or sum, over the 256 threads of the block, in a fixed order.
template <class Op>
__device__ float block_reduce(float x, Op op, float* scratch) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
  for (int w = 1; w < 8; ++w) x = op(x, scratch[w]);
  return x;
}

__global__ void __launch_bounds__(256)
    estimate_kernel(const __grid_constant__ Call p, const float* __restrict__ means,
                    float* __restrict__ estimate) {
  constexpr int kMaxDim = 512;
  __shared__ float query[kMaxDim];
  __shared__ float scratch[8];
  const int head = static_cast<int>(blockIdx.x), dim = p.q.head_dim;
  const int kv_head = (p.first_head + head) / p.group_size - p.first_kv_head;
  for (int d = threadIdx.x; d < dim; d += 256) {
    float sum = 0.f;
    for (int t = 0; t < p.num_rows; ++t)
      sum += p.q.value(p.q.row(p.first_head + head, p.first_query + t), d);
    query[d] = sum / static_cast<float>(p.num_rows) * p.softmax_scale;
  }
  __syncthreads();
  float* out = estimate + static_cast<int64_t>(head) * p.num_blocks;
  const float* keys = means + static_cast<int64_t>(kv_head) * p.num_blocks * dim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int block = warp; block < p.num_blocks; block += 8) {
    float dot = 0.f;
    for (int d = lane; d < dim; d += 32)
      dot = fmaf(query[d], keys[static_cast<int64_t>(block) * dim + d], dot);
#pragma unroll
    for (int step = 16; step; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    if (lane == 0) out[block] = dot;
  }
  __syncthreads();
  float top = -INFINITY, sum = 0.f;
  for (int b = threadIdx.x; b < p.num_blocks; b += 256) top = fmaxf(top, out[b]);
  top = block_reduce(top, larger, scratch);
  for (int b = threadIdx.x; b < p.num_blocks; b += 256) sum += expf(out[b] - top);
  sum = block_reduce(sum, plus, scratch);
  for (int b = threadIdx.x; b < p.num_blocks; b += 256) out[b] = expf(out[b] - top) / sum;
}

// ---- host

Call describe(const HeadBatch& batch, const ProxyOptions& options) {
  const Attention& attention = *batch.attention;
  const SegmentShape& segment = batch.segment;
  const ProxyRows rows = proxy_rows(segment);
  Call call;
  call.q = cuda_q_rows(attention, segment);
  call.k = cuda_k_rows(attention, segment);
  call.num_rows = static_cast<int32_t>(rows.num_rows);
  call.num_blocks = static_cast<int32_t>(segment.num_kv_blocks);
  call.kv_len = static_cast<int32_t>(segment.kv_len);
  call.first_position = static_cast<int32_t>(rows.first_position);
  call.first_query = static_cast<int32_t>(segment.q_len - rows.num_rows);
  call.sink_tokens = options.sink_tokens;
  call.recency_tokens = options.recency_tokens;
  call.first_head = static_cast<int32_t>(batch.first_head);
  call.num_heads = static_cast<int32_t>(batch.num_heads);
  call.group_size = static_cast<int32_t>(group_size(attention));
  call.first_kv_head = static_cast<int32_t>(batch.first_kv_head());
  call.num_kv_heads = static_cast<int32_t>(batch.num_kv_heads());
  call.slices = static_cast<int32_t>(
      ceil_div(std::min<int64_t>(call.group_size, call.num_heads), kHeadsPerSlice));
  call.softmax_scale = attention.softmax_scale;
  call.scale_log2 = attention.softmax_scale * kLog2E;
  const int wanted =
      std::clamp(kTargetCtas / (call.num_kv_heads * call.slices), 1, std::max(call.num_blocks, 1));
  call.range_blocks = (call.num_blocks + wanted - 1) / wanted;
  call.range_count = call.num_blocks == 0 ? 0 : (call.num_blocks - 1) / call.range_blocks + 1;
  return call;
}

}  // namespace
}  // namespace proxy_cuda

void proxy_map_cuda(const HeadBatch& batch, const ProxyOptions& options, const ProxyMap& map,
                    Run& run) {
  using namespace proxy_cuda;
  Call call = describe(batch, options);
  const int64_t heads = batch.num_heads, blocks = call.num_blocks;
  call.scratch.partials = run.workspace.take<float>(heads * blocks * 3 * kBlock);
  call.scratch.edges = run.workspace.take<float>(heads * 2 * kBlock);
  call.scratch.ranges = run.workspace.take<float2>(heads * call.range_count * kBlock);
  if (run.is_counting() || heads == 0 || blocks == 0) return;

  cudaStream_t stream = run.context.stream;
  if (!enqueue_sm90(call, *batch.attention, batch.segment, stream)) {
    plain_kernel<<<static_cast<unsigned>(heads * call.range_count), 256, 0, stream>>>(call);
    CRISP_CUDA_CHECK(cudaGetLastError());
  }
  const ProxyRows rows = proxy_rows(batch.segment);
  const MapOut out{map.vertical,
                   map.slash,
                   map.structural_mass,
                   map.row_lse,
                   static_cast<int>(rows.num_slots),
                   static_cast<int>(rows.first_slot())};
  const int64_t chunks = ceil_div(blocks, kReduceBlocks);
  reduce_kernel<<<static_cast<unsigned>(heads * chunks), 256, 0, stream>>>(call, out);
  CRISP_CUDA_CHECK(cudaGetLastError());
  if (!options.pooled_estimate) return;
  key_means_kernel<<<static_cast<unsigned>(call.num_kv_heads * blocks), kMeanThreads, 0, stream>>>(
      call, call.k.has_aligned_pairs(), map.key_means);
  CRISP_CUDA_CHECK(cudaGetLastError());
  estimate_kernel<<<static_cast<unsigned>(heads), 256, 0, stream>>>(call, map.key_means,
                                                                    map.pooled_estimate);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace crisp
