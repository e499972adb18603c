// cuda.cu - devices: which are there, which owns what, which is current.
#include "core/check.h"
#include "core/cuda.h"

namespace crisp {

void require_cuda() {
  (void)cudaGetLastError();
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  (void)cudaGetLastError();
  throw_error("context.device is kCuda, must be kCpu: there is no CUDA device (",
              cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error), ")");
}

int device_of(const void* data) {
  cudaPointerAttributes attributes = {};
  CRISP_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  const bool on_device =
      attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  return on_device ? attributes.device : kHostMemory;
}

int current_device() {
  int device = 0;
  CRISP_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

std::string device_name(int device) {
  cudaDeviceProp properties = {};
  CRISP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

void require_capability(int device) {
  int major = 0, minor = 0;
  CRISP_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CRISP_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  CRISP_CHECK(major >= 8, "CUDA device ", device, " has compute capability ", major, ".", minor,
              ", must be at least 8.0");
}

DeviceGuard::DeviceGuard(int device) : previous_(current_device()) {
  CRISP_CUDA_CHECK(cudaSetDevice(device));
}

// A caller's device that cannot be made current again is an error of his next call, not of ours.
DeviceGuard::~DeviceGuard() { (void)cudaSetDevice(previous_); }

}  // namespace crisp
