// cuda.h - the CUDA error macro, and what is asked of a device. Only .cu files include it.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>

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

// Makes `device` current while it lives, so that a caller on another device keeps his own.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace crisp

// After every launch: CRISP_CUDA_CHECK(cudaGetLastError()).
#define CRISP_CUDA_CHECK(call)                                        \
  do {                                                                \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess)     \
      ::crisp::throw_device_error(error_, #call, __FILE__, __LINE__); \
  } while (false)
