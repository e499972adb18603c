// user_mask.cc - the caller's own mask, cut to the blocks that attend would visit.
#include "core/head_batch.h"
#include "core/run.h"
#include "mask/mask.h"
#include "policy/policy.h"

namespace crisp {

size_t select_workspace_bytes(const Attention&, const UserMask&, const Context&) { return 0; }

void run_policy(const Attention& attention, const UserMask& policy, const BlockMask& mask,
                const Context& context, std::span<HeadReport> report) {
  Workspace workspace(context.workspace);
  const Run run{context, workspace};
  for_each_head_batch(attention, mask.block_size, all_heads, [&](const HeadBatch& batch) {
    copy_mask(batch, policy.mask, mask, batch.rows_of(report), run);
  });
}

}  // namespace crisp
