#include "call.h"

namespace crisp::python {

void check_status(int status) {
  if (status == CRISP_OK) return;
  if (status == CRISP_INVALID_ARGUMENT) throw Refused{crisp_last_error()};
  throw Failed{status, std::string(crisp_strerror(status)) + ": " + crisp_last_error()};
}

Call::Call(int32_t device, uintptr_t stream, int32_t num_threads, float softmax_scale,
           bool causal) {
  args.struct_size = sizeof(args);
  args.device = device;
  args.stream = reinterpret_cast<void*>(stream);
  args.num_threads = num_threads;
  args.softmax_scale = softmax_scale;
  args.causal = causal ? 1 : 0;
  args.on_stage = on_stage;
  args.on_stage_user = this;
}

void Call::set_segments(const std::vector<Segment>& segments) {
  segments_.clear();
  for (const auto& [q_start, q_len, kv_start, kv_len, page_row] : segments) {
    segments_.push_back({q_start, q_len, kv_start, kv_len, page_row});
  }
  args.segments = segments_.data();
  args.num_segments = static_cast<int64_t>(segments_.size());
}

void Call::set_pages(uintptr_t block_table, int64_t num_rows, int64_t row_stride,
                     int64_t page_size) {
  args.block_table = reinterpret_cast<const int32_t*>(block_table);
  args.num_page_rows = num_rows;
  args.page_row_stride = row_stride;
  args.page_size = page_size;
}

void Call::set_policy(const crisp_policy& policy) {
  policy_ = policy;
  args.policy = &policy_;
}

void Call::set_workspace(uintptr_t data, size_t bytes) {
  args.workspace = reinterpret_cast<void*>(data);
  args.workspace_bytes = bytes;
}

void Call::set_own_mask(int64_t block_size) {
  args.mask = mask_shape(block_size);
  words_.reset(new uint64_t[static_cast<size_t>(crisp_mask_bytes(&args.mask)) / 8]);
  args.mask.words = reinterpret_cast<uint32_t*>(words_.get());
}

crisp_mask Call::mask_shape(int64_t block_size) const {
  crisp_mask mask = {};
  check_status(crisp_mask_shape(&args, block_size, &mask));
  return mask;
}

int64_t Call::num_causal_blocks(int64_t block_size) const {
  int64_t blocks = 0;
  check_status(crisp_num_causal_blocks(&args, block_size, &blocks));
  return blocks;
}

size_t Call::workspace_bytes() const {
  size_t bytes = 0;
  check_status(crisp_workspace_size(&args, &bytes));
  return bytes;
}

std::string Call::why_unsupported() const {
  const char* why = crisp_why_unsupported(&args);
  return why == nullptr ? "" : why;
}

void Call::on_stage(int32_t stage, void* user) {
  auto& call = *static_cast<Call*>(user);
  const Clock::time_point now = Clock::now();
  call.stage_ms_[static_cast<size_t>(stage)] +=
      std::chrono::duration<double, std::milli>(now - call.last_).count();
  call.last_ = now;
}

void Call::run(int (*function)(const crisp_args*)) {
  stage_ms_ = {};
  last_ = Clock::now();
  check_status(function(&args));
}

void Call::select() { run(crisp_select); }
void Call::attend() { run(crisp_attend); }
void Call::prefill() { run(crisp_prefill); }

}  // namespace crisp::python
