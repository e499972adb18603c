// device.h - CUDA as the door sees it, without a CUDA header, so that every file may ask. Defined
// in cuda.cu; a build without CUDA calls none of it.
#pragma once

#include <string>

namespace crisp {

#ifdef CRISP_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

inline constexpr int kHostMemory = -1;

// Refuses (Error) where there is no driver or no device, and drops an error that an earlier call of
// this thread has left unread: it would be taken for ours.
void require_cuda();
// The device that owns the memory at `data`, or kHostMemory.
int device_of(const void* data);
int current_device();
std::string device_name(int device);  // "NVIDIA H200"
// Refuses a device that the kernels are not compiled for.
void require_capability(int device);

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
