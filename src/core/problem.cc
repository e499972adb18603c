#include "core/problem.h"

namespace crisp {
namespace {

const std::byte* at(const ConstTensor& tensor, int64_t element) {
  return static_cast<const std::byte*>(tensor.data) + element * element_bytes(tensor.dtype);
}

HeadRows kv_rows(const Attention& attention, const ConstTensor& tensor, const SegmentShape& segment,
                 int64_t kv_head) {
  HeadRows rows{at(tensor, kv_head * tensor.head_stride), tensor.dtype, tensor.head_dim,
                tensor.token_stride};
  const PagedKv& paged = attention.pages;
  if (paged.page_size == 0) {
    rows.data = at(tensor, kv_head * tensor.head_stride + segment.kv_start * tensor.token_stride);
    return rows;
  }
  rows.pages = paged.block_table + segment.page_row * paged.row_stride;
  rows.first_token = segment.kv_start;
  rows.page_size = paged.page_size;
  rows.page_stride = tensor.page_stride;
  return rows;
}

}  // namespace

HeadRows q_rows(const Attention& attention, const SegmentShape& segment, int64_t q_head) {
  const ConstTensor& q = attention.q;
  return {at(q, q_head * q.head_stride + segment.q_start * q.token_stride), q.dtype, q.head_dim,
          q.token_stride};
}

HeadRows k_rows(const Attention& attention, const SegmentShape& segment, int64_t kv_head) {
  return kv_rows(attention, attention.k, segment, kv_head);
}

HeadRows v_rows(const Attention& attention, const SegmentShape& segment, int64_t kv_head) {
  return kv_rows(attention, attention.v, segment, kv_head);
}

}  // namespace crisp
