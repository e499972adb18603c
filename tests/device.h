// device.h - copies of a test's memory on a CUDA device, with what surrounds it, so that a
// write outside shows there as it does on the host. A build without CUDA has none and never asks
// for one.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "case.h"
#include "guarded.h"

namespace crisp::test {

// nullptr if there is a GPU that the library runs on, else the reason in one sentence.
const char* why_no_cuda();
int compute_capability_major();
// Waits for the device; throws std::runtime_error with what failed since the last time.
void synchronize(Device device);

// Bytes on the device. Throws std::runtime_error.
class DeviceCopy {
 public:
  // Margins of CRISP_TEST_MARGIN bytes (512) around the payload are copied with it, or, if the host
  // has none, are 0xff: NaN in every dtype. 0 puts the payload right at the ends of its allocation,
  // where a memory checker sees the first byte outside.
  explicit DeviceCopy(Guarded& host);
  explicit DeviceCopy(std::span<const std::byte> host);
  ~DeviceCopy();
  DeviceCopy(DeviceCopy&& other) noexcept;
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  std::byte* data() const { return memory_ + offset_; }
  // To and from the host's memory, margins included.
  void put(const Guarded& host);
  void fetch(Guarded& host) const;
  // The payload of another of the same size.
  void take(const DeviceCopy& other);
  // Payload and margins are as they were put there.
  bool equals(std::span<const std::byte> host) const;

 private:
  void allocate(size_t payload, size_t residue);
  size_t margin_ = 0, offset_ = 0, size_ = 0;
  std::byte* memory_ = nullptr;
};

// A Guarded where the device of a case sees it: itself on the CPU, a copy on CUDA.
class Placed {
 public:
  Placed(Device device, Guarded& host);
  std::byte* data() const;
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data()), host_.size() / sizeof(T)};
  }
  std::span<std::byte> bytes() const { return {data(), host_.size()}; }
  // The device sees what the host has; after a call, the other way round.
  void put();
  void fetch();

 private:
  Guarded& host_;
  std::optional<DeviceCopy> copy_;
};

}  // namespace crisp::test
