// attend_cuda.cu - attend on CUDA: from a call to a CudaAttend, which kernels run it, and what they
// find in the workspace. Nothing of the host is referenced once the call has returned, so that a
// captured graph can be replayed.
#include <algorithm>
#include <atomic>

#include "attend/attend.h"
#include "attend/attend_cuda.h"
#include "core/cuda.h"
#include "core/problem.h"

namespace crisp {
namespace {

std::atomic<bool> sm80_is_forced{false};
thread_local bool last_ran_sm90 = false;

// ---- The table of segments

// What one launch carries: kernel parameters are limited to 4 KB.
constexpr int kSegmentsPerLaunch = 100;
struct SegmentBatch {
  CudaSegment segments[kSegmentsPerLaunch];
};
static_assert(sizeof(SegmentBatch) + sizeof(CudaSegment*) + sizeof(int32_t) <= 4096);

__global__ void put_segments(const __grid_constant__ SegmentBatch batch, int32_t count,
                             CudaSegment* to) {
  const int index = static_cast<int>(threadIdx.x);
  if (index < count) to[index] = batch.segments[index];
}

// Tiles of one segment, in tiles of `tile_rows` queries from the start of its first q_block.
int64_t tiles_of(const SegmentShape& shape, int64_t block_size, int64_t tile_rows) {
  if (shape.q_len == 0) return 0;
  return ceil_div(shape.q_offset + shape.q_len - shape.first_q_block * block_size, tile_rows);
}

// Calls body(segment) for every segment as kernels see it; returns the tiles of one head.
template <class Body>
int64_t for_each_segment(const Attention& attention, int64_t block_size, int64_t tile_rows,
                         Body&& body) {
  int64_t first_mask_row = 0, first_tile = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const SegmentShape shape = segment_shape(segment_at(attention, index), block_size);
    CudaSegment segment;
    segment.q_start = shape.q_start;
    segment.kv_start = shape.kv_start;
    segment.q_len = static_cast<int32_t>(shape.q_len);
    segment.kv_len = static_cast<int32_t>(shape.kv_len);
    segment.page_row = static_cast<int32_t>(shape.page_row);
    segment.first_q_block = static_cast<int32_t>(shape.first_q_block);
    segment.first_mask_row = static_cast<int32_t>(first_mask_row);
    segment.first_tile = static_cast<int32_t>(first_tile);
    body(segment);
    first_mask_row += shape.num_q_blocks;
    first_tile += tiles_of(shape, block_size, tile_rows);
  }
  return first_tile;
}

int64_t count_tiles(const Attention& attention, int64_t block_size, int64_t tile_rows) {
  return for_each_segment(attention, block_size, tile_rows, [](const CudaSegment&) {});
}

void write_segments(const Attention& attention, int64_t block_size, int64_t tile_rows,
                    CudaSegment* to, cudaStream_t stream) {
  SegmentBatch batch;
  int count = 0;
  const auto flush = [&] {
    if (count == 0) return;
    CRISP_CUDA_CHECK(launch_blocks(put_segments, 1, kSegmentsPerLaunch, stream, batch, count, to));
    to += count;
    count = 0;
  };
  for_each_segment(attention, block_size, tile_rows, [&](const CudaSegment& segment) {
    batch.segments[count++] = segment;
    if (count == kSegmentsPerLaunch) flush();
  });
  flush();
}

// ---- The workspace

struct CudaScratch {
  CudaSegment* segments = nullptr;  // [num_segments]
  attend_sm90::Scratch sm90;        // taken whichever kernels run: the size depends on shapes alone
};

CudaScratch carve(Workspace& workspace, const Attention& attention, int64_t block_size) {
  CudaScratch scratch;
  scratch.segments = workspace.take<CudaSegment>(num_segments(attention));
  const int64_t num_tiles = count_tiles(attention, block_size, attend_sm90::kTileRows);
  scratch.sm90 = attend_sm90::carve(workspace, num_tiles, attention.q.num_heads);
  return scratch;
}

// ---- The call

CudaTensor to_cuda(const ConstTensor& tensor) {
  return {const_cast<void*>(tensor.data), tensor.token_stride, tensor.head_stride,
          tensor.page_stride};
}

// The largest power of two, up to 128, that divides the kv_start of every segment.
int32_t kv_start_alignment(const Attention& attention) {
  int64_t bits = 128;
  for (int64_t index = 0; index < num_segments(attention); ++index)
    bits |= segment_at(attention, index).kv_start;
  return static_cast<int32_t>(bits & -bits);
}

// Everything but the tiles, which depend on the kernels.
CudaAttend describe(const Attention& attention, const BlockMask& mask, const Tensor& out,
                    float* lse) {
  CudaAttend call;
  call.q = to_cuda(attention.q);
  call.k = to_cuda(attention.k);
  call.v = to_cuda(attention.v);
  call.out = {out.data, out.token_stride, out.head_stride, 0};
  call.lse = lse;
  call.num_q_tokens = attention.q.num_tokens;
  call.num_kv_tokens = attention.k.num_tokens;
  call.mask = reinterpret_cast<const uint64_t*>(mask.words);
  call.words_per_row = static_cast<int32_t>(mask.words_per_row() / 2);
  call.num_mask_rows = static_cast<int32_t>(mask.num_q_blocks);
  call.block_size = static_cast<int32_t>(mask.block_size);
  call.num_segments = static_cast<int32_t>(num_segments(attention));
  const PagedKv& pages = attention.pages;
  if (pages.page_size > 0) {
    call.block_table = pages.block_table;
    call.table_row_stride = pages.row_stride;
    call.page_size = static_cast<int32_t>(pages.page_size);
    call.num_pages = static_cast<int32_t>(attention.k.num_tokens / pages.page_size);
  }
  call.kv_start_alignment = kv_start_alignment(attention);
  call.num_q_heads = static_cast<int32_t>(attention.q.num_heads);
  call.group_size = static_cast<int32_t>(group_size(attention));
  call.head_dim = static_cast<int32_t>(attention.q.head_dim);
  call.dtype = attention.q.dtype;
  call.causal = attention.causal;
  call.softmax_scale = attention.softmax_scale;
  return call;
}

bool is_hopper() {
  int major = 0;
  CRISP_CUDA_CHECK(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device()));
  return major == 9;
}

bool takes_sm90(const CudaAttend& call) {
  return !sm80_is_forced.load(std::memory_order_relaxed) && is_hopper() &&
         attend_sm90::why_not(call) == nullptr;
}

void enqueue(const Attention& attention, CudaAttend& call, const CudaScratch& scratch,
             cudaStream_t stream) {
  last_ran_sm90 = takes_sm90(call);
  const int64_t tile_rows =
      last_ran_sm90 ? attend_sm90::kTileRows : attend_sm80::tile_rows(call.head_dim);
  const int64_t num_tiles = count_tiles(attention, call.block_size, tile_rows);
  if (num_tiles == 0) return;  // no query in any segment
  call.num_tiles = static_cast<int32_t>(num_tiles);
  call.segments = scratch.segments;
  write_segments(attention, call.block_size, tile_rows, scratch.segments, stream);
  if (!last_ran_sm90) return attend_sm80::enqueue(call, stream);
  if (scratch.sm90.counter_bytes > 0) {
    CRISP_CUDA_CHECK(cudaMemsetAsync(scratch.sm90.counters, 0,
                                     static_cast<size_t>(scratch.sm90.counter_bytes), stream));
  }
  attend_sm90::enqueue(call, scratch.sm90, stream);
}

}  // namespace

void force_sm80_for_tests(bool forced) { sm80_is_forced.store(forced); }
bool last_ran_sm90_for_tests() { return last_ran_sm90; }

size_t attend_workspace_bytes_cuda(const Attention& attention, int64_t block_size) {
  Workspace workspace = Workspace::counting();
  carve(workspace, attention, block_size);
  return workspace.peak_bytes();
}

void attend_blocks_cuda(const Attention& attention, const BlockMask& mask, const Tensor& out,
                        float* lse, const Context& context) {
  Workspace workspace(context.workspace);
  const CudaScratch scratch = carve(workspace, attention, mask.block_size);
  CudaAttend call = describe(attention, mask, out, lse);
  enqueue(attention, call, scratch, context.stream);
  if (context.on_stage != nullptr) context.on_stage(Stage::kAttend, context.on_stage_user);
}

}  // namespace crisp
