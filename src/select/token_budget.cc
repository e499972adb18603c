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

// `shares_slash`: the map's own masses are the left-aligned ones as well.
TokenBudget take_budget(const HeadBatch& batch, const ProxyMap& map, bool shares_slash,
                        Workspace& workspace) {
  TokenBudget budget;
  budget.num_vertical = workspace.take<int64_t>(batch.num_heads);
  budget.num_slash = workspace.take<int64_t>(batch.num_heads);
  budget.left_aligned_slash =
      shares_slash ? map.slash : workspace.take<float>(batch.num_heads * map.num_blocks);
  return budget;
}

#ifdef CRISP_WITH_CUDA
// Masses that CUDA holds at a time, of at least one head: 32 heads of 4096 blocks.
constexpr int64_t kCudaBytes = int64_t{192} << 20;
constexpr int64_t kCudaHeads = 32768;  // of one launch: they lie on the short axis of its grid

TokenBudget count_on_cuda(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                          float gamma, int64_t min_blocks, Run& run) {
  const TokenBudget budget = take_budget(batch, map, false, run.workspace);
  const int64_t columns = map.num_blocks * kBlockSize;
  const int64_t diagonals = map.num_blocks * TokenCudaScratch::kDiagonals;
  const int64_t fitting = kCudaBytes / std::max<int64_t>(4 * (columns + diagonals), 1);
  const size_t mark = run.workspace.mark();
  TokenCudaScratch scratch;
  scratch.num_heads = std::clamp<int64_t>(fitting, 1, std::min(batch.num_heads, kCudaHeads));
  scratch.columns = run.workspace.take<float>(scratch.num_heads * columns);
  scratch.diagonals = run.workspace.take<float>(scratch.num_heads * diagonals);
  if (!run.is_counting()) {
    const ProxyRows rows = proxy_rows(batch.segment);
    token_budget_cuda({batch, map, routes, gamma, min_blocks, rows, budget, {}, 1, scratch},
                      run.context.stream);
    run.finished(Stage::kSelect);
  }
  run.workspace.rewind(mark);
  return budget;
}
#endif

}  // namespace

TokenBudget count_token_budget(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                               float gamma, int64_t min_blocks, Run& run) {
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) return count_on_cuda(batch, map, routes, gamma, min_blocks, run);
#endif
  run.require_cpu();
  const int64_t kv_len = batch.segment.kv_len, head_dim = batch.attention->q.head_dim;
  const ProxyRows rows = proxy_rows(batch.segment);
  const TokenBudget budget = take_budget(batch, map, kv_len % kBlockSize == 0, run.workspace);

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
