// token_budget_cpu.cc - one task per head: token masses of both directions, then their counts.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/token_budget_cpu.cc"
#include "hwy/foreach_target.h"
// Highway wants its own include first.
#include <algorithm>
#include <bit>
#include <numeric>

#include "core/parallel.h"
#include "core/tile-inl.h"
#include "proxy/panels-inl.h"
#include "select/token_budget.h"

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {
namespace {

// One vector of queries against num_keys keys: A = exp2(score - lse) / rows, 0 for keys behind a
// query. Key c adds to columns[c] lane by lane, and to the offsets first_offset - c + lane. Every
// kLanes-th key in turn: the offsets of neighbours overlap, and a load that overlaps the store just
// before it waits for it to leave the core.
HWY_NOINLINE void AddTokenMasses(const float* scores, int64_t num_keys, VF lse, VF inverse_rows,
                                 float* columns, float* offsets, int64_t first_offset) {
  const F32 f;
  const VF lane = hn::Iota(f, 0.0f);
  for (int64_t first = 0; first < kLanes; ++first) {
    for (int64_t c = first; c < num_keys; c += kLanes) {
      const int64_t offset = first_offset - c;
      VF mass = hn::Mul(Exp2(hn::Sub(hn::Load(f, scores + c * kPanel), lse)), inverse_rows);
      if (offset < 0) {
        mass = hn::IfThenElseZero(hn::Ge(lane, hn::Set(f, static_cast<float>(-offset))), mass);
      }
      hn::Store(hn::Add(hn::Load(f, columns + c * kLanes), mass), f, columns + c * kLanes);
      hn::StoreU(hn::Add(hn::LoadU(f, offsets + offset), mass), f, offsets + offset);
    }
  }
}

// Token masses of one head into scratch.vertical and scratch.slash.
void ComputeTokenMasses(const TokenBudgetJob& job, const TokenScratch& scratch, int64_t head) {
  const F32 f;
  const HeadBatch& batch = job.batch;
  const Attention& attention = *batch.attention;
  const ProxyRows& rows = job.rows;
  const int64_t kv_len = batch.segment.kv_len, head_dim = attention.q.head_dim;
  const HeadRows k = k_rows(attention, batch.segment, batch.kv_head_of(head));
  const float* lse = job.map.row_lse + head * rows.num_slots;
  const VF inverse_rows = hn::Set(f, 1.0f / static_cast<float>(rows.num_rows));
  float* offsets = scratch.slash + TokenScratch::kMargin;
  std::fill_n(scratch.slash, kv_len + 2 * TokenScratch::kMargin, 0.0f);
  PackProxyRows(q_rows(attention, batch.segment, batch.first_head + head), batch.segment, rows,
                attention.softmax_scale, scratch.keys, scratch.queries);

  for (int64_t first_key = 0; first_key < kv_len; first_key += kBlockSize) {
    const int64_t num_keys = std::min(kBlockSize, kv_len - first_key);
    LoadRows(k, first_key, num_keys, scratch.keys);
    std::fill_n(scratch.columns, num_keys * kLanes, 0.0f);
    for (int64_t slot = rows.first_slot() / kPanel * kPanel;
         slot < rows.first_slot() + rows.num_rows; slot += kPanel) {
      const int64_t first_offset = rows.slots_position + slot - first_key;
      const int64_t num_seen = std::clamp<int64_t>(first_offset + kPanel, 0, num_keys);
      ScorePanel(scratch.keys, head_dim, num_seen, scratch.queries + slot * head_dim, head_dim,
                 scratch.scores);
      for (int64_t half = 0; half < kPanel; half += kLanes) {
        AddTokenMasses(scratch.scores + half,
                       std::min(num_seen, std::max<int64_t>(first_offset + half + kLanes, 0)),
                       hn::Load(f, lse + slot + half), inverse_rows, scratch.columns, offsets,
                       first_offset + half);
      }
    }
    for (int64_t c = 0; c < num_keys; ++c) {
      scratch.vertical[first_key + c] =
          hn::GetLane(hn::SumOfLanes(f, hn::Load(f, scratch.columns + c * kLanes)));
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace crisp {
namespace {

HWY_EXPORT(ComputeTokenMasses);

// Number of tokens whose cumulative mass, heaviest first, is <= gamma: a quickselect by weight.
int64_t tokens_within(float* masses, int64_t num_tokens, double gamma) {
  // Masses are >= 0, so their bits order them. A NaN has its place in that order too, where among
  // floats it would lead the partition out of the range.
  const auto is_heavier = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) > std::bit_cast<uint32_t>(b);
  };
  // [masses, begin) are the heaviest and hold `covered` <= gamma; no token from `end` on fits.
  float *begin = masses, *end = masses + num_tokens;
  double covered = 0;
  while (begin != end) {
    float* middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, is_heavier);
    const double sum = std::accumulate(begin, middle + 1, covered);
    if (sum > gamma) {
      end = middle;
    } else {
      begin = middle + 1;
      covered = sum;
    }
  }
  return begin - masses;
}

// The blocks that TokenBudget gives a direction. Reorders the masses.
int64_t blocks_for_gamma(float* masses, int64_t num_tokens, float gamma, int64_t min_blocks) {
  const int64_t num = 1 + tokens_within(masses, num_tokens, gamma);
  return std::min(std::max(num / kBlockSize + 1, min_blocks), ceil_div(num_tokens, kBlockSize));
}

void sum_left_aligned(const float* by_offset, int64_t kv_len, int64_t num_blocks, float* slash) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    double sum = 0;
    const int64_t end = std::min((block + 1) * kBlockSize, kv_len);
    for (int64_t t = block * kBlockSize; t < end; ++t) sum += by_offset[kv_len - 1 - t];
    slash[num_blocks - 1 - block] = static_cast<float>(sum);
  }
}

void count_head(const TokenBudgetJob& job, int worker, int64_t head) {
  const Pattern pattern = job.routes.pattern[head];
  if (pattern == Pattern::kDense || (pattern == Pattern::kPooled && job.shares_slash())) return;
  const int64_t kv_len = job.batch.segment.kv_len, num_blocks = job.map.num_blocks;
  const TokenScratch scratch =
      job.scratch.of_worker(worker, kv_len, job.rows.num_slots, job.batch.attention->q.head_dim);
  HWY_DYNAMIC_DISPATCH(ComputeTokenMasses)(job, scratch, head);
  float* by_offset = scratch.slash + TokenScratch::kMargin;
  if (!job.shares_slash()) {
    sum_left_aligned(by_offset, kv_len, num_blocks,
                     job.budget.left_aligned_slash + head * num_blocks);
  }
  if (pattern != Pattern::kVerticalSlash) return;
  job.budget.num_vertical[head] =
      blocks_for_gamma(scratch.vertical, kv_len, job.gamma, job.min_blocks);
  job.budget.num_slash[head] = blocks_for_gamma(by_offset, kv_len, job.gamma, job.min_blocks);
}

}  // namespace

void token_budget_cpu(const TokenBudgetJob& job) {
  parallel_for(job.num_workers, job.batch.num_heads,
               [&](int worker, int64_t head) { count_head(job, worker, head); });
}

}  // namespace crisp
#endif  // HWY_ONCE
