#include "core/validate.h"

#include <cmath>

namespace crisp {
namespace {

// Products of counts and strides that have passed check_fields fit.
__extension__ using Wide = __int128;

Wide wide_extent(const ConstTensor& tensor, int64_t page_size) {
  if (tensor.num_tokens == 0 || tensor.num_heads == 0) return 0;
  Wide last = static_cast<Wide>(tensor.num_heads - 1) * tensor.head_stride + tensor.head_dim;
  if (page_size == 0) {
    return last + static_cast<Wide>(tensor.num_tokens - 1) * tensor.token_stride;
  }
  const int64_t last_page = tensor.num_tokens / page_size - 1;
  return last + static_cast<Wide>(last_page) * tensor.page_stride +
         static_cast<Wide>(page_size - 1) * tensor.token_stride;
}

void check_extent(const char* name, const ConstTensor& tensor, int64_t page_size) {
  const Wide bytes = wide_extent(tensor, page_size) * element_bytes(tensor.dtype);
  CRISP_CHECK(bytes <= INT64_MAX, name, " with token_stride ", tensor.token_stride,
              ", head_stride ", tensor.head_stride, " and page_stride ", tensor.page_stride,
              " reaches past 2^63 bytes, must stay below");
}

void check_fields(const char* name, const ConstTensor& tensor) {
  CRISP_CHECK(is_known(tensor.dtype), name, ".dtype is ", static_cast<int>(tensor.dtype),
              ", must be float32 (0), float16 (1) or bfloat16 (2)");
  CRISP_CHECK(tensor.num_tokens >= 0 && tensor.num_tokens <= kMaxTokens, name, ".num_tokens is ",
              tensor.num_tokens, ", must be in [0, 2^40]");
  CRISP_CHECK(tensor.num_heads >= 1 && tensor.num_heads <= kMaxHeads, name, ".num_heads is ",
              tensor.num_heads, ", must be in [1, ", kMaxHeads, "]");
  CRISP_CHECK(
      tensor.head_dim >= kMinHeadDim && tensor.head_dim <= kMaxHeadDim && tensor.head_dim % 8 == 0,
      name, ".head_dim is ", tensor.head_dim, ", must be a multiple of 8 in [", kMinHeadDim, ", ",
      kMaxHeadDim, "]");
  CRISP_CHECK(tensor.token_stride >= 0, name, ".token_stride is ", tensor.token_stride,
              ", must be >= 0");
  CRISP_CHECK(tensor.head_stride >= 0, name, ".head_stride is ", tensor.head_stride,
              ", must be >= 0");
}

void check_same(const char* name, const char* field, int64_t value, const char* other_name,
                int64_t other) {
  CRISP_CHECK(value == other, name, ".", field, " is ", value, ", must equal ", other_name, ".",
              field, ", which is ", other);
}

void check_pages(const Attention& attention) {
  const PagedKv& pages = attention.pages;
  CRISP_CHECK(pages.page_size >= 0 && pages.page_size <= kMaxLength, "pages.page_size is ",
              pages.page_size, ", must be in [1, 2^31 - 1], or 0 for contiguous k and v");
  if (pages.page_size == 0) return;
  CRISP_CHECK(attention.k.num_tokens % pages.page_size == 0, "k.num_tokens is ",
              attention.k.num_tokens, ", must be a multiple of pages.page_size, which is ",
              pages.page_size);
  CRISP_CHECK(pages.num_rows >= 1 && pages.num_rows <= kMaxLength, "pages.num_rows is ",
              pages.num_rows, ", must be in [1, 2^31 - 1]");
  CRISP_CHECK(pages.row_stride >= 0 && pages.row_stride <= kMaxTokens, "pages.row_stride is ",
              pages.row_stride, ", must be in [0, 2^40]");
  CRISP_CHECK(static_cast<Wide>(pages.num_rows) * pages.row_stride * 4 <= INT64_MAX,
              "pages.num_rows x pages.row_stride is ", pages.num_rows, " x ", pages.row_stride,
              " entries, must stay below 2^63 bytes");
  for (const ConstTensor* tensor : {&attention.k, &attention.v}) {
    CRISP_CHECK(tensor->page_stride >= 0, tensor == &attention.k ? "k" : "v", ".page_stride is ",
                tensor->page_stride, ", must be >= 0");
  }
}

void check_segment_pages(int64_t index, const Segment& segment, const PagedKv& pages) {
  CRISP_CHECK(segment.page_row >= 0 && segment.page_row < pages.num_rows, "segments[", index,
              "].page_row is ", segment.page_row, ", must be in [0, pages.num_rows), which is [0, ",
              pages.num_rows, ")");
  CRISP_CHECK(segment.kv_start >= 0 && segment.kv_start <= kMaxTokens, "segments[", index,
              "].kv_start is ", segment.kv_start, ", must be in [0, 2^40]");
  const int64_t needed = ceil_div(segment.kv_start + segment.kv_len, pages.page_size);
  CRISP_CHECK(segment.kv_len == 0 || needed <= pages.row_stride, "segments[", index, "] needs ",
              needed, " pages (kv_start ", segment.kv_start, " + kv_len ", segment.kv_len,
              " in pages of ", pages.page_size, "), must be at most pages.row_stride, which is ",
              pages.row_stride);
}

void check_range(int64_t index, const char* what, int64_t start, int64_t len, int64_t num_tokens,
                 const char* tensor) {
  CRISP_CHECK(start >= 0 && start <= num_tokens && len <= num_tokens - start, "segments[", index,
              "].", what, "_start ", start, " with ", what, "_len ", len, " must lie within ",
              tensor, ".num_tokens, which is ", num_tokens);
}

void check_segment(int64_t index, const Segment& segment, const Attention& attention) {
  CRISP_CHECK(segment.q_len >= 0 && segment.q_len <= kMaxLength, "segments[", index, "].q_len is ",
              segment.q_len, ", must be in [0, 2^31 - 1]");
  CRISP_CHECK(segment.kv_len >= 0 && segment.kv_len <= kMaxLength, "segments[", index,
              "].kv_len is ", segment.kv_len, ", must be in [0, 2^31 - 1]");
  check_range(index, "q", segment.q_start, segment.q_len, attention.q.num_tokens, "q");
  if (attention.pages.page_size > 0) {
    check_segment_pages(index, segment, attention.pages);
  } else {
    check_range(index, "kv", segment.kv_start, segment.kv_len, attention.k.num_tokens, "k");
  }
  CRISP_CHECK(!attention.causal || segment.kv_len == 0 || segment.kv_len >= segment.q_len,
              "segments[", index, "].kv_len is ", segment.kv_len,
              ", must be 0 or >= q_len when causal; q_len is ", segment.q_len);
}

// Rows of two segments never overlap: with the order asked for, one look back is enough.
void check_segments(const Attention& attention) {
  int64_t q_end = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const Segment segment = segment_at(attention, index);
    check_segment(index, segment, attention);
    if (segment.q_len == 0) continue;
    CRISP_CHECK(segment.q_start >= q_end, "segments[", index, "].q_start is ", segment.q_start,
                ", must be >= ", q_end,
                ", where the rows of the segments before it end (ascending, not overlapping)");
    q_end = segment.q_start + segment.q_len;
  }
}

}  // namespace

int64_t tensor_extent(const ConstTensor& tensor, int64_t page_size) {
  return static_cast<int64_t>(wide_extent(tensor, page_size));
}

void check_tensor(const char* name, const ConstTensor& tensor) {
  check_fields(name, tensor);
  check_extent(name, tensor, 0);
}

void check_rows_apart(const char* name, const ConstTensor& tensor) {
  const int64_t tokens = tensor.num_tokens, heads = tensor.num_heads;
  const Wide token_stride = tensor.token_stride, head_stride = tensor.head_stride;
  const bool heads_inside =
      (heads <= 1 || head_stride >= tensor.head_dim) &&
      (tokens <= 1 || token_stride >= (heads - 1) * head_stride + tensor.head_dim);
  const bool tokens_inside =
      (tokens <= 1 || token_stride >= tensor.head_dim) &&
      (heads <= 1 || head_stride >= (tokens - 1) * token_stride + tensor.head_dim);
  CRISP_CHECK(tokens == 0 || heads_inside || tokens_inside, name, ".token_stride is ",
              tensor.token_stride, " and ", name, ".head_stride is ", tensor.head_stride,
              ", must keep the rows of all tokens and heads apart");
}

void check_attention(const Attention& attention) {
  const ConstTensor &q = attention.q, &k = attention.k, &v = attention.v;
  check_fields("q", q);
  check_fields("k", k);
  check_fields("v", v);
  CRISP_CHECK(k.dtype == q.dtype, "k.dtype is ", name(k.dtype), ", must equal q.dtype, which is ",
              name(q.dtype));
  CRISP_CHECK(v.dtype == q.dtype, "v.dtype is ", name(v.dtype), ", must equal q.dtype, which is ",
              name(q.dtype));
  check_same("k", "head_dim", k.head_dim, "q", q.head_dim);
  check_same("v", "head_dim", v.head_dim, "q", q.head_dim);
  check_same("v", "num_heads", v.num_heads, "k", k.num_heads);
  check_same("v", "num_tokens", v.num_tokens, "k", k.num_tokens);
  CRISP_CHECK(q.num_heads % k.num_heads == 0, "q.num_heads is ", q.num_heads,
              ", must be a multiple of k.num_heads, which is ", k.num_heads);
  CRISP_CHECK(std::isfinite(attention.softmax_scale) && attention.softmax_scale > 0,
              "softmax_scale is ", attention.softmax_scale,
              ", must be set to a finite number > 0 (usually 1 / sqrt(head_dim))");
  check_pages(attention);
  check_extent("q", q, 0);
  check_extent("k", k, attention.pages.page_size);
  check_extent("v", v, attention.pages.page_size);
  check_segments(attention);
}

}  // namespace crisp
