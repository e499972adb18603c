#include "device_memory.h"

#include <fmt/format.h>

#include <stdexcept>

#ifdef CRISP_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace crisp::cli {

#ifdef CRISP_WITH_CUDA

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(
      fmt::format("{}: {}, {}", what, cudaGetErrorName(error), cudaGetErrorString(error)));
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

CudaDevice describe(int index) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  size_t free = 0, total = 0;
  check(cudaSetDevice(index), "cudaSetDevice");
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return {properties.name,
          properties.major,
          properties.minor,
          properties.multiProcessorCount,
          static_cast<int64_t>(total),
          static_cast<int64_t>(free)};
}

}  // namespace

CudaMachine cuda_machine() {
  CudaMachine machine;
  int runtime = 0, driver = 0, count = 0;
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) machine.runtime = version_text(runtime);
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0)
    machine.driver = version_text(driver);
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    machine.why_not = fmt::format("there is no CUDA device ({})", cudaGetErrorString(error));
    return machine;
  }
  for (int index = 0; index < count; ++index) machine.devices.push_back(describe(index));
  if (count == 0) {
    machine.why_not = "there is no CUDA device";
    return machine;
  }
  check(cudaSetDevice(0), "cudaSetDevice");
  const CudaDevice& first = machine.devices[0];
  if (first.major < 8)
    machine.why_not = fmt::format("device 0 has compute capability {}.{}, must be at least 8.0",
                                  first.major, first.minor);
  return machine;
}

DeviceBuffer::DeviceBuffer(int64_t bytes, const char* purpose) : size_(static_cast<size_t>(bytes)) {
  if (size_ == 0) return;
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, size_); error != cudaSuccess) {
    throw std::runtime_error(fmt::format("no memory on the CUDA device: {} needs {} bytes ({})",
                                         purpose, bytes, cudaGetErrorString(error)));
  }
  data_.reset(static_cast<std::byte*>(data));
}

void DeviceBuffer::Free::operator()(std::byte* data) const { (void)cudaFree(data); }

void DeviceBuffer::upload(const void* from) const {
  check(cudaMemcpy(data(), from, size_, cudaMemcpyHostToDevice), "copying to the CUDA device");
}

void DeviceBuffer::download(void* to) const {
  check(cudaMemcpy(to, data(), size_, cudaMemcpyDeviceToHost), "copying from the CUDA device");
}

struct DeviceClock::Events {
  std::vector<cudaEvent_t> events;  // made as they are needed, then used again
  std::vector<int> parts;           // of the events after the first
  size_t used = 0;

  void record() {
    if (used == events.size()) {
      events.emplace_back();
      check(cudaEventCreate(&events.back()), "cudaEventCreate");
    }
    check(cudaEventRecord(events[used++], nullptr), "cudaEventRecord");
  }
};

DeviceClock::DeviceClock() : events_(std::make_unique<Events>()) {}
DeviceClock::~DeviceClock() {
  for (cudaEvent_t event : events_->events) (void)cudaEventDestroy(event);
}

void DeviceClock::start() {
  events_->used = 0;
  events_->parts.clear();
  events_->record();
}

void DeviceClock::mark(int part) {
  events_->parts.push_back(part);
  events_->record();
}

std::vector<DeviceClock::Part> DeviceClock::read() {
  check(cudaDeviceSynchronize(), "running on the CUDA device");
  std::vector<Part> parts;
  for (size_t i = 0; i < events_->parts.size(); ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events_->events[i], events_->events[i + 1]),
          "cudaEventElapsedTime");
    parts.push_back({events_->parts[i], static_cast<double>(ms)});
  }
  return parts;
}

#else

namespace {
constexpr const char* kNone = "this build has no CUDA backend";
}

CudaMachine cuda_machine() {
  CudaMachine machine;
  machine.why_not = kNone;
  return machine;
}
DeviceBuffer::DeviceBuffer(int64_t, const char*) { throw std::logic_error(kNone); }
void DeviceBuffer::Free::operator()(std::byte*) const {}
void DeviceBuffer::upload(const void*) const {}
void DeviceBuffer::download(void*) const {}
struct DeviceClock::Events {};
DeviceClock::DeviceClock() { throw std::logic_error(kNone); }
DeviceClock::~DeviceClock() = default;
void DeviceClock::start() {}
void DeviceClock::mark(int) {}
std::vector<DeviceClock::Part> DeviceClock::read() { return {}; }

#endif

}  // namespace crisp::cli
