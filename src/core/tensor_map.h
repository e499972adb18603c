// tensor_map.h - how the copy engine of sm_90 sees a tensor of the caller.
//
// A map is [64 columns, tokens of a page, column halves, heads, pages] over 16-bit elements: 64 of
// them are the 128 bytes that a swizzled row of shared memory holds. Only .cu files include it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "core/cuda.h"
#include "crisp/crisp.h"

namespace crisp {

struct MapTensor {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;  // elements
  int64_t tokens = 0, heads = 0, pages = 1;
  int head_dim = 0;  // a multiple of 64
  DType dtype = DType::kBFloat16;
};

// Whether make_tensor_map takes it: 16-byte rows, strides that fit.
inline bool is_mappable(const MapTensor& tensor) {
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // elements, 2^40 bytes
  const auto fits = [](int64_t stride, int64_t size) {
    return size <= 1 || (stride > 0 && stride % 8 == 0 && stride < kMaxStride);
  };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 &&
         fits(tensor.token_stride, tensor.tokens) && fits(tensor.head_stride, tensor.heads) &&
         fits(tensor.page_stride, tensor.pages);
}

// Boxes of box_tokens x box_halves x 64 columns. What lies outside the tensor reads as zero, or as
// NaN if `outside_is_nan`. Throws DeviceError.
inline CUtensorMap make_tensor_map(const MapTensor& tensor, int box_tokens, int box_halves,
                                   bool outside_is_nan) {
  using EncodeTiled =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CRISP_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError("the driver has no cuTensorMapEncodeTiled, must be of CUDA 12.0 or later");

  // The stride of a dimension of size 1 is never used, but must be a valid one.
  const auto bytes = [](int64_t stride, int64_t size) {
    return size > 1 ? static_cast<cuuint64_t>(stride) * 2 : cuuint64_t{128};
  };
  const cuuint64_t sizes[5] = {
      64, static_cast<cuuint64_t>(tensor.tokens), static_cast<cuuint64_t>(tensor.head_dim / 64),
      static_cast<cuuint64_t>(tensor.heads), static_cast<cuuint64_t>(tensor.pages)};
  const cuuint64_t strides[4] = {bytes(tensor.token_stride, tensor.tokens), 128,
                                 bytes(tensor.head_stride, tensor.heads),
                                 bytes(tensor.page_stride, tensor.pages)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_tokens),
                             static_cast<cuuint32_t>(box_halves), 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<EncodeTiled>(entry)(
      &map,
      tensor.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      outside_is_nan ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
                     : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError("cuTensorMapEncodeTiled failed with code " + std::to_string(result));
  return map;
}

}  // namespace crisp
