#include "commands/engine.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "commands/commands.h"
#include "core/half.h"
#include "core/problem.h"

namespace crisp::cli {

using Clock = std::chrono::steady_clock;

const char* const kStageNames[kNumStages] = {"proxy", "route", "select", "mask", "attend"};

Buffer::Buffer(int64_t bytes, const char* purpose) : size_(static_cast<size_t>(bytes)) {
  if (size_ == 0) return;
  void* data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::runtime_error(fmt::format("no memory: {} needs {} bytes", purpose, bytes));
  }
  data_ = static_cast<std::byte*>(data);
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Tensor head_major(void* data, DType dtype, int64_t num_heads, int64_t num_tokens,
                  int64_t head_dim) {
  return {data, dtype, num_tokens, num_heads, head_dim, head_dim, num_tokens * head_dim, 0};
}

int64_t tensor_bytes(const ConstTensor& tensor) {
  return tensor.num_heads * tensor.num_tokens * tensor.head_dim * element_bytes(tensor.dtype);
}

ConstTensor as_const(const Tensor& tensor) {
  return {tensor.data,     tensor.dtype,        tensor.num_tokens,  tensor.num_heads,
          tensor.head_dim, tensor.token_stride, tensor.head_stride, tensor.page_stride};
}

Attention Input::attention() const {
  return {.q = q,
          .k = k,
          .v = v,
          .softmax_scale = softmax_scale,
          .causal = true,
          .segments = segments,
          .pages = {}};
}

namespace {

ConstTensor to_float32(const ConstTensor& from, Buffer& memory) {
  const int64_t count = from.num_heads * from.num_tokens * from.head_dim;
  memory = Buffer(4 * count, "a float32 copy of the input");
  auto* values = reinterpret_cast<float*>(memory.data());
  for (int64_t i = 0; i < count; ++i) values[i] = load_float(from.data, from.dtype, i);
  return as_const(
      head_major(values, DType::kFloat32, from.num_heads, from.num_tokens, from.head_dim));
}

// Chunk c holds queries [c * chunk, ...) and sees every key up to its own last query.
std::vector<Segment> chunk_segments(int64_t chunk_tokens, int64_t q_len, int64_t kv_len) {
  std::vector<Segment> segments;
  if (chunk_tokens == 0) return segments;
  for (int64_t begin = 0; begin < q_len; begin += chunk_tokens) {
    const int64_t length = std::min(chunk_tokens, q_len - begin);
    segments.push_back({begin, length, 0, kv_len - q_len + begin + length, 0});
  }
  return segments;
}

// Attributes the time since the last report to the stage that has just run.
struct StageClock {
  StageTimes ms;
  Clock::time_point last = Clock::now();

  StageClock() { ms.fill(std::numeric_limits<double>::quiet_NaN()); }
  static void on_stage(Stage stage, void* user) {
    auto& clock = *static_cast<StageClock*>(user);
    const auto now = Clock::now();
    double& ms = clock.ms[static_cast<size_t>(stage)];
    const double passed = std::chrono::duration<double, std::milli>(now - clock.last).count();
    ms = std::isnan(ms) ? passed : ms + passed;
    clock.last = now;
  }
};

}  // namespace

Input load_input(std::span<const std::string> paths, const InputOptions& options) {
  Input input;
  input.file = files::load_qkv(paths);
  files::refuse_non_finite(input.file);
  input.softmax_scale = options.softmax_scale.value_or(input.file.softmax_scale);
  input.q = input.file.q;
  input.k = input.file.k;
  input.v = input.file.v;
  if (options.as_float32 && input.q.dtype != DType::kFloat32) {
    input.q = to_float32(input.q, input.converted[0]);
    input.k = to_float32(input.k, input.converted[1]);
    input.v = to_float32(input.v, input.converted[2]);
  }
  input.segments = chunk_segments(options.chunk_tokens, input.q.num_tokens, input.k.num_tokens);
  return input;
}

double selection_ms(const StageTimes& ms) {
  double sum = 0;
  for (int stage = 0; stage < kNumStages - 1; ++stage) {
    if (!std::isnan(ms[static_cast<size_t>(stage)])) sum += ms[static_cast<size_t>(stage)];
  }
  return sum;
}

double total_ms(const StageTimes& ms) { return selection_ms(ms) + ms[kNumStages - 1]; }

Run make_run(const Attention& attention, const Policy& policy, bool with_lse, bool with_out) {
  Run run;
  run.policy = policy;
  run.mask = mask_for(attention);
  run.mask_words = Buffer(run.mask.bytes(), "the block mask");
  run.mask.words = reinterpret_cast<uint32_t*>(run.mask_words.data());
  const ConstTensor& q = attention.q;
  run.out_values = Buffer(with_out ? tensor_bytes(q) : 0, "the output");
  run.out = head_major(run.out_values.data(), q.dtype, q.num_heads, q.num_tokens, q.head_dim);
  if (with_lse) run.lse.resize(static_cast<size_t>(q.num_heads * q.num_tokens));
  run.report.resize(static_cast<size_t>(num_segments(attention) * q.num_heads));
  return run;
}

void execute(const Attention& attention, Run& run, int num_threads, int repeats,
             double max_seconds) {
  Context context;
  context.num_threads = num_threads;
  const size_t bytes = workspace_bytes(attention, run.policy, run.mask, context);
  const Buffer workspace(static_cast<int64_t>(bytes), "the workspace");
  context.workspace = workspace.bytes();
  context.on_stage = StageClock::on_stage;
  // First touches of fresh memory are the kernel's work, not the policy's.
  std::memset(run.out_values.data(), 0, run.out_values.bytes().size());
  const auto begin = Clock::now();
  for (int i = 0; i < repeats; ++i) {
    StageClock clock;
    context.on_stage_user = &clock;
    prefill(attention, run.policy, run.mask, run.out, run.lse, context, run.report);
    run.repeats.push_back(clock.ms);
    if (std::chrono::duration<double>(Clock::now() - begin).count() > max_seconds) break;
  }
  set_medians(run);
}

void set_medians(Run& run) {
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    std::vector<double> values;
    for (const StageTimes& ms : run.repeats) values.push_back(ms[stage]);
    run.ms[stage] = median(std::move(values));
  }
}

void select_only(const Attention& attention, Run& run, int num_threads) {
  Context context;
  context.num_threads = num_threads;
  const size_t bytes = workspace_bytes(attention, run.policy, run.mask, context);
  const Buffer workspace(static_cast<int64_t>(bytes), "the workspace");
  context.workspace = workspace.bytes();
  select_blocks(attention, run.policy, run.mask, context, run.report);
}

namespace {

ConstTensor heads_of(ConstTensor tensor, int64_t first, int64_t count) {
  tensor.data = static_cast<const std::byte*>(tensor.data) +
                first * tensor.head_stride * element_bytes(tensor.dtype);
  tensor.num_heads = count;
  return tensor;
}

}  // namespace

Attention kv_heads_of(const Attention& attention, int64_t first, int64_t count) {
  const int64_t group = group_size(attention);
  Attention some = attention;
  some.q = heads_of(attention.q, first * group, count * group);
  some.k = heads_of(attention.k, first, count);
  some.v = heads_of(attention.v, first, count);
  return some;
}

Attention head_of(const Attention& attention, int64_t head) {
  Attention one = kv_heads_of(attention, head / group_size(attention), 1);
  one.q = heads_of(attention.q, head, 1);
  return one;
}

double median(std::vector<double> values) {
  for (const double value : values) {
    if (std::isnan(value)) return value;
  }
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace crisp::cli
