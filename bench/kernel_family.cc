// kernel_family.cc - the switch that libcrisp_bench.so has and libcrisp.so has not.
#include <cstdint>

#include "attend/attend_cuda.h"

extern "C" __attribute__((visibility("default"))) void crisp_bench_force_sm80(int32_t forced) {
  crisp::force_sm80_for_tests(forced != 0);
}
