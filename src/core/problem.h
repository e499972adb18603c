// problem.h - a call with its derived geometry: what every stage reads instead of the raw structs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/dtype.h"
#include "crisp/crisp.h"

namespace crisp {

inline constexpr int64_t kBlockSize = 128;  // tokens; the granularity of every selector
inline constexpr int64_t kMaxHeadDim =
    512;  // elements; what the scratch of one query row is sized for

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A segment and where it lies on the block grid, which starts at its first key.
struct SegmentShape {
  int64_t q_start = 0, q_len = 0, kv_start = 0, kv_len = 0, page_row = 0;
  int64_t q_offset = 0;       // position of the first query among the keys: kv_len - q_len, >= 0
  int64_t first_q_block = 0;  // absolute block of mask row `first_mask_row`
  int64_t num_q_blocks = 0;   // rows of the mask
  int64_t num_kv_blocks = 0;
  int64_t first_mask_row = 0;
};

// Geometry of one segment; first_mask_row stays 0.
inline SegmentShape segment_shape(const Segment& segment, int64_t block_size) {
  SegmentShape shape{segment.q_start, segment.q_len, segment.kv_start, segment.kv_len,
                     segment.page_row};
  shape.q_offset = std::max<int64_t>(segment.kv_len - segment.q_len, 0);
  shape.first_q_block = shape.q_offset / block_size;
  shape.num_q_blocks = segment.q_len == 0 ? 0
                                          : ceil_div(shape.q_offset + segment.q_len, block_size) -
                                                shape.first_q_block;
  shape.num_kv_blocks = ceil_div(segment.kv_len, block_size);
  return shape;
}

inline int64_t num_segments(const Attention& attention) {
  return attention.segments.empty() ? 1 : static_cast<int64_t>(attention.segments.size());
}

inline Segment segment_at(const Attention& attention, int64_t index) {
  if (!attention.segments.empty()) return attention.segments[static_cast<size_t>(index)];
  return Segment{0, attention.q.num_tokens, 0, attention.k.num_tokens, 0};
}

inline int64_t group_size(const Attention& attention) {
  return attention.q.num_heads / attention.k.num_heads;
}

// kv_blocks that q_block row `row` of a segment may see: blocks [0, limit).
inline int64_t kv_block_limit(const SegmentShape& segment, int64_t row, bool causal) {
  return causal ? std::min(segment.first_q_block + row + 1, segment.num_kv_blocks)
                : segment.num_kv_blocks;
}

// Rows of one head of one segment, wherever they lie. Token t of the segment is at
//   contiguous: data + t * token_stride
//   paged:      data + pages[(first_token + t) / page_size] * page_stride
//                    + (first_token + t) % page_size * token_stride
struct HeadRows {
  const std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t head_dim = 0, token_stride = 0;  // elements
  const int32_t* pages = nullptr;          // null: contiguous
  int64_t first_token = 0, page_size = 0, page_stride = 0;
};

HeadRows q_rows(const Attention& attention, const SegmentShape& segment, int64_t q_head);
HeadRows k_rows(const Attention& attention, const SegmentShape& segment, int64_t kv_head);
HeadRows v_rows(const Attention& attention, const SegmentShape& segment, int64_t kv_head);

// Address of token `token` of the rows.
inline const std::byte* row_address(const HeadRows& rows, int64_t token) {
  const int64_t bytes = element_bytes(rows.dtype);
  if (rows.pages == nullptr) return rows.data + token * rows.token_stride * bytes;
  const int64_t at = rows.first_token + token;
  const int64_t page = rows.pages[at / rows.page_size];
  return rows.data + (page * rows.page_stride + at % rows.page_size * rows.token_stride) * bytes;
}

}  // namespace crisp
