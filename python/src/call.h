// call.h - one library call as Python builds it: crisp_args with the segments, policy and stage
// times that it points to.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "crisp/crisp_c.h"

namespace crisp::python {

// Refused by the library: ValueError in Python.
struct Refused {
  std::string message;
};
// The device or the library failed: RuntimeError, or MemoryError.
struct Failed {
  int status;
  std::string message;
};

// CRISP_OK returns; anything else throws Refused or Failed with what the library said.
void check_status(int status);

inline constexpr int kNumStages = 5;

// Pointers are addresses that Python took from arrays; Python keeps those arrays alive for as long
// as the call runs. Not copyable: args point into the object.
class Call {
 public:
  Call(int32_t device, uintptr_t stream, int32_t num_threads, float softmax_scale, bool causal);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // (q_start, q_len, kv_start, kv_len, page_row) each; none: all of q against all of k.
  using Segment = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
  void set_segments(const std::vector<Segment>& segments);
  void set_pages(uintptr_t block_table, int64_t num_rows, int64_t row_stride, int64_t page_size);
  void set_policy(const crisp_policy& policy);
  void set_workspace(uintptr_t data, size_t bytes);
  // A mask in host memory of the call's own, for results that nobody asks for.
  void set_own_mask(int64_t block_size);

  crisp_mask mask_shape(int64_t block_size) const;
  int64_t num_causal_blocks(int64_t block_size) const;
  size_t workspace_bytes() const;
  // Empty: the call would be accepted.
  std::string why_unsupported() const;

  void select();
  void attend();
  void prefill();

  // ms of the last run per enum crisp_stage; on CUDA the time to enqueue.
  std::array<double, kNumStages> stage_ms() const { return stage_ms_; }

  crisp_args args = {};

 private:
  using Clock = std::chrono::steady_clock;
  static void on_stage(int32_t stage, void* user);
  void run(int (*function)(const crisp_args*));

  std::vector<crisp_segment> segments_;
  crisp_policy policy_ = {};
  std::unique_ptr<uint64_t[]> words_;
  std::array<double, kNumStages> stage_ms_ = {};
  Clock::time_point last_ = {};
};

}  // namespace crisp::python
