// random_fill.h - bell-shaped numbers, mean 0 and variance 1, that the host and a CUDA device make
// alike, bit for bit: inputs of tests and benchmarks that are too large to be copied. No call of
// crisp.h uses them.
#pragma once

#include <cstdint>

#include "crisp/crisp.h"

#ifdef __CUDACC__
#define CRISP_HOST_DEVICE __host__ __device__
#else
#define CRISP_HOST_DEVICE
#endif

namespace crisp {

// Number `index` of the sequence `seed`: the sum of four uniform 16-bit numbers. Integers until the
// last multiplication, which rounds once.
CRISP_HOST_DEVICE inline float random_value(uint64_t seed, uint64_t index) {
  uint64_t bits = (index + 1) * 0x9e3779b97f4a7c15 + seed * 0xd1342543de82ef95;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  bits ^= bits >> 31;
  const auto sum = static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                        (bits >> 32 & 0xffff) + (bits >> 48));
  return static_cast<float>(sum - 131070) * (1.7320508f / 65536);
}

// Index of an element in the sequence of its tensor, whatever the strides.
CRISP_HOST_DEVICE inline uint64_t random_index(int64_t num_heads, int64_t head_dim, int64_t token,
                                               int64_t head, int64_t i) {
  return static_cast<uint64_t>((token * num_heads + head) * head_dim + i);
}

// Fills device memory of the current device, on the stream; in builds with CUDA. Throws
// DeviceError.
void fill_random_cuda(const Tensor& tensor, uint64_t seed, CUstream_st* stream);

}  // namespace crisp
