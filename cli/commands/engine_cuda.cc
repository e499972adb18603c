#include "commands/engine_cuda.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

#include "core/dtype.h"
#include "core/validate.h"

namespace crisp::cli {

namespace {

using Clock = std::chrono::steady_clock;

ConstTensor copied(const ConstTensor& host, int64_t page_size, DeviceBuffer& memory) {
  const int64_t bytes = tensor_extent(host, page_size) * element_bytes(host.dtype);
  memory = DeviceBuffer(bytes, "a copy of the input");
  if (bytes > 0) memory.upload(host.data);
  ConstTensor device = host;
  device.data = memory.data();
  return device;
}

// The memory of one call on the device.
struct DeviceCall {
  DeviceBuffer mask_words, user_words, out_values, lse, report, workspace;
  Policy policy;
  BlockMask mask;
  Tensor out;
  Context context;

  DeviceCall(const Attention& attention, const Run& run)
      : mask_words(run.mask.bytes(), "the block mask"),
        out_values(tensor_bytes(attention.q), "the output"),
        lse(static_cast<int64_t>(run.lse.size() * sizeof(float)), "the log-sum-exp"),
        report(static_cast<int64_t>(run.report.size() * sizeof(HeadReport)), "the report"),
        policy(run.policy),
        mask(run.mask) {
    mask.words = reinterpret_cast<uint32_t*>(mask_words.data());
    if (auto* user = std::get_if<UserMask>(&policy)) {
      user_words = DeviceBuffer(user->mask.bytes(), "the user's mask");
      user_words.upload(user->mask.words);
      user->mask.words = reinterpret_cast<uint32_t*>(user_words.data());
    }
    const ConstTensor& q = attention.q;
    out = head_major(out_values.data(), q.dtype, q.num_heads, q.num_tokens, q.head_dim);
    context.device = Device::kCuda;
    workspace = DeviceBuffer(
        static_cast<int64_t>(workspace_bytes(attention, policy, mask, context)), "the workspace");
    context.workspace = workspace.bytes();
  }

  void enqueue(const Attention& attention) const {
    prefill(attention, policy, mask, out,
            {reinterpret_cast<float*>(lse.data()), lse.size() / sizeof(float)}, context,
            {reinterpret_cast<HeadReport*>(report.data()), report.size() / sizeof(HeadReport)});
  }

  void copy_results(Run& run) const {
    mask_words.download(run.mask_words.data());
    report.download(run.report.data());
    if (!run.lse.empty()) lse.download(run.lse.data());
    if (!run.out_values.bytes().empty()) out_values.download(run.out_values.data());
  }
};

StageTimes stage_times(DeviceClock& clock) {
  StageTimes ms;
  ms.fill(std::numeric_limits<double>::quiet_NaN());
  for (const auto& [stage, passed] : clock.read()) {
    double& sum = ms[static_cast<size_t>(stage)];
    sum = std::isnan(sum) ? passed : sum + passed;
  }
  return ms;
}

}  // namespace

DeviceInput::DeviceInput(const Attention& host) : attention_(host) {
  const PagedKv& pages = host.pages;
  attention_.q = copied(host.q, 0, q_);
  attention_.k = copied(host.k, pages.page_size, k_);
  attention_.v = copied(host.v, pages.page_size, v_);
  if (pages.page_size == 0) return;
  table_ = DeviceBuffer(pages.num_rows * pages.row_stride * 4, "the block table");
  table_.upload(pages.block_table);
  attention_.pages.block_table = reinterpret_cast<const int32_t*>(table_.data());
}

void execute_on_cuda(const Attention& on_device, Run& run, const Repeats& repeats) {
  DeviceCall call(on_device, run);
  DeviceClock clock;
  for (int i = 0; i < repeats.warm_up; ++i) call.enqueue(on_device);
  clock.start();
  clock.read();
  call.context.on_stage = [](Stage stage, void* user) {
    static_cast<DeviceClock*>(user)->mark(static_cast<int>(stage));
  };
  call.context.on_stage_user = &clock;
  const auto begin = Clock::now();
  for (int i = 0; i < repeats.most; ++i) {
    const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
    if (i >= repeats.least && passed > repeats.max_seconds) break;
    clock.start();
    call.enqueue(on_device);
    run.repeats.push_back(stage_times(clock));
  }
  call.copy_results(run);
  set_medians(run);
}

}  // namespace crisp::cli
