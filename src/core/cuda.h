// cuda.h - the CUDA error macro and how a kernel is launched. Only .cu files include it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <sstream>
#include <utility>

#include "core/device.h"
#include "crisp/crisp.h"

namespace crisp {

// Throws DeviceError: `call` returned an error at file:line.
[[noreturn]] inline void throw_device_error(cudaError_t error, const char* call, const char* file,
                                            int line) {
  std::ostringstream message;
  message << call << " failed at " << file << ":" << line << ": " << cudaGetErrorName(error) << ", "
          << cudaGetErrorString(error);
  throw DeviceError(message.str());
}

// Launches `kernel` over a line of blocks; to be checked with CRISP_CUDA_CHECK. The blocks are on
// x, the one axis of a grid that is not limited to 65,535.
template <class... Parameters, class... Arguments>
cudaError_t launch_blocks(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads,
                          cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace crisp

// After every launch: CRISP_CUDA_CHECK(cudaGetLastError()).
#define CRISP_CUDA_CHECK(call)                                        \
  do {                                                                \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess)     \
      ::crisp::throw_device_error(error_, #call, __FILE__, __LINE__); \
  } while (false)
