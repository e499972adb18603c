// cuda_rows.cuh - rows of a caller's tensor as kernels that gather them see them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

// q, or k, of one segment, all heads. Token t of head h is at
//   contiguous: data + h * head_stride + t * token_stride
//   paged:      data + h * head_stride + pages[(first_token + t) / page_size] * page_stride
//                    + (first_token + t) % page_size * token_stride
struct CudaRows {
  const uint16_t* data = nullptr;
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;  // elements
  const int32_t* pages = nullptr;                              // null: contiguous
  int64_t first_token = 0, page_size = 0;
  int32_t num_pages = 0;
  int32_t head_dim = 0;
  bool is_half = false;  // float16, else bfloat16

#ifdef __CUDACC__
  // Null for a page id that is none: such a row reads as NaN.
  __device__ __forceinline__ const uint16_t* row(int64_t head, int64_t token) const {
    const uint16_t* base = data + head * head_stride;
    if (pages == nullptr) return base + token * token_stride;
    const int64_t at = first_token + token;
    const int32_t page = __ldg(pages + at / page_size);
    if (page < 0 || page >= num_pages) return nullptr;
    return base + page * page_stride + at % page_size * token_stride;
  }
  __device__ __forceinline__ float value(const uint16_t* row, int d) const {
    if (row == nullptr) return __int_as_float(0x7fc00000);
    const uint16_t bits = __ldg(row + d);
    return is_half ? __half2float(__ushort_as_half(bits))
                   : __bfloat162float(__ushort_as_bfloat16(bits));
  }
  // Elements d and d + 1, d even.
  __device__ __forceinline__ float2 pair(const uint16_t* row, int d, bool is_aligned) const {
    if (!is_aligned || row == nullptr) return {value(row, d), value(row, d + 1)};
    const uint32_t bits = __ldg(reinterpret_cast<const uint32_t*>(row + d));
    if (!is_half) return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
#endif
  bool has_aligned_pairs() const {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0 &&
           (token_stride | head_stride | page_stride) % 2 == 0;
  }
};

// Rows of the segment in q, and in k. Head h of the result is head h of the tensor.
inline CudaRows cuda_q_rows(const Attention& attention, const SegmentShape& segment) {
  const HeadRows rows = q_rows(attention, segment, 0);
  CudaRows out;
  out.data = reinterpret_cast<const uint16_t*>(rows.data);
  out.token_stride = rows.token_stride;
  out.head_stride = attention.q.head_stride;
  out.head_dim = static_cast<int32_t>(rows.head_dim);
  out.is_half = rows.dtype == DType::kFloat16;
  return out;
}
inline CudaRows cuda_k_rows(const Attention& attention, const SegmentShape& segment) {
  const HeadRows rows = k_rows(attention, segment, 0);
  CudaRows out;
  out.data = reinterpret_cast<const uint16_t*>(rows.data);
  out.token_stride = rows.token_stride;
  out.head_stride = attention.k.head_stride;
  out.page_stride = rows.page_stride;
  out.pages = rows.pages;
  out.first_token = rows.first_token;
  out.page_size = rows.page_size;
  if (rows.pages != nullptr)
    out.num_pages = static_cast<int32_t>(attention.k.num_tokens / attention.pages.page_size);
  out.head_dim = static_cast<int32_t>(rows.head_dim);
  out.is_half = rows.dtype == DType::kFloat16;
  return out;
}

}  // namespace crisp
