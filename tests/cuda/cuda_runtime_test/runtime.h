// runtime.h - streams, graphs and device memory that end with their test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace crisp::test {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error));
}
#define CHECK_CUDA(call) ::crisp::test::check_cuda((call), #call)

class Stream {
 public:
  Stream() { CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `body` enqueues on `stream`, recorded and not run. Any call that a capture does not allow, a
// synchronisation or an allocation say, makes it throw.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, Body&& body) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    body();
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph_));
    CHECK_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~Graph() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) { CHECK_CUDA(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Uninitialised memory of the device.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) : size_(static_cast<size_t>(bytes)) {
    CHECK_CUDA(cudaMalloc(&data_, size_));
  }
  ~DeviceMemory() { (void)cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }
  void fill(int byte) { CHECK_CUDA(cudaMemset(data_, byte, size_)); }

 private:
  size_t size_;
  void* data_ = nullptr;
};

// Skips the test where the device has not that much memory free.
#define NEEDS_DEVICE_MEMORY(bytes)                                                                \
  do {                                                                                            \
    size_t free_ = 0, total_ = 0;                                                                 \
    CHECK_CUDA(cudaMemGetInfo(&free_, &total_));                                                  \
    if (free_ < static_cast<size_t>(bytes))                                                       \
      GTEST_SKIP() << "needs " << (bytes) << " bytes of device memory, " << free_ << " are free"; \
  } while (false)

}  // namespace crisp::test
