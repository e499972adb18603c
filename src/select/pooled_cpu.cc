// pooled_cpu.cc - one task per head. The map is never stored: each pass computes its rows again, a
// panel of q_blocks at a time, and the passes narrow the value at which the prefix ends down digit
// by digit of its float bits, whose order is that of the values.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/pooled_cpu.cc"
#include "hwy/foreach_target.h"
// Highway wants its own include first.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/mask_rows.h"
#include "core/parallel.h"
#include "core/tile-inl.h"
#include "proxy/panels-inl.h"
#include "select/pooled.h"

#ifndef CRISP_SELECT_POOLED_HEAD_
#define CRISP_SELECT_POOLED_HEAD_
namespace crisp {
namespace {

struct PooledHead {
  const PooledJob& job;
  int64_t head;
  int64_t num_rows, num_cols, first_q_block;
  float *queries, *rows, *masses;
  double* sums;
  int64_t* counts;
};

}  // namespace
}  // namespace crisp
#endif  // CRISP_SELECT_POOLED_HEAD_

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {
namespace {

// Mean queries of all q_blocks as panels, scaled to base-2 logits.
void PackMeanQueries(const PooledHead& h) {
  const Attention& attention = *h.job.batch.attention;
  const SegmentShape& segment = h.job.batch.segment;
  const int64_t head_dim = attention.q.head_dim;
  const HeadRows q = q_rows(attention, segment, h.job.batch.first_head + h.head);
  const float scale = attention.softmax_scale * kLog2E;
  std::fill_n(h.queries, h.job.scratch.num_slots * head_dim, 0.0f);
  for (int64_t row = 0; row < h.num_rows; ++row) {
    const int64_t position = (h.first_q_block + row) * kBlockSize;
    const int64_t begin = std::max(position - segment.q_offset, int64_t{0});
    const int64_t end = std::min(position + kBlockSize - segment.q_offset, segment.q_len);
    LoadRows(q, begin, end - begin, h.rows);
    MeanOfRows(h.rows, end - begin, head_dim, h.rows);
    PackPanels(h.rows, 1, head_dim, scale, row, h.queries);
  }
}

// Softmax of the panel's rows over their causal columns, into masses[col][lane].
HWY_NOINLINE void FillPanel(const PooledHead& h, int64_t first_row) {
  const F32 f;
  const HeadBatch& batch = h.job.batch;
  const int64_t head_dim = batch.attention->q.head_dim;
  const int64_t kv_head = batch.kv_head_of(h.head) - batch.first_kv_head();
  const int64_t first_q_block = h.first_q_block + first_row;
  const int64_t num_cols = std::min(first_q_block + kPanel, h.num_cols);
  ScorePanel(h.job.map.key_means + kv_head * h.num_cols * head_dim, head_dim, num_cols,
             h.queries + first_row * head_dim, head_dim, h.masses);

  for (int64_t half = 0; half < kPanel; half += kLanes) {
    const VF hidden = hn::Set(f, -std::numeric_limits<float>::infinity());
    const VF lane = hn::Iota(f, static_cast<float>(half));
    float* column = h.masses + half;
    VF max = hidden;
    for (int64_t col = 0; col < num_cols; ++col) {
      VF score = hn::Load(f, column + col * kPanel);
      if (col > first_q_block) {
        const VF behind = hn::Set(f, static_cast<float>(col - first_q_block));
        score = hn::IfThenElse(hn::Le(behind, lane), score, hidden);
        hn::Store(score, f, column + col * kPanel);
      }
      max = hn::Max(max, score);
    }
    VF sum = hn::Zero(f);
    for (int64_t col = 0; col < num_cols; ++col) {
      const VF mass = Exp2(hn::Sub(hn::Load(f, column + col * kPanel), max));
      hn::Store(mass, f, column + col * kPanel);
      sum = hn::Add(sum, mass);
    }
    for (int64_t col = 0; col < num_cols; ++col) {
      hn::Store(hn::Div(hn::Load(f, column + col * kPanel), sum), f, column + col * kPanel);
    }
  }
}

// Calls visit(row, col, bits of the mass) for all causal entries of the map by ascending (row,
// col).
template <class Visit>
void ForEachEntry(const PooledHead& h, Visit visit) {
  for (int64_t first_row = 0; first_row < h.num_rows; first_row += kPanel) {
    FillPanel(h, first_row);
    const int64_t end = std::min(first_row + kPanel, h.num_rows);
    for (int64_t row = first_row; row < end; ++row) {
      const int64_t num_cols = std::min(h.first_q_block + row + 1, h.num_cols);
      for (int64_t col = 0; col < num_cols; ++col) {
        visit(row, col, std::bit_cast<uint32_t>(h.masses[col * kPanel + row - first_row]));
      }
    }
  }
}

// Adds to (sums, counts)[digit] every entry whose bits above the digit are `prefix`; the digit is
// `width` bits wide and starts at bit `shift`. False if an entry is not in [0, 2): not finite.
bool CountDigit(const PooledHead& h, uint32_t prefix, int shift, int width) {
  const uint32_t digit_mask = (uint32_t{1} << width) - 1;
  std::fill_n(h.sums, PooledScratch::kMaxBins, 0.0);
  std::fill_n(h.counts, PooledScratch::kMaxBins, int64_t{0});
  bool is_finite = true;
  ForEachEntry(h, [&](int64_t, int64_t, uint32_t bits) {
    is_finite &= bits < uint32_t{1} << 30;
    if (bits >> (shift + width) != prefix) return;
    const uint32_t digit = bits >> shift & digit_mask;
    h.sums[digit] += std::bit_cast<float>(bits);
    ++h.counts[digit];
  });
  return is_finite;
}

// Keeps entries above `cut` and the first num_ties of those equal to it.
void WriteRows(const PooledHead& h, uint32_t cut, int64_t num_ties) {
  const PooledJob& job = h.job;
  const int64_t q_head = job.batch.first_head + h.head;
  for (int64_t row = 0; row < h.num_rows; ++row) {
    std::fill_n(mask_row(job.mask, job.batch.segment, q_head, row), job.mask.words_per_row(), 0u);
  }
  ForEachEntry(h, [&](int64_t row, int64_t col, uint32_t bits) {
    if (bits < cut || (bits == cut && --num_ties < 0)) return;
    mask_row(job.mask, job.batch.segment, q_head, row)[col / 32] |= uint32_t{1} << (col % 32);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace crisp {
namespace {

HWY_EXPORT(PackMeanQueries);
HWY_EXPORT(CountDigit);
HWY_EXPORT(WriteRows);

// The bin, from the top, in which `covered` plus the bins above it reaches target; else the lowest
// that is not empty. `covered` becomes the sum of everything above that bin.
uint32_t crossing_bin(const PooledHead& h, int num_bins, double target, double& covered) {
  int crossing = 0;
  double above = covered;
  for (int bin = num_bins - 1; bin >= 0; --bin) {
    if (h.counts[bin] == 0) continue;
    crossing = bin;
    covered = above;
    above += h.sums[bin];
    if (above >= target) break;
  }
  return static_cast<uint32_t>(crossing);
}

// How many of `count` entries of equal `mass` belong to the prefix.
int64_t ties_within(double mass, int64_t count, double covered, double target, bool is_inclusive) {
  int64_t ties = 0;
  while (ties < count && covered < target) covered += mass, ++ties;
  return !is_inclusive && covered > target ? ties - 1 : ties;
}

// Finds the mass at which the prefix of gamma ends and writes the rows. False, and nothing written,
// if the map is not finite.
bool select_prefix(const PooledHead& h) {
  constexpr int kDigits = 3, kWidth[kDigits] = {11, 10, 9}, kShift[kDigits] = {19, 9, 0};
  uint32_t cut = 0;
  double covered = 0, target = 0;
  for (int digit = 0; digit < kDigits; ++digit) {
    if (!HWY_DYNAMIC_DISPATCH(CountDigit)(h, cut, kShift[digit], kWidth[digit])) return false;
    const int num_bins = 1 << kWidth[digit];
    if (digit == 0) {
      double total = 0;
      for (int bin = num_bins - 1; bin >= 0; --bin) total += h.sums[bin];
      target = double{h.job.rule.gamma} * total;
    }
    cut = cut << kWidth[digit] | crossing_bin(h, num_bins, target, covered);
  }
  const int64_t num_equal = h.counts[cut & ((1u << kWidth[kDigits - 1]) - 1)];
  HWY_DYNAMIC_DISPATCH(WriteRows)
  (h, cut,
   ties_within(std::bit_cast<float>(cut), num_equal, covered, target, h.job.rule.is_inclusive));
  return true;
}

void select_head(const PooledJob& job, int worker, int64_t head) {
  if (job.routes.pattern[head] != Pattern::kPooled) return;
  const PooledScratch& scratch = job.scratch;
  const SegmentShape& segment = job.batch.segment;
  const int64_t head_dim = job.batch.attention->q.head_dim;
  const PooledHead h = {job,
                        head,
                        segment.num_q_blocks,
                        segment.num_kv_blocks,
                        segment.first_q_block,
                        scratch.queries + worker * scratch.num_slots * head_dim,
                        scratch.rows + worker * kBlockSize * head_dim,
                        scratch.masses + worker * segment.num_kv_blocks * ProxyRows::kSlotAlignment,
                        scratch.sums + worker * PooledScratch::kMaxBins,
                        scratch.counts + worker * PooledScratch::kMaxBins};
  HWY_DYNAMIC_DISPATCH(PackMeanQueries)(h);
  if (!select_prefix(h)) job.routes.pattern[head] = Pattern::kDense;
}

}  // namespace

void pooled_cpu(const PooledJob& job) {
  parallel_for(job.num_workers, job.batch.num_heads,
               [&](int worker, int64_t head) { select_head(job, worker, head); });
}

}  // namespace crisp
#endif  // HWY_ONCE
