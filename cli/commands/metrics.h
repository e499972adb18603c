// metrics.h - how far a run is from the dense run on the same input.
#pragma once

#include <cstdint>
#include <vector>

#include "commands/engine.h"

namespace crisp::cli {

// Of one query head.
struct HeadMetrics {
  double density = 0;         // kept / causal blocks
  double coverage = 0;        // NaN without a dense run
  double relative_error = 0;  // NaN without a dense run
};

// coverage = mean over rows of exp(lse - lse_dense), the true attention mass in the kept blocks;
// relative_error = |out - out_dense|_F / |out_dense|_F, both as stored in the run's dtype.
// `dense` may be null.
std::vector<HeadMetrics> measure(const Attention& attention, const Run& run, const Run* dense);

// Query heads per pattern and sums over the heads of all segments.
struct Summary {
  int64_t vertical_slash = 0, pooled = 0, dense = 0, user_mask = 0;  // (segment, head) pairs
  double density = 0, coverage = 0, coverage_worst = 0;
  double relative_error = 0, relative_error_worst = 0;  // mean and worst over heads
};
Summary summarise(const Run& run, const std::vector<HeadMetrics>& heads);

// One report per query head over all segments: counts are summed; the pattern and the statistics
// are those of the only segment, or, with several, the pattern they share and NaN.
struct HeadSummary {
  bool mixed = false;  // segments differ in pattern
  HeadReport report;
};
HeadSummary head_summary(const Run& run, int64_t num_heads, int64_t head);

}  // namespace crisp::cli
