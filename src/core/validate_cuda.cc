// validate_cuda.cc - what CUDA refuses although the CPU accepts it; shapes only, no device is
// asked.
#include "core/validate.h"

namespace crisp {
namespace {

constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;

// Tiles of one head where they are smallest: no kernel has more.
int64_t most_tiles(const Attention& attention, int64_t block_size) {
  int64_t total = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const SegmentShape shape = segment_shape(segment_at(attention, index), block_size);
    total += shape.num_q_blocks * block_size / kMinCudaTileRows;
  }
  return total;
}

}  // namespace

void check_cuda(const Attention& attention, const BlockMask& mask) {
  const ConstTensor& q = attention.q;
  CRISP_CHECK(q.dtype != DType::kFloat32,
              "q.dtype is float32, must be float16 or bfloat16 on kCuda");
  CRISP_CHECK(q.head_dim <= kMaxCudaHeadDim, "q.head_dim is ", q.head_dim,
              ", must be a multiple of 8 in [", kMinHeadDim, ", ", kMaxCudaHeadDim, "] on kCuda");
  CRISP_CHECK(num_segments(attention) <= kMaxInt32, "segments has ", num_segments(attention),
              " entries, must have at most ", kMaxInt32, " on kCuda");
  const int64_t tiles = most_tiles(attention, mask.block_size);
  CRISP_CHECK(tiles <= kMaxInt32 / q.num_heads, "the call has ", q.num_heads, " q heads x ", tiles,
              " tiles of ", kMinCudaTileRows, " queries, must have at most 2^31 - 1 on kCuda");
  if (attention.pages.page_size == 0) return;
  const int64_t num_pages = attention.k.num_tokens / attention.pages.page_size;
  CRISP_CHECK(num_pages <= kMaxInt32, "k.num_tokens / page_size is ", num_pages,
              ", must be at most 2^31 - 1 on kCuda");
}

}  // namespace crisp
