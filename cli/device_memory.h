// device_memory.h - what the command line needs of a CUDA device: what is there, memory, and times.
// In a build without CUDA there is no device, and nothing else is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace crisp::cli {

struct CudaDevice {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0, free_bytes = 0;
};

struct CudaMachine {
  std::string driver,
      runtime;  // highest CUDA version the driver knows, and that of the build: "13.0"
  std::vector<CudaDevice> devices;
  std::string why_not;  // why the library cannot run on device 0; empty if it can
};
CudaMachine cuda_machine();

// Uninitialised memory of device 0, aligned to 256 bytes. Throws std::runtime_error naming
// `purpose` and the bytes when there is none.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int64_t bytes, const char* purpose);

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data(), size_}; }
  // Whole contents; copies wait for the work before them.
  void upload(const void* from) const;
  void download(void* to) const;

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

// Times the parts of what is enqueued on the default stream, as the device sees them.
class DeviceClock {
 public:
  DeviceClock();
  ~DeviceClock();

  void start();
  void mark(int part);  // what has been enqueued since the mark before
  struct Part {
    int part;
    double ms;
  };
  std::vector<Part> read();  // waits for the device

 private:
  struct Events;
  std::unique_ptr<Events> events_;
};

}  // namespace crisp::cli
