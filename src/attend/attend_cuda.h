// attend_cuda.h - between attend's CUDA dispatch (attend_cuda.cu) and its kernels.
//
// One call is described by a CudaAttend that travels by value to the kernels. All pointers are
// device memory; the table of segments lies in the caller's workspace, where a kernel of the same
// stream has put it, so that a captured graph needs no host memory when it is replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/workspace.h"
#include "crisp/crisp.h"

namespace crisp {

// A segment as kernels see it. Block and tile counts are of the whole call; kv_start counts tokens
// along the page row when k and v are paged.
struct CudaSegment {
  int64_t q_start = 0, kv_start = 0;
  int32_t q_len = 0, kv_len = 0;
  int32_t page_row = 0;
  int32_t first_q_block = 0;   // absolute block of its first mask row
  int32_t first_mask_row = 0;  // where its rows begin in a head's rows of the mask
  int32_t first_tile = 0;      // where its tiles begin in a head's tiles
};

// A tensor; strides in elements of its dtype.
struct CudaTensor {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;
};

struct CudaAttend {
  CudaTensor q, k, v, out;
  float* lse = nullptr;  // [num_q_heads, num_q_tokens], natural log; null: unwanted
  int64_t num_q_tokens = 0, num_kv_tokens = 0;

  // Bit b of word b / 64 of row (head * num_mask_rows + r): key block b is kept.
  const uint64_t* mask = nullptr;
  int32_t words_per_row = 0;  // of 64 bits
  int32_t num_mask_rows = 0;  // of one head, all segments
  int32_t block_size = 128;   // 64 or 128

  const CudaSegment* segments = nullptr;  // ascending first_tile; never empty
  int32_t num_segments = 0;
  int32_t num_tiles = 0;  // of one head, all segments

  const int32_t* block_table = nullptr;  // null: k and v are contiguous
  int64_t table_row_stride = 0;
  int32_t page_size = 0, num_pages = 0;
  // Largest power of two, up to 128, that divides the kv_start of every segment.
  int32_t kv_start_alignment = 1;

  int32_t num_q_heads = 0, group_size = 1;  // query head h reads kv head h / group_size
  int32_t head_dim = 0;
  DType dtype = DType::kBFloat16;
  bool causal = true;
  float softmax_scale = 0;
};

// What a kernel family offers to the dispatch.
//   tile_rows      queries of one tile; tiles of a segment start at first_q_block * block_size
//   workspace      what it takes, carved by the same code that counts
//   enqueue        launches on the stream; returns after enqueuing. Throws DeviceError.

// sm_90a: TMA and wgmma. head_dim 64 and 128, block_size 128, every row of q, k, v and out 16-byte
// aligned, pages and kv_start multiples of 16 tokens.
namespace attend_sm90 {
inline constexpr int kTileRows = 128;
struct Scratch {
  int32_t* counters = nullptr;
  int64_t counter_bytes = 0;  // to be zero before the first launch
  uint32_t* redo_tiles = nullptr;
};
Scratch carve(Workspace& workspace, int64_t num_tiles, int64_t num_q_heads);
// nullptr if it takes this call, else why not.
const char* why_not(const CudaAttend& call);
void enqueue(const CudaAttend& call, const Scratch& scratch, cudaStream_t stream);
}  // namespace attend_sm90

// sm_80 and everything after it: mma.sync and cp.async. Every call that passes the door.
namespace attend_sm80 {
int tile_rows(int64_t head_dim);  // 128, or 64 where the accumulator would not fit
void enqueue(const CudaAttend& call, cudaStream_t stream);
}  // namespace attend_sm80

// ---- For tests and benchmarks, which want both families on one card.

// From now on, in every thread: the sm_80 kernels also where the sm_90a ones would run.
void force_sm80_for_tests(bool forced);
// Whether the last attend of this thread was enqueued to the sm_90a kernels.
bool last_ran_sm90_for_tests();

#ifdef __CUDACC__
// The segment that tile `tile` of a head belongs to: the last one that starts at or before it.
// Segments without tiles are never returned.
__device__ __forceinline__ CudaSegment segment_of_tile(const CudaAttend& call, int32_t tile) {
  int32_t low = 0, high = call.num_segments - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) >> 1;
    if (call.segments[middle].first_tile <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return call.segments[low];
}
#endif

}  // namespace crisp
