// proxy_cpu.cc - one pass over the keys per kv head, then a reduction per query head. Every task
// covers a fixed set of blocks and writes only its own partial sums, so the result does not depend
// on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "proxy/proxy.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "proxy/proxy_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "core/tile-inl.h"
#include "proxy/panels-inl.h"

#ifndef CRISP_PROXY_WINDOW_
#define CRISP_PROXY_WINDOW_
namespace crisp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The keys of one block that lie in the structural windows: c < low_end or c >= high_begin.
struct BlockWindow {
  int64_t low_end = 0, high_begin = kBlockSize;
  int edge = -1;  // slot of ProxyScratch::edges, or -1: the block lies wholly inside or outside
  bool covers_block() const { return low_end >= high_begin; }
};

BlockWindow window_of_block(const ProxyJob& job, int64_t block) {
  const int64_t kv_len = job.batch.segment.kv_len, first_key = block * kBlockSize;
  const int64_t num_keys = std::min(kBlockSize, kv_len - first_key);
  const int64_t recency_begin = std::max<int64_t>(kv_len - job.options.recency_tokens, 0);
  BlockWindow window;
  window.low_end = std::clamp<int64_t>(job.options.sink_tokens - first_key, 0, num_keys);
  window.high_begin = std::clamp<int64_t>(recency_begin - first_key, 0, num_keys);
  const bool is_outside = window.low_end == 0 && window.high_begin == num_keys;
  if (!is_outside && !window.covers_block()) window.edge = window.low_end > 0 ? 0 : 1;
  return window;
}

float* partial(const ProxyJob& job, int64_t head, int64_t block, ProxyScratch::Part part) {
  return job.scratch.partials +
         ((head * job.map.num_blocks + block) * ProxyScratch::kNumParts + part) *
             job.rows.num_slots;
}

float* edge_sums(const ProxyJob& job, int64_t head, int edge) {
  return job.scratch.edges + (head * 2 + edge) * job.rows.num_slots;
}

}  // namespace
}  // namespace crisp
#endif  // CRISP_PROXY_WINDOW_

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {
namespace {

// Scores of keys behind a query become -inf. `first_key` is the block's first key relative to the
// panel's first query: query lane l sees key c iff first_key + c <= l.
HWY_NOINLINE void MaskFutureKeys(int64_t first_key, int64_t num_keys, float* scores) {
  const F32 f;
  const VF hidden = hn::Set(f, -kInfinity);
  const VF lane0 = hn::Iota(f, 0.0f), lane1 = hn::Iota(f, static_cast<float>(kLanes));
  for (int64_t c = std::max<int64_t>(-first_key, 0); c < num_keys; ++c) {
    float* row = scores + c * kPanel;
    const VF key = hn::Set(f, static_cast<float>(first_key + c));
    hn::Store(hn::IfThenElse(hn::Le(key, lane0), hn::Load(f, row), hidden), f, row);
    hn::Store(hn::IfThenElse(hn::Le(key, lane1), hn::Load(f, row + kLanes), hidden), f,
              row + kLanes);
  }
}

struct PanelSum {  // no initialisers: a constructor would be compiled for the baseline target
  VF v0, v1;
};

// sum += exp2(score - max) over keys [begin, end).
HWY_INLINE void AddExp2(const float* scores, int64_t begin, int64_t end, VF max0, VF max1,
                        PanelSum& sum) {
  const F32 f;
  for (int64_t c = begin; c < end; ++c) {
    sum.v0 = hn::Add(sum.v0, Exp2(hn::Sub(hn::Load(f, scores + c * kPanel), max0)));
    sum.v1 = hn::Add(sum.v1, Exp2(hn::Sub(hn::Load(f, scores + c * kPanel + kLanes), max1)));
  }
}

// Keys [begin, end) that some lanes have on the low side of the slash split and others on the high
// side: lane l is at r = first_r + l of its block, and key c is low iff c <= r.
HWY_INLINE void AddExp2Split(const float* scores, int64_t begin, int64_t end, int64_t first_r,
                             VF max0, VF max1, PanelSum& low, PanelSum& high) {
  const F32 f;
  const VF r0 = hn::Iota(f, static_cast<float>(first_r));
  const VF r1 = hn::Iota(f, static_cast<float>(first_r + kLanes));
  for (int64_t c = begin; c < end; ++c) {
    const VF key = hn::Set(f, static_cast<float>(c));
    const VF e0 = Exp2(hn::Sub(hn::Load(f, scores + c * kPanel), max0));
    const VF e1 = Exp2(hn::Sub(hn::Load(f, scores + c * kPanel + kLanes), max1));
    low.v0 = hn::Add(low.v0, hn::IfThenElseZero(hn::Le(key, r0), e0));
    low.v1 = hn::Add(low.v1, hn::IfThenElseZero(hn::Le(key, r1), e1));
    high.v0 = hn::Add(high.v0, hn::IfThenElseZero(hn::Gt(key, r0), e0));
    high.v1 = hn::Add(high.v1, hn::IfThenElseZero(hn::Gt(key, r1), e1));
  }
}

HWY_INLINE void StorePanel(VF v0, VF v1, float* to) {
  hn::Store(v0, F32(), to);
  hn::Store(v1, F32(), to + kLanes);
}

// Partial sums of one panel of queries over one block of keys; all pointers at the panel's slots.
struct PanelParts {
  float *max, *low, *high;
  float* edge;  // null: no window ends in this block
};

HWY_NOINLINE void ReducePanel(const float* scores, int64_t num_keys, int64_t first_r,
                              const BlockWindow& window, const PanelParts& parts) {
  const F32 f;
  VF max0 = hn::Set(f, -kInfinity), max1 = max0;
  for (int64_t c = 0; c < num_keys; ++c) {
    max0 = hn::Max(max0, hn::Load(f, scores + c * kPanel));
    max1 = hn::Max(max1, hn::Load(f, scores + c * kPanel + kLanes));
  }
  StorePanel(max0, max1, parts.max);
  // A lane that sees no key subtracts 0: its sums are exp2(-inf) = 0, not exp2(-inf + inf).
  const VF none = hn::Set(f, -kInfinity);
  max0 = hn::IfThenZeroElse(hn::Eq(max0, none), max0);
  max1 = hn::IfThenZeroElse(hn::Eq(max1, none), max1);

  PanelSum low{hn::Zero(f), hn::Zero(f)}, high = low;
  const int64_t split_begin = std::min(first_r + 1, num_keys);
  const int64_t split_end = std::min(first_r + kPanel, num_keys);
  AddExp2(scores, 0, split_begin, max0, max1, low);
  AddExp2Split(scores, split_begin, split_end, first_r, max0, max1, low, high);
  AddExp2(scores, split_end, num_keys, max0, max1, high);
  StorePanel(low.v0, low.v1, parts.low);
  StorePanel(high.v0, high.v1, parts.high);

  if (parts.edge == nullptr) return;
  PanelSum inside{hn::Zero(f), hn::Zero(f)};
  AddExp2(scores, 0, window.low_end, max0, max1, inside);
  AddExp2(scores, window.high_begin, num_keys, max0, max1, inside);
  StorePanel(inside.v0, inside.v1, parts.edge);
}

// All panels of one query head against one block of keys[num_keys][head_dim].
void ScoreHead(const ProxyJob& job, int64_t head, int64_t block, const float* keys, float* scores) {
  const ProxyRows& rows = job.rows;
  const int64_t head_dim = job.batch.attention->q.head_dim;
  const int64_t first_key = block * kBlockSize;
  const int64_t num_keys = std::min(kBlockSize, job.batch.segment.kv_len - first_key);
  const BlockWindow window = window_of_block(job, block);
  const float* panels = job.scratch.queries + head * rows.num_slots * head_dim;
  for (int64_t slot = 0; slot < rows.num_slots; slot += kPanel) {
    if (slot + kPanel <= rows.first_slot() || slot >= rows.first_slot() + rows.num_rows) continue;
    const int64_t position = rows.slots_position + slot;
    const PanelParts parts = {partial(job, head, block, ProxyScratch::kMax) + slot,
                              partial(job, head, block, ProxyScratch::kLow) + slot,
                              partial(job, head, block, ProxyScratch::kHigh) + slot,
                              window.edge < 0 ? nullptr : edge_sums(job, head, window.edge) + slot};
    // Keys that any query of the panel may see; those of unused slots are never read again.
    const int64_t num_seen = std::clamp<int64_t>(position + kPanel - first_key, 0, num_keys);
    ScorePanel(keys, head_dim, num_seen, panels + slot * head_dim, head_dim, scores);
    if (first_key + num_seen - 1 > position) {
      MaskFutureKeys(first_key - position, num_seen, scores);
    }
    BlockWindow seen = window;
    seen.low_end = std::min(window.low_end, num_seen);
    ReducePanel(scores, num_seen, position % kBlockSize, seen, parts);
  }
}

void PackQueries(const ProxyJob& job, int worker, int64_t head) {
  const Attention& attention = *job.batch.attention;
  const int64_t head_dim = attention.q.head_dim;
  float* rows = job.scratch.keys + worker * kBlockSize * head_dim;
  PackProxyRows(q_rows(attention, job.batch.segment, job.batch.first_head + head),
                job.batch.segment, job.rows, attention.softmax_scale, rows,
                job.scratch.queries + head * job.rows.num_slots * head_dim);
  MeanOfRows(rows, job.rows.num_rows, head_dim, job.scratch.mean_queries + head * head_dim);
}

// One block of one kv head (counted from the batch's first): its mean key, and the partial sums of
// every query head that reads it.
void ScoreBlock(const ProxyJob& job, int worker, int64_t kv_head, int64_t block) {
  const HeadBatch& batch = job.batch;
  const int64_t head_dim = batch.attention->q.head_dim;
  const int64_t first_key = block * kBlockSize;
  const int64_t num_keys = std::min(kBlockSize, batch.segment.kv_len - first_key);
  float* keys = job.scratch.keys + worker * kBlockSize * head_dim;
  float* scores = job.scratch.scores + worker * kBlockSize * ProxyRows::kSlotAlignment;
  LoadRows(k_rows(*batch.attention, batch.segment, batch.first_kv_head() + kv_head), first_key,
           num_keys, keys);
  MeanOfRows(keys, num_keys, head_dim,
             job.map.key_means + (kv_head * job.map.num_blocks + block) * head_dim);
  for (int64_t head = batch.heads_begin(kv_head); head < batch.heads_end(kv_head); ++head) {
    ScoreHead(job, head, block, keys, scores);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace crisp {
namespace {

HWY_EXPORT(PackQueries);
HWY_EXPORT(ScoreBlock);

constexpr int64_t kBlocksPerTask = 8;

// Turns the maxima of one head into weights exp2(m - M), M = maximum of the row, and stores
// 1 / (normaliser * num_rows) per slot in `inverse` and log2 of the row's sum in map.row_lse.
void weigh_rows(const ProxyJob& job, int64_t head, double* inverse) {
  const int64_t num_slots = job.rows.num_slots, first = job.rows.first_slot();
  const int64_t end = first + job.rows.num_rows, num_blocks = job.map.num_blocks;
  float row_max[3 * ProxyRows::kSlotAlignment];
  double sum[3 * ProxyRows::kSlotAlignment] = {};
  std::fill_n(row_max, num_slots, -kInfinity);
  // Unused slots: exp2(score - inf) = 0 to whoever weighs scores by their row.
  std::fill_n(job.map.row_lse + head * num_slots, num_slots, kInfinity);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* max = partial(job, head, block, ProxyScratch::kMax);
    for (int64_t slot = first; slot < end; ++slot)
      row_max[slot] = std::max(row_max[slot], max[slot]);
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    float* weight = partial(job, head, block, ProxyScratch::kMax);
    const float* low = partial(job, head, block, ProxyScratch::kLow);
    const float* high = partial(job, head, block, ProxyScratch::kHigh);
    for (int64_t slot = first; slot < end; ++slot) {
      weight[slot] = std::exp2(weight[slot] - row_max[slot]);
      sum[slot] += static_cast<double>(weight[slot]) * (double{low[slot]} + high[slot]);
    }
  }
  for (int64_t slot = first; slot < end; ++slot) {
    inverse[slot] = 1.0 / (sum[slot] * static_cast<double>(job.rows.num_rows));
    job.map.row_lse[head * num_slots + slot] =
        static_cast<float>(row_max[slot] + std::log2(sum[slot]));
  }
}

// Sums of the weighted parts of one (head, block) over the rows of one of the two q_blocks.
struct BlockMass {
  double low = 0, high = 0, edge = 0;
};

BlockMass block_mass(const ProxyJob& job, int64_t head, int64_t block, int edge, int64_t begin,
                     int64_t end, const double* inverse) {
  const float* weight = partial(job, head, block, ProxyScratch::kMax);
  const float* low = partial(job, head, block, ProxyScratch::kLow);
  const float* high = partial(job, head, block, ProxyScratch::kHigh);
  const float* inside = edge < 0 ? nullptr : edge_sums(job, head, edge);
  BlockMass mass;
  for (int64_t slot = begin; slot < end; ++slot) {
    const double scale = weight[slot] * inverse[slot];
    mass.low += scale * low[slot];
    mass.high += scale * high[slot];
    if (inside != nullptr) mass.edge += scale * inside[slot];
  }
  return mass;
}

void reduce_head(const ProxyJob& job, int64_t head) {
  double inverse[3 * ProxyRows::kSlotAlignment];
  weigh_rows(job, head, inverse);
  const int64_t num_blocks = job.map.num_blocks;
  float* vertical = job.map.vertical + head * num_blocks;
  float* slash = job.map.slash + head * num_blocks;
  double* slash_sums = job.scratch.block_sums + head * num_blocks;
  std::fill_n(slash_sums, num_blocks, 0.0);

  // 128 consecutive rows lie in at most two q_blocks; `cut` is the first slot of the last one.
  const int64_t first = job.rows.first_slot(), end = first + job.rows.num_rows;
  const int64_t last_q_block = num_blocks - 1;
  const int64_t cut = std::max(last_q_block * kBlockSize - job.rows.slots_position, first);
  double structural = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const BlockWindow window = window_of_block(job, block);
    const BlockMass before = block_mass(job, head, block, window.edge, first, cut, inverse);
    const BlockMass last = block_mass(job, head, block, window.edge, cut, end, inverse);
    const double mass = before.low + before.high + last.low + last.high;
    vertical[block] = static_cast<float>(mass);
    if (window.covers_block()) structural += mass;
    if (window.edge >= 0) structural += before.edge + last.edge;
    // Below Delta 0 there is nothing but masked keys.
    const int64_t delta = last_q_block - block;
    slash_sums[delta] += last.low;
    if (delta >= 1) slash_sums[delta - 1] += last.high + before.low;
    if (delta >= 2) slash_sums[delta - 2] += before.high;
  }
  for (int64_t delta = 0; delta < num_blocks; ++delta) {
    slash[delta] = static_cast<float>(slash_sums[delta]);
  }
  job.map.structural_mass[head] = static_cast<float>(structural);
}

// pooled_estimate[b] = softmax over all blocks b of scale * (mean proxy query . mean key of b).
void estimate_head(const ProxyJob& job, int64_t head) {
  const Attention& attention = *job.batch.attention;
  const int64_t num_blocks = job.map.num_blocks, head_dim = attention.q.head_dim;
  const int64_t kv_head = job.batch.kv_head_of(head) - job.batch.first_kv_head();
  const float* query = job.scratch.mean_queries + head * head_dim;
  double* logits = job.scratch.block_sums + head * num_blocks;
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* key = job.map.key_means + (kv_head * num_blocks + block) * head_dim;
    double dot = 0;
    for (int64_t d = 0; d < head_dim; ++d) dot += double{query[d]} * key[d];
    logits[block] = dot * attention.softmax_scale;
    max = std::max(max, logits[block]);
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    logits[block] = std::exp(logits[block] - max);
    sum += logits[block];
  }
  float* estimate = job.map.pooled_estimate + head * num_blocks;
  for (int64_t block = 0; block < num_blocks; ++block) {
    estimate[block] = static_cast<float>(logits[block] / sum);
  }
}

}  // namespace

void proxy_map_cpu(const ProxyJob& job) {
  const HeadBatch& batch = job.batch;
  parallel_for(job.num_threads, batch.num_heads, [&](int worker, int64_t head) {
    HWY_DYNAMIC_DISPATCH(PackQueries)(job, worker, head);
  });
  const int64_t num_chunks = ceil_div(job.map.num_blocks, kBlocksPerTask);
  parallel_for(job.num_threads, batch.num_kv_heads() * num_chunks, [&](int worker, int64_t task) {
    const int64_t begin = task % num_chunks * kBlocksPerTask;
    const int64_t end = std::min(begin + kBlocksPerTask, job.map.num_blocks);
    for (int64_t block = begin; block < end; ++block) {
      HWY_DYNAMIC_DISPATCH(ScoreBlock)(job, worker, task / num_chunks, block);
    }
  });
  parallel_for(job.num_threads, batch.num_heads, [&](int, int64_t head) {
    reduce_head(job, head);
    if (job.options.pooled_estimate) estimate_head(job, head);
  });
}

}  // namespace crisp
#endif  // HWY_ONCE
