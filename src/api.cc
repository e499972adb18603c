// api.cc - the public functions: check, then dispatch.
#include <algorithm>
#include <cstdio>

#include "attend/attend.h"
#include "attend/merge.h"
#include "core/validate.h"
#include "policy/policy.h"

namespace crisp {
namespace {

// Everything that shapes alone can tell.
void check_shapes(const Attention& attention, const Policy& policy, const BlockMask& mask,
                  const Context& context) {
  check_context(context);
  check_attention(attention);
  check_mask_shape("mask", mask, attention);
  check_policy(policy, attention, mask);
  if (context.device == Device::kCuda) check_cuda(attention, mask);
}

// Runs `work` on the device that owns the memory of the call, which is refused if it is of another
// kind than context.device.
template <class Work>
void run_on_device(const Context& context, const Footprint& footprint, Work&& work) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda) {
      require_cuda();
      const int device = footprint.cuda_device();
      require_capability(device);
      const DeviceGuard guard(device);
      return work();
    }
  }
  work();
}

size_t select_bytes(const Attention& attention, const Policy& policy, const Context& context) {
  return std::visit(
      [&](const auto& chosen) { return select_workspace_bytes(attention, chosen, context); },
      policy);
}

void add_select(Footprint& footprint, const Attention& attention, const Policy& policy,
                const BlockMask& mask, std::span<HeadReport> report) {
  const auto expected = static_cast<size_t>(num_segments(attention) * attention.q.num_heads);
  CRISP_CHECK(report.empty() || report.size() == expected, "report has ", report.size(),
              " entries, must be empty or num_segments x num_q_heads, which is ", expected);
  footprint.add_mask("mask.words", mask, true);
  if (const auto* user = std::get_if<UserMask>(&policy))
    footprint.add_mask("policy.mask.words", user->mask, false);
  footprint.add_bytes("report", report.data(), static_cast<int64_t>(report.size_bytes()),
                      alignof(HeadReport), true);
}

void check_lse(const char* name, size_t size, const ConstTensor& tensor, bool may_be_empty) {
  const auto expected = static_cast<size_t>(tensor.num_heads * tensor.num_tokens);
  CRISP_CHECK((may_be_empty && size == 0) || size == expected, name, " has ", size,
              " entries, must ", may_be_empty ? "be empty or " : "",
              "have num_heads x num_tokens, ", "which is ", expected);
}

void check_like(const char* name, const ConstTensor& tensor, const char* other_name,
                const ConstTensor& other) {
  CRISP_CHECK(tensor.num_tokens == other.num_tokens && tensor.num_heads == other.num_heads &&
                  tensor.head_dim == other.head_dim,
              name, " is [", tensor.num_tokens, ", ", tensor.num_heads, ", ", tensor.head_dim,
              "], must have the shape of ", other_name, ", which is [", other.num_tokens, ", ",
              other.num_heads, ", ", other.head_dim, "]");
}

void add_out(Footprint& footprint, const Attention& attention, const Tensor& out,
             std::span<float> lse) {
  const ConstTensor written = as_const(out);
  check_tensor("out", written);
  CRISP_CHECK(out.dtype == attention.q.dtype, "out.dtype is ", name(out.dtype),
              ", must equal q.dtype, which is ", name(attention.q.dtype));
  check_like("out", written, "q", attention.q);
  check_rows_apart("out", written);
  check_lse("lse", lse.size(), written, true);
  footprint.add_tensor("out.data", written, true);
  footprint.add_bytes("lse", lse.data(), static_cast<int64_t>(lse.size_bytes()), alignof(float),
                      true);
}

void run(const Attention& attention, const Policy& policy, const BlockMask& mask,
         const Context& context, std::span<HeadReport> report) {
  std::visit([&](const auto& chosen) { run_policy(attention, chosen, mask, context, report); },
             policy);
}

// Merging into a's own arrays is the one overlap that is allowed: same dtype, same rows.
bool is_in_place(const Tensor& out, const ConstTensor& a) {
  return out.data == a.data && out.dtype == a.dtype && out.token_stride == a.token_stride &&
         out.head_stride == a.head_stride;
}

}  // namespace

const char* version() noexcept { return CRISP_VERSION; }
const char* cpu_target() noexcept { return attend_target(); }

BlockMask mask_for(const Attention& attention, int64_t block_size) {
  check_block_size(block_size);
  check_attention(attention);
  BlockMask mask{nullptr, attention.q.num_heads, 0, 0, block_size};
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const SegmentShape shape = segment_shape(segment_at(attention, index), block_size);
    mask.num_q_blocks += shape.num_q_blocks;
    mask.num_kv_blocks = std::max(mask.num_kv_blocks, shape.num_kv_blocks);
  }
  // words_per_row <= 2^20 and num_heads <= 2^16, so the bound on rows keeps bytes() in int64_t.
  CRISP_CHECK(mask.num_q_blocks <= kMaxMaskRows, "the segments have ", mask.num_q_blocks,
              " q_blocks, must be at most ", kMaxMaskRows, " per call");
  return mask;
}

int64_t num_causal_blocks(const Attention& attention, int64_t block_size) {
  check_block_size(block_size);
  check_attention(attention);
  int64_t total = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const SegmentShape shape = segment_shape(segment_at(attention, index), block_size);
    const int64_t rows = shape.num_q_blocks;
    if (shape.num_kv_blocks == 0) continue;
    // Causal: row r sees first_q_block + r + 1 blocks, and the last row sees them all.
    total += attention.causal ? rows * shape.first_q_block + rows * (rows + 1) / 2
                              : rows * shape.num_kv_blocks;
  }
  return total;
}

size_t workspace_bytes(const Attention& attention, const Policy& policy, const BlockMask& mask,
                       const Context& context) {
  check_shapes(attention, policy, mask, context);
  return std::max(select_bytes(attention, policy, context),
                  attend_workspace_bytes(attention, mask.block_size, context));
}

const char* why_unsupported(const Attention& attention, const Policy& policy, const BlockMask& mask,
                            const Context& context) noexcept {
  thread_local char reason[512];
  try {
    check_shapes(attention, policy, mask, context);
    return nullptr;
  } catch (const std::exception& error) {
    std::snprintf(reason, sizeof(reason), "%s", error.what());
    return reason;
  }
}

void select_blocks(const Attention& attention, const Policy& policy, const BlockMask& mask,
                   const Context& context, std::span<HeadReport> report) {
  check_shapes(attention, policy, mask, context);
  Footprint footprint(context.device);
  footprint.add_attention(attention, false);
  add_select(footprint, attention, policy, mask, report);
  footprint.add_workspace(context.workspace, select_bytes(attention, policy, context));
  footprint.check();
  run_on_device(context, footprint, [&] { run(attention, policy, mask, context, report); });
}

void attend(const Attention& attention, const BlockMask& mask, const Tensor& out,
            std::span<float> lse, const Context& context) {
  check_shapes(attention, Dense{}, mask, context);
  Footprint footprint(context.device);
  footprint.add_attention(attention, true);
  footprint.add_mask("mask.words", mask, false);
  add_out(footprint, attention, out, lse);
  footprint.add_workspace(context.workspace,
                          attend_workspace_bytes(attention, mask.block_size, context));
  footprint.check();
  run_on_device(context, footprint,
                [&] { attend_blocks(attention, mask, out, lse.data(), context); });
}

void prefill(const Attention& attention, const Policy& policy, const BlockMask& mask,
             const Tensor& out, std::span<float> lse, const Context& context,
             std::span<HeadReport> report) {
  const size_t needed = workspace_bytes(attention, policy, mask, context);
  Footprint footprint(context.device);
  footprint.add_attention(attention, true);
  add_select(footprint, attention, policy, mask, report);
  add_out(footprint, attention, out, lse);
  footprint.add_workspace(context.workspace, needed);
  footprint.check();
  run_on_device(context, footprint, [&] {
    run(attention, policy, mask, context, report);
    attend_blocks(attention, mask, out, lse.data(), context);
  });
}

void merge_states(const ConstTensor& out_a, std::span<const float> lse_a, const ConstTensor& out_b,
                  std::span<const float> lse_b, const Tensor& out, std::span<float> lse,
                  const Context& context) {
  const ConstTensor written = as_const(out);
  check_context(context);
  check_tensor("out_a", out_a);
  check_tensor("out_b", out_b);
  check_tensor("out", written);
  check_like("out_b", out_b, "out_a", out_a);
  check_like("out", written, "out_a", out_a);
  check_rows_apart("out", written);
  check_lse("lse_a", lse_a.size(), out_a, false);
  check_lse("lse_b", lse_b.size(), out_a, false);
  check_lse("lse", lse.size(), out_a, true);
  Footprint footprint(context.device);
  footprint.add_tensor("out.data", written, true);
  footprint.add_bytes("lse", lse.data(), static_cast<int64_t>(lse.size_bytes()), 4, true);
  if (!is_in_place(out, out_a)) footprint.add_tensor("out_a.data", out_a, false);
  if (lse.data() != lse_a.data())
    footprint.add_bytes("lse_a", lse_a.data(), static_cast<int64_t>(lse_a.size_bytes()), 4, false);
  footprint.add_tensor("out_b.data", out_b, false);
  footprint.add_bytes("lse_b", lse_b.data(), static_cast<int64_t>(lse_b.size_bytes()), 4, false);
  footprint.check();
  run_on_device(context, footprint, [&] {
    merge_attention_states(out_a, lse_a.data(), out_b, lse_b.data(), out,
                           lse.empty() ? nullptr : lse.data(), context);
  });
}

}  // namespace crisp
