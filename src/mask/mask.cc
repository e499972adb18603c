#include "mask/mask.h"

#include <algorithm>

#include "core/device.h"

namespace crisp {
namespace {

// Small masks are written before a second thread would have started.
int threads_for(const HeadBatch& batch, const BlockMask& mask, const Run& run) {
  constexpr int64_t kWordsPerThread = int64_t{1} << 15;
  const int64_t words = batch.num_heads * batch.segment.num_q_blocks * mask.words_per_row();
  return static_cast<int>(std::clamp<int64_t>(words / kWordsPerThread, 1, run.num_threads()));
}

}  // namespace

void fill_mask(const HeadBatch& batch, const ProxyMap& map, const Routes& routes, const Kept& kept,
               const BlockMask& mask, HeadReport* report, const Run& run) {
  if (run.is_counting()) return;
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) {
    fill_mask_cuda({batch, mask, report, 0}, map, routes, kept, run.context.stream);
    run.finished(Stage::kMask);
    return;
  }
#endif
  run.require_cpu();
  fill_mask_cpu({batch, mask, report, threads_for(batch, mask, run)}, map, routes, kept);
  run.finished(Stage::kMask);
}

void fill_dense(const HeadBatch& batch, const BlockMask& mask, HeadReport* report, const Run& run) {
  if (run.is_counting()) return;
  const MaskJob job{batch, mask, report, threads_for(batch, mask, run)};
  if (run.context.device == Device::kCpu) fill_dense_cpu(job);
  if constexpr (kWithCuda) {
    if (run.context.device == Device::kCuda) fill_dense_cuda(job, run.context.stream);
  }
  run.finished(Stage::kMask);
}

void copy_mask(const HeadBatch& batch, const BlockMask& source, const BlockMask& mask,
               HeadReport* report, const Run& run) {
  if (run.is_counting()) return;
  const MaskJob job{batch, mask, report, threads_for(batch, mask, run)};
  if (run.context.device == Device::kCpu) copy_mask_cpu(job, source);
  if constexpr (kWithCuda) {
    if (run.context.device == Device::kCuda) copy_mask_cuda(job, source, run.context.stream);
  }
  run.finished(Stage::kMask);
}

}  // namespace crisp
