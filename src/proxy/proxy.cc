#include "proxy/proxy.h"

namespace crisp {
namespace {

// Most of it is the partial sums: 1.5 KiB per head and kv_block. A batch takes at least one head.
// On a GPU 32 heads of 512k tokens go together, so that one launch fills the card.
constexpr int64_t kCpuBatchBytes = int64_t{12} << 20, kCudaBatchBytes = int64_t{224} << 20;

ProxyMap take_map(const HeadBatch& batch, const ProxyOptions& options, Workspace& workspace) {
  ProxyMap map;
  map.num_blocks = batch.segment.num_kv_blocks;
  map.vertical = workspace.take<float>(batch.num_heads * map.num_blocks);
  map.slash = workspace.take<float>(batch.num_heads * map.num_blocks);
  map.structural_mass = workspace.take<float>(batch.num_heads);
  if (options.pooled_estimate) {
    map.pooled_estimate = workspace.take<float>(batch.num_heads * map.num_blocks);
  }
  map.row_lse = workspace.take<float>(batch.num_heads * proxy_rows(batch.segment).num_slots);
  map.key_means =
      workspace.take<float>(batch.num_kv_heads() * map.num_blocks * batch.attention->q.head_dim);
  return map;
}

ProxyScratch take_scratch(const HeadBatch& batch, int num_workers, Workspace& workspace) {
  const int64_t num_slots = proxy_rows(batch.segment).num_slots;
  const int64_t num_blocks = batch.segment.num_kv_blocks;
  const int64_t head_dim = batch.attention->q.head_dim;
  ProxyScratch scratch;
  scratch.partials =
      workspace.take<float>(batch.num_heads * num_blocks * ProxyScratch::kNumParts * num_slots);
  scratch.edges = workspace.take<float>(batch.num_heads * 2 * num_slots);
  scratch.queries = workspace.take<float>(batch.num_heads * num_slots * head_dim);
  scratch.mean_queries = workspace.take<float>(batch.num_heads * head_dim);
  scratch.block_sums = workspace.take<double>(batch.num_heads * num_blocks);
  scratch.keys = workspace.take<float>(num_workers * kBlockSize * head_dim);
  scratch.scores = workspace.take<float>(num_workers * kBlockSize * ProxyRows::kSlotAlignment);
  return scratch;
}

}  // namespace

int64_t proxy_heads_per_batch(const Attention& attention, const SegmentShape& segment,
                              Device device) {
  const int64_t num_slots = proxy_rows(segment).num_slots, head_dim = attention.q.head_dim;
  const int64_t floats_per_block = ProxyScratch::kNumParts * num_slots + 5 + head_dim;
  const int64_t floats = segment.num_kv_blocks * floats_per_block + num_slots * head_dim;
  return (device == Device::kCuda ? kCudaBatchBytes : kCpuBatchBytes) /
         std::max<int64_t>(4 * floats, 1);
}

ProxyMap compute_proxy_map(const HeadBatch& batch, const ProxyOptions& options, Run& run) {
  const ProxyMap map = take_map(batch, options, run.workspace);
  const size_t mark = run.workspace.mark();
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) {
    proxy_map_cuda(batch, options, map, run);
    if (!run.is_counting()) run.finished(Stage::kProxy);
    run.workspace.rewind(mark);
    return map;
  }
#endif
  run.require_cpu();
  const int num_threads = run.num_threads();
  const ProxyScratch scratch = take_scratch(batch, num_threads, run.workspace);
  if (!run.is_counting()) {
    CRISP_ASSERT(batch.segment.q_len >= 1 && batch.segment.kv_len >= batch.segment.q_len);
    proxy_map_cpu({batch, options, proxy_rows(batch.segment), map, scratch, num_threads});
    run.finished(Stage::kProxy);
  }
  run.workspace.rewind(mark);
  return map;
}

}  // namespace crisp
