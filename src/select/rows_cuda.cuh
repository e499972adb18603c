// rows_cuda.cuh - the rows of q and k as the kernels of the selectors read them. Only .cu files
// include it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "core/problem.h"

namespace crisp::select_cuda {

// HeadRows of a head and those after it, of 16-bit elements. Strides are in elements.
struct Rows {
  const uint16_t* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
  const int32_t* pages = nullptr;  // null: contiguous
  int64_t first_token = 0, page_size = 1, page_stride = 0, num_pages = 0;
  int32_t alignment = 1;  // of every row: a power of two of elements, up to 8
  bool is_half = false;   // float16, else bfloat16

  // Null where the block table names no page: it is the caller's data, and nobody has looked at it.
  __device__ const uint16_t* paged_row(int64_t head, int64_t page, int64_t slot) const {
    const int64_t id = __ldg(pages + page);
    if (id < 0 || id >= num_pages) return nullptr;
    return data + head * head_stride + id * page_stride + slot * token_stride;
  }
  __device__ const uint16_t* row(int64_t head, int64_t token) const {
    if (pages == nullptr) return data + head * head_stride + token * token_stride;
    const int64_t at = first_token + token;
    return paged_row(head, at / page_size, at % page_size);
  }
};

// `rows` belong to a head of `tensor`.
inline Rows rows_from(const HeadRows& rows, const ConstTensor& tensor) {
  CRISP_ASSERT(rows.dtype != DType::kFloat32);
  Rows to;
  to.data = reinterpret_cast<const uint16_t*>(rows.data);
  to.token_stride = rows.token_stride;
  to.head_stride = tensor.head_stride;
  to.is_half = rows.dtype == DType::kFloat16;
  uint64_t any = reinterpret_cast<uintptr_t>(rows.data) / 2 |
                 static_cast<uint64_t>(rows.token_stride) |
                 static_cast<uint64_t>(tensor.head_stride);
  if (rows.pages != nullptr) {
    to.pages = rows.pages;
    to.first_token = rows.first_token;
    to.page_size = rows.page_size;
    to.page_stride = rows.page_stride;
    to.num_pages = tensor.num_tokens / rows.page_size;
    any |= static_cast<uint64_t>(rows.page_stride);
  }
  while (to.alignment < 8 && any % (2 * static_cast<uint64_t>(to.alignment)) == 0) {
    to.alignment *= 2;
  }
  return to;
}

template <bool kHalf>
__device__ __forceinline__ float widen(uint32_t bits) {
  if constexpr (kHalf) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  } else {
    return __uint_as_float(bits << 16);
  }
}

// 2^x, 0 below -126 as on the CPU; NaN gives NaN.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace crisp::select_cuda
