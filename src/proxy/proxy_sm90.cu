// proxy_sm90.cu - the last 128 queries of every head against all keys, one Q K^T pass on Hopper.
//
// A CTA takes a range of key blocks of one kv head and up to four of its query heads, so K is read
// once per kv head; three warpgroups:
//   warpgroup 0       thread 0 copies K (and Q once)
//   warpgroups 1, 2   64 proxy rows each; two heads at a time, so that the second Q K^T runs while
//                     the first is summed up
// What they leave is described in proxy_cuda.h; docs/selection.md has the identity behind it.
#include <algorithm>

#include "core/sm90.cuh"
#include "core/tensor_map.h"
#include "proxy/proxy_cuda.h"

namespace crisp::proxy_cuda {
namespace {

using namespace sm90;

constexpr int kBlock = 128, kRows = 64;
constexpr int kHeads = kHeadsPerSlice;
constexpr int kStages = 3;

template <int kDim>
struct alignas(1024) SharedMemoryPlan {
  static constexpr int kHalves = kDim / 64;
  static constexpr uint32_t kHalfTile = kBlock * 128, kHalfQuery = kRows * 128;  // bytes
  static constexpr uint32_t kTileBytes = kHalves * kHalfTile, kQueryBytes = kHalves * kHalfQuery;
  uint8_t q[kHeads][2][kQueryBytes];  // [head][consumer]: [column half][row][64], swizzled
  uint8_t k[kStages][kTileBytes];
  Barrier q_full, k_full[kStages], k_empty[kStages];
};
template <int kDim>
constexpr size_t kSharedBytes = sizeof(SharedMemoryPlan<kDim>) + 1024;
static_assert(kSharedBytes<128> <= 232448);

// Running over this CTA's blocks, this thread's columns.
struct Row {
  float top, sum;
};

// What a thread knows about its two rows of the 64 x 128 tile: row0 and row0 + 8.
struct Place {
  int row0, quad;
  int split[2];  // P % 128 of each: keys c <= split are low
};

// Sums of one tile's exponentials on both sides of each row's split.
// s[4 g + 2 h + e] is column 8 g + 2 quad + e. The pair (8 g + 2 quad, + 1) of a row is low up to
// group end - 1; if the split cuts a pair, its second key is set aside for the high side.
// kAligned: row 0 starts a block, so a warp's rows are split in groups 2 strip and 2 strip + 1
// alone.
template <bool kAligned>
CRISP_DEVICE void split_sums(float (&s)[64], const Place& at, float (&low)[2], float (&high)[2]) {
  low[0] = low[1] = high[0] = high[1] = 0.f;
  if constexpr (kAligned) {
    const int within = at.row0 & 7, strip = at.row0 >> 4;
    const bool is_cut = 2 * at.quad == within;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      if (w != strip || !is_cut) continue;
      high[0] = s[8 * w + 1], s[8 * w + 1] = 0.f;
      high[1] = s[8 * w + 7], s[8 * w + 7] = 0.f;
    }
    const int end = 2 * strip + (2 * at.quad <= within);  // one more for row 1
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int g = i >> 1, h = i & 1;
      const float pair = s[4 * g + 2 * h] + s[4 * g + 2 * h + 1];
      if (g - h < end)
        low[h] += pair;
      else
        high[h] += pair;
    }
  } else {
    int end[2], cut[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int past = at.split[h] - 2 * at.quad;  // < 0: no pair is low
      end[h] = past >= 0 ? (past >> 3) + 1 : 0;
      cut[h] = past >= 0 && (past & 7) == 0 ? past >> 3 : -1;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int g = i >> 1, h = i & 1;
      const float first = s[4 * g + 2 * h], second = s[4 * g + 2 * h + 1];
      const bool is_cut = g == cut[h];
      const float pair = is_cut ? first : first + second;
      if (is_cut) high[h] += second;
      if (g < end[h])
        low[h] += pair;
      else
        high[h] += pair;
    }
  }
}

// Sums over the keys inside a structural window, of a block that it covers in part.
CRISP_DEVICE void store_edge(const float (&s)[64], const Call& p, int head, int block,
                             const Place& at) {
  const Window window = window_of_block(p, block);
  if (window.edge < 0) return;
  float t[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int c = (i >> 2) * 8 + at.quad * 2 + (i & 1);
    if (c < window.low_end || c >= window.high_begin) t[(i >> 1) & 1] += s[i];
  }
  float* edge = p.scratch.edges + (static_cast<int64_t>(head) * 2 + window.edge) * kBlock;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    t[h] = quad_sum(t[h]);
    if (at.quad == 0) edge[at.row0 + 8 * h] = t[h];
  }
}

template <bool kAligned>
CRISP_DEVICE void sum_block(float (&s)[64], const Call& p, int head, int block, const Place& at,
                            Row (&rows)[2]) {
  const bool odd = at.quad & 1, upper = at.quad & 2;
  const int first = p.first_position - block * kBlock;  // row 0's own key, relative to the block
  if (first < kBlock) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if ((i >> 2) * 8 + at.quad * 2 + (i & 1) > first + at.row0 + ((i >> 1) & 1) * 8)
        s[i] = -INFINITY;
  }
  float top[2], shift[2];
  {
    float t[4] = {s[0], s[2], s[1], s[3]};
#pragma unroll
    for (int i = 4; i < 64; ++i) {
      float& x = t[((i >> 1) & 1) + 2 * (i & 1)];
      x = fmaxf(x, s[i]);
    }
    top[0] = quad_max(fmaxf(t[0], t[2])) * p.scale_log2;
    top[1] = quad_max(fmaxf(t[1], t[3])) * p.scale_log2;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) shift[h] = top[h] == -INFINITY ? 0.f : top[h];
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -shift[(i >> 1) & 1]));

  store_edge(s, p, head, block, at);
  float low[2], high[2];
  split_sums<kAligned>(s, at, low, high);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float t = fmaxf(rows[h].top, top[h]), base = t == -INFINITY ? 0.f : t;
    rows[h].sum =
        rows[h].sum * exp2_fast(rows[h].top - base) + (low[h] + high[h]) * exp2_fast(top[h] - base);
    rows[h].top = t;
  }
  // Quad reduction of four values in three shuffles; lane t of the quad ends up with value t of
  // {low 0, high 0, low 1, high 1}.
  float x = (odd ? high[0] : low[0]) + __shfl_xor_sync(~0u, odd ? low[0] : high[0], 1);
  float y = (odd ? high[1] : low[1]) + __shfl_xor_sync(~0u, odd ? low[1] : high[1], 1);
  const float total = (upper ? y : x) + __shfl_xor_sync(~0u, upper ? x : y, 2);
  float* out =
      p.scratch.partials + (static_cast<int64_t>(head) * p.num_blocks + block) * 3 * kBlock;
  out[(1 + odd) * kBlock + at.row0 + (upper ? 8 : 0)] = total;
  if (at.quad < 2) out[at.row0 + 8 * at.quad] = at.quad ? top[1] : top[0];
}

struct Copies {
  int q_token, kv_token;  // of the tensors: proxy row 0, and the segment's first key
  int piece_rows;         // tokens per copy of paged keys
};

template <class Element, int kDim, bool kAligned>
__global__ void __launch_bounds__(384, 1)
    proxy_kernel(const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ Call p,
                 const Copies copies) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Plan = SharedMemoryPlan<kDim>;
  extern __shared__ uint8_t raw[];
  Plan& shared =
      *reinterpret_cast<Plan*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
  const int slice = static_cast<int>(blockIdx.x) % p.slices;
  const int range = static_cast<int>(blockIdx.x) / p.slices % p.range_count;
  const int kv_head = static_cast<int>(blockIdx.x) / p.slices / p.range_count;
  const int begin = range * p.range_blocks, end = min(begin + p.range_blocks, p.num_blocks);
  const int first_head = p.heads_begin(kv_head) + slice * kHeads;
  const int num_heads = p.heads_end(kv_head) - first_head;  // <= 0: the group has no such slice
  if (num_heads <= 0) return;
  auto head_of = [&](int g) { return first_head + min(g, num_heads - 1); };  // spares repeat

  if (threadIdx.x == 0) {
    init(shared.q_full, 1);
    for (int i = 0; i < kStages; ++i) init(shared.k_full[i], 1), init(shared.k_empty[i], 2);
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {  // ---- copies, by one warp
    release_registers<24>();
    if (threadIdx.x < 32) {
      Ring<kStages> ks;
      const uint64_t once = stream_through_l2(), again = keep_in_l2();
      const int tensor_kv_head = p.first_kv_head + kv_head;
      auto copy_k = [&](int block) {
        wait(shared.k_empty[ks.slot], ks.parity ^ 1);
        Barrier& full = shared.k_full[ks.slot];
        uint8_t* to = shared.k[ks.slot];
        if (lane == 0) arrive_expecting(full, Plan::kTileBytes);
        const uint64_t policy = p.slices > 1 ? again : once;
        if (p.k.pages == nullptr) {
          if (lane == 0)
            load_box(k_map, full, to, copies.kv_token + block * kBlock, 0, tensor_kv_head, 0,
                     policy);
        } else {
          const int pieces = kBlock / copies.piece_rows;
          const int half = lane & (Plan::kHalves - 1), piece = lane / Plan::kHalves;
          if (piece < pieces) {
            const int row = piece * copies.piece_rows;
            const int64_t key = p.k.first_token + block * kBlock + row;
            const int page = block * kBlock + row < p.kv_len  // past the last key: reads as NaN
                                 ? __ldg(p.k.pages + key / p.k.page_size)
                                 : -1;
            load_box(k_map, full, to + half * Plan::kHalfTile + row * 128,
                     static_cast<int>(key % p.k.page_size), half, tensor_kv_head, page, policy);
          }
        }
        __syncwarp();
        ks.advance();
      };
      copy_k(begin);
      if (lane == 0) {
        arrive_expecting(shared.q_full, kHeads * 2 * Plan::kQueryBytes);
        for (int g = 0; g < kHeads; ++g)
          for (int c = 0; c < 2; ++c)
            load_box(q_map, shared.q_full, shared.q[g][c], copies.q_token + c * kRows, 0,
                     p.first_head + head_of(g), 0, again);
      }
      __syncwarp();
      for (int b = begin + 1; b < end; ++b) copy_k(b);
    }
  } else {  // ---- scores and sums
    acquire_registers<240>();
    const int consumer = warpgroup - 1, strip = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4;
    const bool leader = (threadIdx.x & 127) == 0;
    Place at;
    at.quad = lane & 3;
    at.row0 = strip * 16 + (lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) at.split[h] = (p.first_position + at.row0 + 8 * h) & (kBlock - 1);
    const uint64_t q_desc = matrix_descriptor(shared_address(shared.q[0][consumer]), 16, 1024);
    const uint64_t k_desc = matrix_descriptor(shared_address(shared.k[0]), 16, 1024);
    auto q_of = [&](int g) { return q_desc + descriptor_step(2 * Plan::kQueryBytes) * g; };
    auto k_of = [&](int slot) { return k_desc + descriptor_step(Plan::kTileBytes) * slot; };
    float s0[64], s1[64];
    Row rows[kHeads][2];
#pragma unroll
    for (int g = 0; g < kHeads; ++g) rows[g][0] = rows[g][1] = {-INFINITY, 0.f};
    Ring<kStages> ks;
    wait(shared.q_full, 0);
#pragma unroll 1
    for (int b = begin; b < end; ++b) {
      wait(shared.k_full[ks.slot], ks.parity);
#pragma unroll
      for (int g = 0; g < kHeads; g += 2) {  // drained after each pair: ptxas serialises longer
        issue_scores<Element, kDim>(s0, q_of(g), k_of(ks.slot));
        issue_scores<Element, kDim>(s1, q_of(g + 1), k_of(ks.slot));
        wgmma_wait<1>();
        results_ready(s0);
        sum_block<kAligned>(s0, p, head_of(g), b, at, rows[g]);
        wgmma_wait<0>();
        results_ready(s1);
        if (g + 2 == kHeads) {
          if (leader) arrive(shared.k_empty[ks.slot]);
          ks.advance();
        }
        sum_block<kAligned>(s1, p, head_of(g + 1), b, at, rows[g + 1]);
      }
    }
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(rows[g][h].sum);
        const int64_t slot = (static_cast<int64_t>(head_of(g)) * p.range_count + range) * kBlock;
        if (at.quad == 0)
          p.scratch.ranges[slot + at.row0 + 8 * h] = make_float2(rows[g][h].top, sum);
      }
    }
  }
#endif  // __CUDA_ARCH_FEAT_SM90_ALL
}

template <class Element, int kDim>
void launch(const Call& call, const MapTensor& q, const MapTensor& k, const Copies& copies,
            cudaStream_t stream) {
  constexpr int kHalves = kDim / 64;
  const bool paged = call.k.pages != nullptr;
  const CUtensorMap q_map = make_tensor_map(q, kRows, kHalves, false);
  const CUtensorMap k_map = make_tensor_map(k, copies.piece_rows, paged ? 1 : kHalves, paged);
  const auto kernel = call.first_position % kBlock == 0 ? proxy_kernel<Element, kDim, true>
                                                        : proxy_kernel<Element, kDim, false>;
  CRISP_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(kSharedBytes<kDim>)));
  const int ctas = call.range_count * call.slices * call.num_kv_heads;
  kernel<<<ctas, 384, kSharedBytes<kDim>, stream>>>(q_map, k_map, call, copies);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

MapTensor see(const ConstTensor& t, int64_t tokens, int64_t pages) {
  return {const_cast<void*>(t.data),
          t.token_stride,
          t.head_stride,
          t.page_stride,
          tokens,
          t.num_heads,
          pages,
          static_cast<int>(t.head_dim),
          t.dtype};
}

}  // namespace

bool enqueue_sm90(const Call& call, const Attention& attention, const SegmentShape& segment,
                  cudaStream_t stream) {
  constexpr int64_t kMaxCoordinate = (int64_t{1} << 31) - 256;
  const int64_t head_dim = attention.q.head_dim, page_size = attention.pages.page_size;
  const bool paged = page_size != 0;
  const MapTensor q = see(attention.q, attention.q.num_tokens, 1);
  const MapTensor k = paged ? see(attention.k, page_size, attention.k.num_tokens / page_size)
                            : see(attention.k, attention.k.num_tokens, 1);
  if ((head_dim != 64 && head_dim != 128) || !is_mappable(q) || !is_mappable(k)) return false;
  if (q.tokens > kMaxCoordinate || k.tokens > kMaxCoordinate) return false;
  Copies copies;
  copies.q_token = static_cast<int>(segment.q_start + call.first_query);
  copies.kv_token = paged ? 0 : static_cast<int>(segment.kv_start);
  copies.piece_rows = kBlock;
  while (paged && (page_size % copies.piece_rows != 0 || segment.kv_start % copies.piece_rows != 0))
    copies.piece_rows /= 2;
  if (copies.piece_rows < 16) return false;
  const bool half = attention.q.dtype == DType::kFloat16;
  if (head_dim == 128) {
    half ? launch<__half, 128>(call, q, k, copies, stream)
         : launch<__nv_bfloat16, 128>(call, q, k, copies, stream);
  } else {
    half ? launch<__half, 64>(call, q, k, copies, stream)
         : launch<__nv_bfloat16, 64>(call, q, k, copies, stream);
  }
  return true;
}

}  // namespace crisp::proxy_cuda
