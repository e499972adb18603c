// proxy_cuda.h - between the CUDA proxy's host code and reduction (proxy_cuda.cu) and the two
// kernels that go over the keys: wgmma and TMA (proxy_sm90.cu), and plain ones for everything else.
//
// Per (head, kv_block) and proxy row i, position P = first_position + i, the key kernels leave
//   m      the largest score the row sees in the block, in log2 units
//   low    sum of exp2(score - m) over the block's keys c <= P % 128
//   high   the same over c > P % 128
// and per range of blocks one CTA's running (maximum, sum) of each row, from which the reduction
// makes the row's normaliser.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda_rows.cuh"
#include "core/workspace.h"
#include "proxy/proxy.h"

namespace crisp::proxy_cuda {

// Ranges of key blocks that the key kernels are cut into, over all kv heads and slices of a group:
// about the multiprocessors of a large card. A constant, so that sums do not depend on the card.
inline constexpr int kTargetCtas = 132;
inline constexpr int kHeadsPerSlice = 4;  // query heads that one CTA holds

// What the key kernels leave behind.
struct Scratch {
  float* partials = nullptr;  // [num_heads, num_blocks, 3 (m, low, high), 128 rows]
  float* edges = nullptr;     // [num_heads, 2, 128] sums inside a window, of partly covered blocks
  float2* ranges = nullptr;   // [num_heads, range_count, 128] (maximum, sum)
};

struct Call {
  CudaRows q, k;
  int32_t num_rows = 0, num_blocks = 0, kv_len = 0;
  int32_t first_position = 0;  // of proxy row 0 among the keys
  int32_t first_query = 0;     // of proxy row 0 among the segment's queries
  int32_t sink_tokens = 0, recency_tokens = 0;
  int32_t first_head = 0, num_heads = 0, group_size = 1;
  int32_t first_kv_head = 0, num_kv_heads = 0;
  int32_t range_count = 0, range_blocks = 0, slices = 0;
  float scale_log2 = 0, softmax_scale = 0;
  Scratch scratch;

  // Heads of the batch that read its kv head `kv_head`: [begin, end).
  __host__ __device__ int heads_begin(int kv_head) const {
    const int begin = (first_kv_head + kv_head) * group_size - first_head;
    return begin > 0 ? begin : 0;
  }
  __host__ __device__ int heads_end(int kv_head) const {
    const int end = (first_kv_head + kv_head + 1) * group_size - first_head;
    return end < num_heads ? end : num_heads;
  }
};

// The keys of a block that lie in the structural windows: c < low_end or c >= high_begin. `edge`
// is the slot of Scratch::edges, or -1: the block lies wholly inside or outside.
struct Window {
  int low_end, high_begin, edge;
  bool covers_block;
};
__host__ __device__ inline Window window_of_block(const Call& call, int block) {
  const auto clamp = [](int x, int high) { return x < 0 ? 0 : x > high ? high : x; };
  const int first_key = block * 128;
  const int num_keys = clamp(call.kv_len - first_key, 128);
  const int recency_begin =
      call.kv_len > call.recency_tokens ? call.kv_len - call.recency_tokens : 0;
  Window window;
  window.low_end = clamp(call.sink_tokens - first_key, num_keys);
  window.high_begin = clamp(recency_begin - first_key, num_keys);
  window.covers_block = window.low_end >= window.high_begin;
  const bool is_outside = window.low_end == 0 && window.high_begin == num_keys;
  window.edge = is_outside || window.covers_block ? -1 : window.low_end > 0 ? 0 : 1;
  return window;
}

// Launches the key kernel of Hopper on the stream; false if this call is none of its: it takes
// head_dim 64 and 128 with every row of q and k 16-byte aligned, pages of multiples of 16 tokens.
bool enqueue_sm90(const Call& call, const Attention& attention, const SegmentShape& segment,
                  cudaStream_t stream);

}  // namespace crisp::proxy_cuda
