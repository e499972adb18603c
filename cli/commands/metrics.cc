#include "commands/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/half.h"

namespace crisp::cli {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double coverage_of(const Run& run, const Run& dense, int64_t head, int64_t num_tokens) {
  double sum = 0;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto at = static_cast<size_t>(head * num_tokens + token);
    // A share: rounding of the two lse must not push it above 1.
    sum += std::min(
        1.0, std::exp(static_cast<double>(run.lse[at]) - static_cast<double>(dense.lse[at])));
  }
  return sum / static_cast<double>(num_tokens);
}

double relative_error_of(const Run& run, const Run& dense, int64_t head) {
  const Tensor& out = run.out;
  const int64_t count = out.num_tokens * out.head_dim;
  const int64_t begin = head * count;
  double difference = 0, norm = 0;
  for (int64_t i = begin; i < begin + count; ++i) {
    const auto exact = static_cast<double>(load_float(dense.out.data, out.dtype, i));
    const double delta = static_cast<double>(load_float(out.data, out.dtype, i)) - exact;
    difference += delta * delta;
    norm += exact * exact;
  }
  if (norm == 0) return difference == 0 ? 0.0 : std::numeric_limits<double>::infinity();
  return std::sqrt(difference / norm);
}

}  // namespace

std::vector<HeadMetrics> measure(const Attention& attention, const Run& run, const Run* dense) {
  const int64_t num_heads = attention.q.num_heads;
  const auto causal = static_cast<double>(num_causal_blocks(attention, run.mask.block_size));
  std::vector<HeadMetrics> heads;
  for (int64_t head = 0; head < num_heads; ++head) {
    HeadMetrics metrics{0, kNaN, kNaN};
    metrics.density =
        static_cast<double>(head_summary(run, num_heads, head).report.num_blocks) / causal;
    if (dense != nullptr) {
      metrics.coverage = coverage_of(run, *dense, head, attention.q.num_tokens);
      metrics.relative_error = relative_error_of(run, *dense, head);
    }
    heads.push_back(metrics);
  }
  return heads;
}

Summary summarise(const Run& run, const std::vector<HeadMetrics>& heads) {
  Summary summary;
  for (const HeadReport& report : run.report) {
    summary.vertical_slash += report.pattern == Pattern::kVerticalSlash;
    summary.pooled += report.pattern == Pattern::kPooled;
    summary.dense += report.pattern == Pattern::kDense;
    summary.user_mask += report.pattern == Pattern::kUserMask;
  }
  summary.coverage_worst = heads[0].coverage;
  summary.relative_error_worst = heads[0].relative_error;
  for (const HeadMetrics& head : heads) {
    summary.density += head.density;
    summary.coverage += head.coverage;
    summary.relative_error += head.relative_error;
    summary.coverage_worst = std::min(summary.coverage_worst, head.coverage);
    summary.relative_error_worst = std::max(summary.relative_error_worst, head.relative_error);
  }
  const auto count = static_cast<double>(heads.size());
  summary.density /= count;
  summary.coverage /= count;
  summary.relative_error /= count;
  return summary;
}

HeadSummary head_summary(const Run& run, int64_t num_heads, int64_t head) {
  HeadSummary summary{false, run.report[static_cast<size_t>(head)]};
  const auto step = static_cast<size_t>(num_heads);
  for (size_t at = static_cast<size_t>(head) + step; at < run.report.size(); at += step) {
    const HeadReport& report = run.report[at];
    summary.mixed = summary.mixed || report.pattern != summary.report.pattern;
    summary.report.num_vertical += report.num_vertical;
    summary.report.num_slash += report.num_slash;
    summary.report.num_blocks += report.num_blocks;
    summary.report.structural_mass = summary.report.js_distance =
        std::numeric_limits<float>::quiet_NaN();
  }
  return summary;
}

}  // namespace crisp::cli
