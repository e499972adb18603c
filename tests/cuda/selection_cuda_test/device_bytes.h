// device_bytes.h - device memory for the tests: guarded, and the inputs of a call in it. Tests that
// include it are built with CUDA only.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "case.h"

namespace crisp::test {

inline void expect_ok(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// Device memory full of 0xff, with a guard behind it.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t size) : size_(size) {
    expect_ok(cudaMalloc(&data_, size + kGuard));
    expect_ok(cudaMemset(data_, 0xff, size + kGuard));
  }
  ~DeviceBytes() { (void)cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void put(const void* from) { expect_ok(cudaMemcpy(data_, from, size_, cudaMemcpyHostToDevice)); }
  template <class T>
  std::vector<T> get() const {
    std::vector<T> to(size_ / sizeof(T));
    expect_ok(cudaMemcpy(to.data(), data_, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    const auto* end = static_cast<const std::byte*>(data_) + size_;
    expect_ok(cudaMemcpy(guard.data(), end, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(guard.begin(), guard.end(), [](unsigned char b) { return b == 0xff; });
  }
  std::span<std::byte> bytes() const { return {as<std::byte>(), size_}; }

 private:
  static constexpr size_t kGuard = 4096;
  void* data_ = nullptr;
  size_t size_;
};

inline int64_t extent(const ConstTensor& tensor, int64_t page_size) {
  const int64_t heads = (tensor.num_heads - 1) * tensor.head_stride + tensor.head_dim;
  if (page_size == 0) return (tensor.num_tokens - 1) * tensor.token_stride + heads;
  return (tensor.num_tokens / page_size - 1) * tensor.page_stride +
         (page_size - 1) * tensor.token_stride + heads;
}

// The inputs of a call in device memory, and all that the stages want around them.
class DeviceCall {
 public:
  explicit DeviceCall(const Inputs& inputs) : call_(inputs) {
    const Attention& host = call_.attention;
    attention = host;
    q = copy(attention.q, 0);
    k = copy(attention.k, host.pages.page_size);
    if (host.pages.page_size == 0) return;
    table = std::make_unique<DeviceBytes>(4 * host.pages.num_rows * host.pages.row_stride);
    table->put(host.pages.block_table);
    attention.pages.block_table = table->as<int32_t>();
  }
  Attention attention;
  std::unique_ptr<DeviceBytes> q, k, table;

 private:
  static std::unique_ptr<DeviceBytes> copy(ConstTensor& tensor, int64_t page_size) {
    auto bytes = std::make_unique<DeviceBytes>(
        static_cast<size_t>(extent(tensor, page_size) * element_bytes(tensor.dtype)));
    bytes->put(tensor.data);
    tensor.data = bytes->as<void>();
    return bytes;
  }
  Call call_;
};

}  // namespace crisp::test
