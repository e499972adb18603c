// batched.h - what the policies that select by proxy map share: the loop over batches of heads, so
// that scratch stays bounded, once to count the workspace and once to do the work.
#pragma once

#include <cstdint>
#include <span>

#include "core/head_batch.h"
#include "core/run.h"
#include "mask/mask.h"
#include "proxy/proxy.h"

namespace crisp {

inline int64_t blocks_of(int32_t tokens) { return ceil_div(tokens, kBlockSize); }

// A policy's rule: selects for the heads of one batch. With a counting workspace only the memory is
// taken.
template <class Rules>
using SelectBatch = void(const HeadBatch&, const Rules&, const BlockMask&, HeadReport*, Run&);

template <class Rules>
void select_in_batches(const Attention& attention, const Rules& policy,
                       SelectBatch<Rules>* select_batch, const BlockMask& mask,
                       std::span<HeadReport> report, Run& run) {
  const auto heads_per_batch = [&](const Attention& all, const SegmentShape& segment) {
    return proxy_heads_per_batch(all, segment, run.context.device);
  };
  for_each_head_batch(attention, kBlockSize, heads_per_batch, [&](const HeadBatch& batch) {
    // The short-context gate, and segments that have nothing to select.
    const SegmentShape& segment = batch.segment;
    if (segment.kv_len < policy.dense_below_tokens || segment.kv_len == 0 || segment.q_len == 0) {
      return fill_dense(batch, mask, batch.rows_of(report), run);
    }
    const size_t mark = run.workspace.mark();
    select_batch(batch, policy, mask, batch.rows_of(report), run);
    run.workspace.rewind(mark);
  });
}

template <class Rules>
size_t batched_workspace_bytes(const Attention& attention, const Rules& policy,
                               SelectBatch<Rules>* select_batch, const Context& context) {
  Workspace counting = Workspace::counting();
  Run run{context, counting};
  select_in_batches(attention, policy, select_batch, {}, {}, run);
  return counting.peak_bytes();
}

template <class Rules>
void run_in_batches(const Attention& attention, const Rules& policy,
                    SelectBatch<Rules>* select_batch, const BlockMask& mask, const Context& context,
                    std::span<HeadReport> report) {
  Workspace workspace(context.workspace);
  Run run{context, workspace};
  select_in_batches(attention, policy, select_batch, mask, report, run);
}

}  // namespace crisp
