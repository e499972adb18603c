#include "commands/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.h"
#include "core/problem.h"

namespace crisp::cli {

namespace {

reference::Matrix matrix_of(const HeadRows& rows, int64_t num_tokens) {
  reference::Matrix matrix(num_tokens, rows.head_dim);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const std::byte* row = row_address(rows, token);
    for (int64_t dim = 0; dim < rows.head_dim; ++dim) {
      matrix(token, dim) = static_cast<double>(load_float(row, rows.dtype, dim));
    }
  }
  return matrix;
}

void set_row_bits(const reference::BlockSet& blocks, int64_t row, uint32_t* words) {
  for (int64_t col = 0; col < blocks.cols; ++col) {
    if (blocks.at(row, col)) words[col / 32] |= uint32_t{1} << (col % 32);
  }
}

uint32_t* row_words(const BlockMask& mask, int64_t head, int64_t row) {
  return mask.words + (head * mask.num_q_blocks + row) * mask.words_per_row();
}

HeadReport report_of(const reference::Selection& selection, const Policy& policy) {
  HeadReport report;
  report.pattern = std::holds_alternative<UserMask>(policy)
                       ? Pattern::kUserMask
                       : static_cast<Pattern>(selection.pattern);
  report.structural_mass = static_cast<float>(selection.structural_mass);
  report.js_distance = static_cast<float>(selection.js_distance);
  report.num_vertical = static_cast<int32_t>(selection.num_vertical());
  report.num_slash = static_cast<int32_t>(selection.num_slash());
  report.num_blocks = selection.blocks.count();
  return report;
}
static_assert(static_cast<int>(reference::Pattern::kPooled) == static_cast<int>(Pattern::kPooled));

}  // namespace

reference::Head reference_head(const Attention& attention, const Segment& segment, int64_t q_head,
                               bool with_v) {
  const SegmentShape shape = segment_shape(segment, kBlockSize);
  const int64_t kv_head = q_head / group_size(attention);
  reference::Head head;
  head.q = matrix_of(q_rows(attention, shape, q_head), shape.q_len);
  head.k = matrix_of(k_rows(attention, shape, kv_head), shape.kv_len);
  head.v = with_v ? matrix_of(v_rows(attention, shape, kv_head), shape.kv_len)
                  : reference::Matrix(shape.kv_len, 0);
  head.softmax_scale = static_cast<double>(attention.softmax_scale);
  head.causal = attention.causal;
  return head;
}

reference::CrispOptions reference_options(const Crisp& policy) {
  reference::CrispOptions options;
  options.tau_proxy = static_cast<double>(policy.tau_proxy);
  options.alpha = static_cast<double>(policy.alpha);
  options.gamma = static_cast<double>(policy.gamma);
  options.sink_tokens = policy.sink_tokens;
  options.recency_tokens = policy.recency_tokens;
  options.min_budget_tokens = policy.min_budget_tokens;
  options.dense_below_tokens = policy.dense_below_tokens;
  options.noise_floor = static_cast<reference::NoiseFloor>(policy.noise_floor);
  options.pooled_keeps_budget = policy.pooled_keeps_budget;
  options.routing = static_cast<reference::Routing>(policy.routing);
  options.selection = static_cast<reference::SelectionRule>(policy.selection);
  options.tau_js = static_cast<double>(policy.tau_js);
  return options;
}

reference::FlexPrefillOptions reference_options(const FlexPrefill& policy) {
  auto options = policy.variant == FlexPrefill::Variant::kOfficial
                     ? reference::FlexPrefillOptions::official()
                     : reference::FlexPrefillOptions::paper();
  options.tau = static_cast<double>(policy.tau);
  options.gamma = static_cast<double>(policy.gamma);
  options.min_budget_tokens = policy.min_budget_tokens;
  options.dense_below_tokens = policy.dense_below_tokens;
  return options;
}

reference::BlockSet blocks_of(const BlockMask& mask, const reference::Head& head, int64_t q_head,
                              int64_t mask_row) {
  reference::BlockSet blocks = reference::all_blocks(head, mask.block_size);
  for (int64_t row = 0; row < blocks.rows; ++row) {
    const uint32_t* words = row_words(mask, q_head, mask_row + row);
    for (int64_t col = 0; col < blocks.cols; ++col) {
      if ((words[col / 32] >> (col % 32) & 1u) == 0) blocks.at(row, col) = false;
    }
  }
  return blocks;
}

reference::Selection reference_select(const reference::Head& head, const Policy& policy,
                                      int64_t q_head, int64_t mask_row) {
  if (const auto* crisp = std::get_if<Crisp>(&policy)) {
    return reference::select_crisp(head, reference_options(*crisp));
  }
  if (const auto* flex = std::get_if<FlexPrefill>(&policy)) {
    return reference::select_flex_prefill(head, reference_options(*flex));
  }
  reference::Selection selection = reference::select_dense(head);
  if (const auto* user = std::get_if<UserMask>(&policy)) {
    selection.blocks = blocks_of(user->mask, head, q_head, mask_row);
  }
  return selection;
}

void execute_reference(const Attention& attention, Run& run,
                       const std::function<void(int64_t, int64_t)>& progress) {
  std::memset(run.mask_words.data(), 0, run.mask_words.bytes().size());
  run.ms.fill(std::numeric_limits<double>::quiet_NaN());
  const int64_t num_heads = attention.q.num_heads;
  int64_t mask_row = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const Segment segment = segment_at(attention, index);
    int64_t rows = 0;
    for (int64_t head = 0; head < num_heads; ++head) {
      progress(head, index);
      const reference::Head one = reference_head(attention, segment, head);
      const reference::Selection selection = reference_select(one, run.policy, head, mask_row);
      rows = selection.blocks.rows;
      for (int64_t row = 0; row < rows; ++row) {
        set_row_bits(selection.blocks, row, row_words(run.mask, head, mask_row + row));
      }
      const reference::AttendResult result = reference::attend(one, selection.blocks);
      run.report[static_cast<size_t>(index * num_heads + head)] = report_of(selection, run.policy);
      for (int64_t i = 0; i < segment.q_len; ++i) {
        const int64_t token = segment.q_start + i;
        run.lse[static_cast<size_t>(head * attention.q.num_tokens + token)] =
            static_cast<float>(result.lse[static_cast<size_t>(i)]);
        for (int64_t dim = 0; dim < attention.q.head_dim; ++dim) {
          store_float(run.out.data, run.out.dtype,
                      head * run.out.head_stride + token * run.out.token_stride + dim,
                      static_cast<float>(result.out(i, dim)));
        }
      }
    }
    mask_row += rows;
  }
}

}  // namespace crisp::cli
