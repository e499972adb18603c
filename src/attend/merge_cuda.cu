// merge_cuda.cu - a warp per row; the arithmetic of merge.cc.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "attend/merge.h"
#include "core/cuda.h"
#include "core/problem.h"

namespace crisp {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // a warp takes more rows where there are more

// A tensor and its log-sum-exps, [num_heads, num_tokens].
struct State {
  void* data;
  int64_t token_stride, head_stride;
  DType dtype;
  float* lse;
};

struct Weights {
  float a, b, lse;
};

// See merge_weights in merge.cc.
__device__ Weights weights_of(float lse_a, float lse_b) {
  constexpr float kEmpty = -INFINITY;
  if (lse_a == kEmpty && lse_b == kEmpty) return {0.f, 0.f, kEmpty};
  if (lse_a == kEmpty) return {0.f, 1.f, lse_b};
  if (lse_b == kEmpty) return {1.f, 0.f, lse_a};
  const float m = lse_a > lse_b ? lse_a : lse_b;
  const float a = expf(lse_a - m), b = expf(lse_b - m), s = a + b;
  return {a / s, b / s, m + logf(s)};
}

__device__ float load(const State& state, int64_t at) {
  switch (state.dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(state.data)[at];
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(state.data)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(state.data)[at]);
  }
}

__device__ void store(const State& state, int64_t at, float value) {
  switch (state.dtype) {
    case DType::kFloat32:
      static_cast<float*>(state.data)[at] = value;
      return;
    case DType::kFloat16:
      static_cast<__half*>(state.data)[at] = __float2half_rn(value);
      return;
    default:
      static_cast<__nv_bfloat16*>(state.data)[at] = __float2bfloat16_rn(value);
  }
}

// A side of weight 0 is not read: what an empty state holds does not matter, not even NaN.
__device__ float weighted(const State& state, int64_t at, float weight) {
  return weight == 0.f ? 0.f : weight * load(state, at);
}

__device__ int64_t row_start(const State& state, int64_t token, int64_t head) {
  return token * state.token_stride + head * state.head_stride;
}

// Rows are numbered head by head. out may be a's own array: every element is read by the lane that
// writes it, and every lane has read both log-sum-exps before lane 0 writes.
__global__ void __launch_bounds__(kThreads)
    merge_rows(State a, State b, State out, int64_t num_tokens, int64_t num_rows,
               int64_t head_dim) {
  const int64_t num_warps = int64_t{gridDim.x} * (kThreads / kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t row = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (; row < num_rows; row += num_warps) {
    const int64_t head = row / num_tokens, token = row % num_tokens;
    const Weights weights = weights_of(a.lse[row], b.lse[row]);
    __syncwarp();
    const int64_t at_a = row_start(a, token, head), at_b = row_start(b, token, head);
    const int64_t at_out = row_start(out, token, head);
    for (int64_t i = lane; i < head_dim; i += kWarp) {
      store(out, at_out + i, weighted(a, at_a + i, weights.a) + weighted(b, at_b + i, weights.b));
    }
    if (lane == 0 && out.lse != nullptr) out.lse[row] = weights.lse;
  }
}

State to_state(const ConstTensor& tensor, const float* lse) {
  return {const_cast<void*>(tensor.data), tensor.token_stride, tensor.head_stride, tensor.dtype,
          const_cast<float*>(lse)};
}

}  // namespace

void merge_attention_states_cuda(const ConstTensor& out_a, const float* lse_a,
                                 const ConstTensor& out_b, const float* lse_b, const Tensor& out,
                                 float* lse, const Context& context) {
  const int64_t num_rows = out.num_heads * out.num_tokens;
  if (num_rows == 0) return;
  const State into = {out.data, out.token_stride, out.head_stride, out.dtype, lse};
  const int64_t num_blocks = std::min(ceil_div(num_rows, kThreads / kWarp), kMaxBlocks);
  CRISP_CUDA_CHECK(launch_blocks(merge_rows, num_blocks, kThreads, context.stream,
                                 to_state(out_a, lse_a), to_state(out_b, lse_b), into,
                                 out.num_tokens, num_rows, out.head_dim));
}

}  // namespace crisp
