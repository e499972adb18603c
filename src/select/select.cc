#include "select/select.h"

namespace crisp {
namespace {

Kept run_rule(SelectJob job, Run& run) {
  const int64_t num_blocks = job.batch.segment.num_kv_blocks;
  job.kept.num_blocks = num_blocks;
  job.kept.vertical = run.workspace.take<uint32_t>(job.batch.num_heads * job.kept.words());
  job.kept.slash = run.workspace.take<uint32_t>(job.batch.num_heads * job.kept.words());
#ifdef CRISP_WITH_CUDA
  if (run.is_cuda()) {
    if (run.is_counting()) return job.kept;
    select_cuda(job, run.context.stream);
    run.finished(Stage::kSelect);
    return job.kept;
  }
#endif
  run.require_cpu();
  const size_t mark = run.workspace.mark();
  job.num_threads = run.num_threads();
  job.order = run.workspace.take<int32_t>(job.num_threads * num_blocks);
  job.masses = run.workspace.take<float>(job.num_threads * num_blocks);
  if (!run.is_counting()) {
    select_cpu(job);
    run.finished(Stage::kSelect);
  }
  run.workspace.rewind(mark);
  return job.kept;
}

}  // namespace

Kept select_above_noise_floor(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                              const Forced& forced, float alpha, NoiseFloor noise_floor, Run& run) {
  SelectJob job{batch, map, routes, forced};
  job.rule = Rule::kNoiseFloor;
  job.alpha = alpha;
  job.noise_floor = noise_floor;
  return run_rule(job, run);
}

Kept select_coverage(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                     const Forced& forced, float gamma, Run& run) {
  SelectJob job{batch, map, routes, forced};
  job.rule = Rule::kCoverage;
  job.gamma = gamma;
  return run_rule(job, run);
}

Kept select_token_budget(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                         const TokenBudget& budget, const Forced& forced, Run& run) {
  SelectJob job{batch, map, routes, forced};
  job.rule = Rule::kTokenBudget;
  job.budget = budget;
  return run_rule(job, run);
}

}  // namespace crisp
