// check_case.h - one case of `crisp check`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "crisp/crisp.h"

namespace crisp::cli {

struct CheckCase {
  DType dtype = DType::kFloat32;
  int64_t head_dim = 64, num_q_heads = 1, num_kv_heads = 1;
  struct Lengths {
    int64_t q_len = 0, kv_len = 0;
  };
  std::vector<Lengths> segments;
  int64_t page_size = 0;  // 0: contiguous
  Policy policy;
  double density = 1;  // below 1: a random mask of that density in place of the policy
};
std::string describe(const CheckCase& one);

struct CheckResult {
  double out_error = 0, out_bound = 0;  // largest |out - reference|, and what rounding allows
  double lse_error = 0, lse_bound = 0;
  int64_t blocks_off = 0;  // kept blocks that neither side of the threshold explains
  bool same_bits = false;  // one thread and num_threads, on CUDA two runs, gave the same results
  // A NaN error fails.
  bool ok() const {
    return out_error <= out_bound && lse_error <= lse_bound && blocks_off == 0 && same_bits;
  }
};

CheckResult run_case(const CheckCase& one, int num_threads, bool on_cuda);

}  // namespace crisp::cli
