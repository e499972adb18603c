// engine_cuda.h - one policy run on a CUDA device: engine.h's execute() there.
#pragma once

#include "commands/engine.h"
#include "device_memory.h"

namespace crisp::cli {

// The tensors and pages of a call, copied to the device.
class DeviceInput {
 public:
  explicit DeviceInput(const Attention& host);
  const Attention& attention() const { return attention_; }

 private:
  DeviceBuffer q_, k_, v_, table_;
  Attention attention_;
};

// How often a case is timed. After `least` runs no further one starts once max_seconds have passed.
struct Repeats {
  int warm_up = 0, least = 1, most = 1;
  double max_seconds = 1e30;
};

// Runs select_blocks and attend on data of the device, timing each stage by its events. The mask
// and the report of the last run are copied to `run`; so are output and lse where `run` has memory
// for them. A user's mask in run.policy lies on the host.
void execute_on_cuda(const Attention& on_device, Run& run, const Repeats& repeats);

// The same for a call on the host, whose input is copied there: all heads at once, or, where that
// would take more than `memory_bytes` of the device (0: nine tenths of what is free), as many kv
// heads at a time as it holds. Heads do not see each other, so the results are those of one run;
// the times of the parts add up.
void execute_from_host(const Attention& host, Run& run, const Repeats& repeats,
                       int64_t memory_bytes);

}  // namespace crisp::cli
