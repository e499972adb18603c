#include "commands/common_options.h"

#include <fmt/format.h>

#include <cstdio>

#include "commands/commands.h"
#include "core/device.h"
#include "core/parallel.h"
#include "device_memory.h"

namespace crisp::cli {

void DeviceOptions::add_to(CLI::App& command) {
  command
      .add_option("--device", device,
                  kWithCuda ? "Where to run" : "Where to run: cpu (this build has no other)")
      ->capture_default_str()
      ->type_name("cpu|cuda");
  command
      .add_option("--threads", num_threads,
                  "CPU threads, 0 to 1024; 0: one per core. Results do not depend on it")
      ->capture_default_str()
      ->type_name("N");
}

void DeviceOptions::check() const {
  if (is_cuda() && !kWithCuda) {
    throw UsageError("--device cuda: this build has no CUDA backend, expected --device cpu");
  }
  if (device != "cpu" && !is_cuda()) {
    throw UsageError(fmt::format("--device '{}' is unknown, expected cpu{}", device,
                                 kWithCuda ? " or cuda" : ""));
  }
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw UsageError(fmt::format("--threads is {}, expected 0 to {}", num_threads, kMaxThreads));
  }
}

void DeviceOptions::require_device() const {
  if (!is_cuda()) return;
  const std::string why_not = cuda_machine().why_not;
  if (!why_not.empty())
    throw UsageError(fmt::format("--device cuda: {}, expected --device cpu", why_not));
}

void DeviceOptions::require_cpu(const char* command) const {
  if (is_cuda())
    throw UsageError(
        fmt::format("--device cuda: {} runs on the CPU only, expected --device cpu", command));
}

int DeviceOptions::resolved_threads() const { return resolve_num_threads(num_threads); }

Context DeviceOptions::context() const {
  Context context;
  context.device = is_cuda() ? Device::kCuda : Device::kCpu;
  context.num_threads = num_threads;
  return context;
}

void print_json(const nlohmann::ordered_json& document, int indent) {
  fmt::print("{}\n",
             document.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace crisp::cli
