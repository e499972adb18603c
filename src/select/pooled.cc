#include "select/pooled.h"

#include <algorithm>

namespace crisp {
namespace {

// Workers share this much scratch; the longest segments leave room for one only.
constexpr int64_t kScratchBytes = int64_t{8} << 20;

}  // namespace

void select_pooled(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                   const PooledRule& rule, const BlockMask& mask, Run& run) {
  run.require_cpu();
  constexpr int64_t align = ProxyRows::kSlotAlignment;
  const int64_t head_dim = batch.attention->q.head_dim;
  PooledScratch scratch;
  scratch.num_slots = ceil_div(batch.segment.num_q_blocks, align) * align;
  const int64_t query_floats = scratch.num_slots * head_dim, row_floats = kBlockSize * head_dim;
  const int64_t mass_floats = batch.segment.num_kv_blocks * align;
  const int64_t bytes_per_worker =
      4 * (query_floats + row_floats + mass_floats) + 16 * PooledScratch::kMaxBins;
  const int64_t fitting = std::max<int64_t>(kScratchBytes / bytes_per_worker, 1);
  const auto workers = static_cast<int>(std::min<int64_t>(run.num_threads(), fitting));

  const size_t mark = run.workspace.mark();
  scratch.queries = run.workspace.take<float>(workers * query_floats);
  scratch.rows = run.workspace.take<float>(workers * row_floats);
  scratch.masses = run.workspace.take<float>(workers * mass_floats);
  scratch.sums = run.workspace.take<double>(workers * PooledScratch::kMaxBins);
  scratch.counts = run.workspace.take<int64_t>(workers * PooledScratch::kMaxBins);
  if (!run.is_counting()) {
    pooled_cpu({batch, map, routes, rule, mask, scratch, workers});
    run.finished(Stage::kSelect);
  }
  run.workspace.rewind(mark);
}

}  // namespace crisp
