// select_cpu.cc - one task per head; thresholds in double, in the order of the paper's sums, so
// that equal masses give equal sets everywhere.
#include <algorithm>
#include <numeric>

#include "core/parallel.h"
#include "select/select.h"

namespace crisp {
namespace {

// One direction of one head, blocks in the order of its index (key block, or Delta).
struct Direction {
  const float* mass;
  int64_t num_blocks;
  int64_t num_forced;      // blocks [0, num_forced) are kept
  int64_t background_end;  // the floor is taken over [num_forced, background_end)
  uint32_t* bits;          // block b is bit b, or num_blocks - 1 - b if reversed
  bool is_reversed;
  int32_t* order;  // scratch, [num_blocks]
  float* masses;   // scratch, [num_blocks]

  void keep(int64_t block) const {
    const int64_t bit = is_reversed ? num_blocks - 1 - block : block;
    bits[bit / 32] |= uint32_t{1} << (bit % 32);
  }
  bool has(int64_t block) const {
    const int64_t bit = is_reversed ? num_blocks - 1 - block : block;
    return (bits[bit / 32] >> (bit % 32) & 1) != 0;
  }
  // Heavier first; equal masses: lower index first.
  bool is_before(int32_t a, int32_t b) const {
    return mass[a] > mass[b] || (mass[a] == mass[b] && a < b);
  }
};

double noise_floor(const Direction& d, NoiseFloor kind) {
  const int64_t count = d.background_end - d.num_forced;
  if (count <= 0) return 0;
  if (kind == NoiseFloor::kMean) {
    double sum = 0;
    for (int64_t b = d.num_forced; b < d.background_end; ++b) sum += d.mass[b];
    return sum / static_cast<double>(count);
  }
  std::copy(d.mass + d.num_forced, d.mass + d.background_end, d.masses);
  float* middle = d.masses + count / 2;
  std::nth_element(d.masses, middle, d.masses + count);
  if (count % 2 == 1) return *middle;
  return (double{*std::max_element(d.masses, middle)} + *middle) / 2;
}

void keep_above_noise_floor(const Direction& d, float alpha, NoiseFloor kind) {
  const double floor = noise_floor(d, kind);
  if (floor == 0) return;  // nothing is there: the literal rule would keep every mass above 0
  for (int64_t b = 0; b < d.num_blocks; ++b) {
    if (d.mass[b] > double{alpha} * floor) d.keep(b);
  }
}

void keep_coverage(const Direction& d, float gamma) {
  int32_t* end = d.order + d.num_blocks;
  std::iota(d.order, end, 0);
  std::sort(d.order, end, [&](int32_t a, int32_t b) { return d.is_before(a, b); });
  double total = 0, covered = 0;
  for (const int32_t* b = d.order; b != end; ++b) total += d.mass[*b];
  for (const int32_t* b = d.order; b != end; ++b) {
    d.keep(*b);
    covered += d.mass[*b];
    if (covered >= double{gamma} * total) break;
  }
}

void keep_forced(const Direction& d) {
  for (int64_t b = 0; b < d.num_forced; ++b) d.keep(b);
}

// Adds the heaviest remaining blocks until min(min_blocks, num_blocks) are kept.
void top_up(const Direction& d, int64_t min_blocks) {
  int64_t num_rest = 0;
  for (int64_t b = 0; b < d.num_blocks; ++b) {
    if (!d.has(b)) d.order[num_rest++] = static_cast<int32_t>(b);
  }
  const int64_t missing = std::min(min_blocks, d.num_blocks) - (d.num_blocks - num_rest);
  if (missing <= 0) return;
  if (missing < num_rest) {
    std::nth_element(d.order, d.order + missing, d.order + num_rest,
                     [&](int32_t a, int32_t b) { return d.is_before(a, b); });
  }
  for (int64_t i = 0; i < missing; ++i) d.keep(d.order[i]);
}

void select_direction(const SelectJob& job, int64_t head, const Direction& d, int64_t budget) {
  keep_forced(d);
  if (job.routes.pattern[head] == Pattern::kPooled) {
    if (job.forced.pooled_keeps_budget) top_up(d, job.forced.min_blocks);
    return;
  }
  if (job.rule == Rule::kNoiseFloor) keep_above_noise_floor(d, job.alpha, job.noise_floor);
  if (job.rule == Rule::kCoverage) keep_coverage(d, job.gamma);
  top_up(d, budget);
}

void select_head(const SelectJob& job, int worker, int64_t head) {
  const Kept& kept = job.kept;
  const int64_t num_blocks = kept.num_blocks;
  uint32_t* vertical = kept.vertical + head * kept.words();
  uint32_t* slash = kept.slash + head * kept.words();
  std::fill_n(vertical, kept.words(), 0u);
  std::fill_n(slash, kept.words(), 0u);
  if (job.routes.pattern[head] == Pattern::kDense) return;

  const int64_t sink = std::min(job.forced.sink_blocks, num_blocks);
  const int64_t recency = std::min(job.forced.recency_blocks, num_blocks);
  const bool by_tokens = job.rule == Rule::kTokenBudget;
  const float* slash_mass = by_tokens ? job.budget.left_aligned_slash : job.map.slash;
  int32_t* order = job.order + worker * num_blocks;
  float* masses = job.masses + worker * num_blocks;
  select_direction(job, head,
                   {job.map.vertical + head * num_blocks, num_blocks, sink, num_blocks - recency,
                    vertical, false, order, masses},
                   by_tokens ? job.budget.num_vertical[head] : job.forced.min_blocks);
  select_direction(job, head,
                   {slash_mass + head * num_blocks, num_blocks, recency, num_blocks - sink, slash,
                    true, order, masses},
                   by_tokens ? job.budget.num_slash[head] : job.forced.min_blocks);
}

}  // namespace

void select_cpu(const SelectJob& job) {
  parallel_for(job.num_threads, job.batch.num_heads,
               [&](int worker, int64_t head) { select_head(job, worker, head); });
}

}  // namespace crisp
