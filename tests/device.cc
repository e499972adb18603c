#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"

#ifdef CRISP_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace crisp::test {

#ifdef CRISP_WITH_CUDA

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error));
}

size_t margin() {
  const char* text = std::getenv("CRISP_TEST_MARGIN");
  return text == nullptr ? Guarded::kGuard : std::min<size_t>(std::stoul(text), Guarded::kGuard);
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

}  // namespace

const char* why_no_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (count == 0) return "there is no CUDA device";
  return compute_capability_major() < 8 ? "the CUDA device is of compute capability below 8.0"
                                        : nullptr;
}

int compute_capability_major() { return attribute(cudaDevAttrComputeCapabilityMajor); }

void synchronize(Device device) {
  if (device == Device::kCuda) check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// cudaMalloc aligns to 256 bytes; the payload keeps its distance from such a boundary.
void DeviceCopy::allocate(size_t payload, size_t residue) {
  margin_ = margin();
  offset_ = (margin_ + 255) / 256 * 256 + residue;
  size_ = payload;
  void* memory = nullptr;
  check(cudaMalloc(&memory, offset_ + size_ + margin_), "cudaMalloc");
  memory_ = static_cast<std::byte*>(memory);
}

DeviceCopy::DeviceCopy(Guarded& host) {
  allocate(host.size(), reinterpret_cast<uintptr_t>(host.data()) % Guarded::kAlignment);
  put(host);
}

void DeviceCopy::put(const Guarded& host) {
  copy_bytes(data() - margin_, host.data() - margin_, size_ + 2 * margin_);
}

DeviceCopy::DeviceCopy(std::span<const std::byte> host) {
  allocate(host.size(), 0);
  check(cudaMemset(memory_, 0xff, offset_ + size_ + margin_), "cudaMemset");
  copy_bytes(data(), host.data(), size_);
}

DeviceCopy::~DeviceCopy() { (void)cudaFree(memory_); }

DeviceCopy::DeviceCopy(DeviceCopy&& other) noexcept
    : margin_(other.margin_),
      offset_(other.offset_),
      size_(other.size_),
      memory_(std::exchange(other.memory_, nullptr)) {}

void DeviceCopy::fetch(Guarded& host) const {
  copy_bytes(host.data() - margin_, data() - margin_, size_ + 2 * margin_);
}

void DeviceCopy::take(const DeviceCopy& other) {
  if (other.size_ != size_) throw std::logic_error("the two copies differ in size");
  copy_bytes(data(), other.data(), size_);
}

bool DeviceCopy::equals(std::span<const std::byte> host) const {
  std::vector<std::byte> now(size_ + 2 * margin_);
  copy_bytes(now.data(), data() - margin_, now.size());
  const auto begin = now.begin() + static_cast<std::ptrdiff_t>(margin_);
  const auto end = begin + static_cast<std::ptrdiff_t>(size_);
  const auto is_fill = [](std::byte value) { return value == Guarded::kFill; };
  return std::equal(begin, end, host.begin(), host.end()) &&
         std::all_of(now.begin(), begin, is_fill) && std::all_of(end, now.end(), is_fill);
}

#else

namespace {
[[noreturn]] void refuse() { throw std::logic_error("this build has no CUDA backend"); }
}  // namespace

const char* why_no_cuda() { return "this build has no CUDA backend"; }
int compute_capability_major() { refuse(); }
void synchronize(Device device) {
  if (device == Device::kCuda) refuse();
}
DeviceCopy::DeviceCopy(Guarded&) { refuse(); }
DeviceCopy::DeviceCopy(std::span<const std::byte>) { refuse(); }
DeviceCopy::~DeviceCopy() = default;
DeviceCopy::DeviceCopy(DeviceCopy&&) noexcept = default;
void DeviceCopy::put(const Guarded&) { refuse(); }
void DeviceCopy::fetch(Guarded&) const { refuse(); }
void DeviceCopy::take(const DeviceCopy&) { refuse(); }
bool DeviceCopy::equals(std::span<const std::byte>) const { refuse(); }

#endif

Placed::Placed(Device device, Guarded& host) : host_(host) {
  if (device == Device::kCuda) copy_.emplace(host);
}
std::byte* Placed::data() const { return copy_ ? copy_->data() : host_.data(); }
void Placed::put() {
  if (copy_) copy_->put(host_);
}
void Placed::fetch() {
  if (copy_) copy_->fetch(host_);
}

}  // namespace crisp::test
