// block_sum.cuh - sums over the threads of a warp or a CTA. The order of the additions depends on
// the number of threads alone, so that equal inputs give equal bits, also in floating point.
#pragma once

#include <type_traits>

namespace crisp {

inline constexpr int kWarpLanes = 32;

// Sum over the lanes of the warp, the same bits in every lane. All lanes must call it.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  if constexpr (std::is_same_v<T, int>) {
    return __reduce_add_sync(~0u, value);
  } else {
#pragma unroll
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
    return value;
  }
}

// Sum over the threads of the CTA, the same bits in every thread. All threads must call it.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T value) {
  __shared__ T parts[kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x);
  value = warp_sum(value);
  if (thread % kWarpLanes == 0) parts[thread / kWarpLanes] = value;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarpLanes; ++warp) sum += parts[warp];
  __syncthreads();  // the next sum writes `parts` again
  return sum;
}

}  // namespace crisp
