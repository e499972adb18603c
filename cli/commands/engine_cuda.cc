#include "commands/engine_cuda.h"

#include <algorithm>
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

namespace {

// Of the device, for one call and its input.
int64_t bytes_of(const Attention& attention, const Run& run) {
  const BlockMask mask = mask_for(attention);
  Policy policy = run.policy;
  int64_t masks = mask.bytes();
  if (auto* user = std::get_if<UserMask>(&policy)) {
    user->mask = mask;
    masks *= 2;
  }
  Context context;
  context.device = Device::kCuda;
  const int64_t lse = run.lse.empty() ? 0 : attention.q.num_heads * attention.q.num_tokens * 4;
  return 2 * tensor_bytes(attention.q) + tensor_bytes(attention.k) + tensor_bytes(attention.v) +
         masks + lse + static_cast<int64_t>(workspace_bytes(attention, policy, mask, context));
}

int64_t kv_heads_that_fit(const Attention& host, const Run& run, int64_t memory_bytes) {
  int64_t count = host.k.num_heads;
  while (count > 1 && bytes_of(kv_heads_of(host, 0, count), run) > memory_bytes) --count;
  return count;
}

// Query heads [first, ...) of `run` as a run of their own, with memory of its own.
Run part_of(const Run& run, const Attention& part, int64_t first) {
  Policy policy = run.policy;
  if (auto* user = std::get_if<UserMask>(&policy)) {
    user->mask.words += user->mask.words_per_row() * user->mask.num_q_blocks * first;
    user->mask.num_heads = part.q.num_heads;
  }
  return make_run(part, policy, !run.lse.empty(), !run.out_values.bytes().empty());
}

void put_part(const Run& part, int64_t first, Run& run) {
  const int64_t heads = part.mask.num_heads, all = run.mask.num_heads;
  const auto place = [&](std::span<const std::byte> from, std::span<std::byte> to) {
    std::copy(from.begin(), from.end(),
              to.begin() + first * (static_cast<int64_t>(from.size()) / heads));
  };
  place(part.mask_words.bytes(), run.mask_words.bytes());
  place(part.out_values.bytes(), run.out_values.bytes());
  place(std::as_bytes(std::span(part.lse)), std::as_writable_bytes(std::span(run.lse)));
  for (int64_t at = 0; at < static_cast<int64_t>(part.report.size()); ++at) {
    run.report[static_cast<size_t>(at / heads * all + first + at % heads)] =
        part.report[static_cast<size_t>(at)];
  }
}

// A stage that did not run for one part has still run if it has for another.
void add_times(const std::vector<StageTimes>& part, std::vector<StageTimes>& all) {
  if (all.empty()) {
    all = part;
    return;
  }
  all.resize(std::min(all.size(), part.size()));
  for (size_t repeat = 0; repeat < all.size(); ++repeat) {
    for (size_t stage = 0; stage < kNumStages; ++stage) {
      double& sum = all[repeat][stage];
      const double more = part[repeat][stage];
      if (std::isnan(sum)) {
        sum = more;
      } else if (!std::isnan(more)) {
        sum += more;
      }
    }
  }
}

}  // namespace

void execute_from_host(const Attention& host, Run& run, const Repeats& repeats,
                       int64_t memory_bytes) {
  if (memory_bytes == 0) memory_bytes = cuda_machine().devices[0].free_bytes / 10 * 9;
  const int64_t at_once = kv_heads_that_fit(host, run, memory_bytes);
  if (at_once == host.k.num_heads) {
    execute_on_cuda(DeviceInput(host).attention(), run, repeats);
    return;
  }
  const int64_t group = host.q.num_heads / host.k.num_heads;
  for (int64_t first = 0; first < host.k.num_heads; first += at_once) {
    const Attention part = kv_heads_of(host, first, std::min(at_once, host.k.num_heads - first));
    Run some = part_of(run, part, first * group);
    execute_on_cuda(DeviceInput(part).attention(), some, repeats);
    put_part(some, first * group, run);
    add_times(some.repeats, run.repeats);
  }
  set_medians(run);
}

}  // namespace crisp::cli
