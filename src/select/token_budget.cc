#include "select/token_budget.h"

#include <algorithm>

namespace crisp {
namespace {

// Workers share this much scratch; the longest segments leave room for one only.
constexpr int64_t kScratchBytes = int64_t{8} << 20;

int workers_within_budget(int num_threads, int64_t floats_per_worker) {
  const int64_t fitting = std::max<int64_t>(kScratchBytes / (4 * floats_per_worker), 1);
  return static_cast<int>(std::min<int64_t>(num_threads, fitting));
}

}  // namespace

TokenBudget count_token_budget(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                               float gamma, int64_t min_blocks, Run& run) {
  run.require_cpu();
  const int64_t kv_len = batch.segment.kv_len, head_dim = batch.attention->q.head_dim;
  const ProxyRows rows = proxy_rows(batch.segment);
  TokenBudget budget;
  budget.num_vertical = run.workspace.take<int64_t>(batch.num_heads);
  budget.num_slash = run.workspace.take<int64_t>(batch.num_heads);
  budget.left_aligned_slash = kv_len % kBlockSize == 0
                                  ? map.slash
                                  : run.workspace.take<float>(batch.num_heads * map.num_blocks);

  const size_t mark = run.workspace.mark();
  constexpr int64_t panel_floats = kBlockSize * ProxyRows::kSlotAlignment;
  const int64_t slash_floats = kv_len + 2 * TokenScratch::kMargin;
  const int workers = workers_within_budget(
      run.num_threads(),
      kv_len + slash_floats + (rows.num_slots + kBlockSize) * head_dim + 2 * panel_floats);
  TokenScratch scratch;
  scratch.vertical = run.workspace.take<float>(workers * kv_len);
  scratch.slash = run.workspace.take<float>(workers * slash_floats);
  scratch.queries = run.workspace.take<float>(workers * rows.num_slots * head_dim);
  scratch.keys = run.workspace.take<float>(workers * kBlockSize * head_dim);
  scratch.scores = run.workspace.take<float>(workers * panel_floats);
  scratch.columns = run.workspace.take<float>(workers * panel_floats);
  if (!run.is_counting()) {
    token_budget_cpu({batch, map, routes, gamma, min_blocks, rows, budget, scratch, workers});
    run.finished(Stage::kSelect);
  }
  run.workspace.rewind(mark);
  return budget;
}

}  // namespace crisp
