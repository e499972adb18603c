// on_device.h - device memory of a test that calls kernels directly.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "crisp/crisp.h"

namespace crisp::test {

#define ASSERT_CUDA(call)                                         \
  do {                                                            \
    const cudaError_t error_ = (call);                            \
    ASSERT_EQ(error_, cudaSuccess) << cudaGetErrorString(error_); \
  } while (false)

// A copy of a host array in device memory.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(bytes(), 1)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  // Waits for the kernels before it.
  std::vector<T> read() const {
    std::vector<T> host(size_);
    const cudaError_t error = cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    return host;
  }

 private:
  size_t bytes() const { return size_ * sizeof(T); }
  size_t size_;
  void* data_ = nullptr;
};

// Skipped, with the reason, where there is no device.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    if (count == 0) GTEST_SKIP() << "no CUDA device";
  }
};
inline size_t at(int64_t index) { return static_cast<size_t>(index); }

// Dense, vertical-slash, pooled in turn.
inline std::vector<Pattern> patterns_in_turn(int64_t num_heads) {
  std::vector<Pattern> patterns;
  for (int64_t h = 0; h < num_heads; ++h) patterns.push_back(static_cast<Pattern>(h % 3));
  return patterns;
}

}  // namespace crisp::test
