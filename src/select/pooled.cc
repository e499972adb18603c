#include "select/pooled.h"

#include <algorithm>

namespace crisp {
namespace {

// Workers share this much scratch; the longest segments leave room for one only.
constexpr int64_t kScratchBytes = int64_t{8} << 20;

#ifdef CRISP_WITH_CUDA
// Maps that CUDA holds at a time, at least one: six heads of 4096 x 4096 blocks.
constexpr int64_t kMapBytes = int64_t{200} << 20;

void select_on_cuda(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                    const PooledRule& rule, const BlockMask& mask, Run& run) {
  const SegmentShape& segment = batch.segment;
  const int64_t map_floats = PooledCudaScratch::floats_of_map(segment);
  const int64_t fitting = kMapBytes / std::max<int64_t>(4 * map_floats, 1);
  const size_t mark = run.workspace.mark();
  PooledCudaScratch scratch;
  scratch.num_heads = std::clamp<int64_t>(fitting, 1, batch.num_heads);
  const int64_t num_rows = scratch.num_heads * segment.num_q_blocks;
  scratch.queries = run.workspace.take<float>(num_rows * batch.attention->q.head_dim);
  scratch.maps = run.workspace.take<float>(scratch.num_heads * map_floats);
  scratch.prefixes = run.workspace.take<PooledPrefix>(scratch.num_heads);
  scratch.bins = run.workspace.take<uint64_t>(scratch.num_heads * PooledCudaScratch::kDigits * 2 *
                                              PooledScratch::kMaxBins);
  scratch.row_equals = run.workspace.take<int32_t>(num_rows);
  if (!run.is_counting()) {
    pooled_cuda({batch, map, routes, rule, mask, {}, 1, scratch}, run.context.stream);
    run.finished(Stage::kSelect);
  }
  run.workspace.rewind(mark);
}
#endif

}  // namespace

void select_pooled(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                   const PooledRule& rule, const BlockMask& mask, Run& run) {
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) return select_on_cuda(batch, map, routes, rule, mask, run);
#endif
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
