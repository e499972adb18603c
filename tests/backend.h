// backend.h - one suite for every backend: tests take their dtypes and cases from here.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "case.h"
#include "device.h"

namespace crisp::test {

enum class Backend : uint8_t {
  kCpu,
  kCuda,      // whatever kernels the device and the call allow: on Hopper the wgmma ones
  kCudaSm80,  // the mma.sync kernels on any device
};

class OnBackend : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (is_cuda() && why_no_cuda() != nullptr) GTEST_SKIP() << why_no_cuda();
    if (GetParam() == Backend::kCuda && compute_capability_major() != 9)
      GTEST_SKIP() << "this device has one family of kernels, which the other backend tests";
  }
  bool is_cuda() const { return GetParam() != Backend::kCpu; }

  std::vector<DType> dtypes() const {
    if (is_cuda()) return {DType::kBFloat16, DType::kFloat16};
    return {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  }

  // The case where it is to run. CUDA has no float32: such a case becomes one of the other two.
  Case exactly(Case c) const {
    if (!is_cuda()) return c;
    c.device = Device::kCuda;
    c.only_sm80 = GetParam() == Backend::kCudaSm80;
    if (c.dtype == DType::kFloat32)
      c.dtype =
          (c.head_dim / 8 + c.segments[0].q_len) % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    return c;
  }
  // The same for a test to which any head_dim is as good: one that the wgmma kernels take.
  Case on(Case c) const {
    if (GetParam() == Backend::kCuda) c.head_dim = c.head_dim <= 64 ? 64 : 128;
    return exactly(c);
  }
};

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) {
  constexpr const char* kNames[] = {"Cpu", "Cuda", "CudaSm80"};
  return kNames[static_cast<size_t>(info.param)];
}

#define CRISP_ON_CPU(suite) \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, ::testing::Values(Backend::kCpu), backend_name)
#define CRISP_ON_CUDA(suite)                                                                   \
  INSTANTIATE_TEST_SUITE_P(Cuda, suite, ::testing::Values(Backend::kCuda, Backend::kCudaSm80), \
                           backend_name)

}  // namespace crisp::test
