#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/cuda.h"
#include "core/problem.h"
#include "core/random_fill.h"

namespace crisp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;

__device__ void store(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(data)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
  }
}

// A thread per element, in the order of the sequence.
__global__ void fill(Tensor tensor, uint64_t seed, int64_t num_elements) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < num_elements;
       index += step) {
    const int64_t i = index % tensor.head_dim, row = index / tensor.head_dim;
    const int64_t at = row / tensor.num_heads * tensor.token_stride +
                       row % tensor.num_heads * tensor.head_stride + i;
    store(tensor.data, tensor.dtype, at, random_value(seed, static_cast<uint64_t>(index)));
  }
}

}  // namespace

void fill_random_cuda(const Tensor& tensor, uint64_t seed, CUstream_st* stream) {
  const int64_t num_elements = tensor.num_tokens * tensor.num_heads * tensor.head_dim;
  if (num_elements == 0) return;
  const int64_t num_blocks = std::min(ceil_div(num_elements, kThreads), kMaxBlocks);
  CRISP_CUDA_CHECK(launch_blocks(fill, num_blocks, kThreads, stream, tensor, seed, num_elements));
}

}  // namespace crisp
