// head_batch.h - consecutive query heads of one segment: the unit the selectors work in, so that
// their scratch does not grow with the number of heads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

struct HeadBatch {
  const Attention* attention = nullptr;  // borrowed
  SegmentShape segment;
  int64_t segment_index = 0;
  int64_t first_head = 0, num_heads = 0;  // query heads

  int64_t kv_head_of(int64_t head) const { return (first_head + head) / group_size(*attention); }
  int64_t first_kv_head() const { return kv_head_of(0); }
  int64_t num_kv_heads() const { return kv_head_of(num_heads - 1) - first_kv_head() + 1; }
  // Query heads of the batch, counted from its first, that read its kv head `kv_head`: [begin,
  // end).
  int64_t heads_begin(int64_t kv_head) const {
    return std::max<int64_t>((first_kv_head() + kv_head) * group_size(*attention) - first_head, 0);
  }
  int64_t heads_end(int64_t kv_head) const {
    return std::min((first_kv_head() + kv_head + 1) * group_size(*attention) - first_head,
                    num_heads);
  }

  // The batch's entries of the caller's [num_segments, num_q_heads] report; null if none is wanted.
  HeadReport* rows_of(std::span<HeadReport> report) const {
    if (report.empty()) return nullptr;
    return report.data() + segment_index * attention->q.num_heads + first_head;
  }
};

// For policies without scratch: one batch per segment.
inline int64_t all_heads(const Attention& attention, const SegmentShape&) {
  return attention.q.num_heads;
}

// Calls body(batch) for every segment and every batch of its heads, in order. A batch has
// heads_per_batch(attention, segment) heads, rounded down to whole kv groups where that leaves any.
template <class HeadsPerBatch, class Body>
void for_each_head_batch(const Attention& attention, int64_t block_size,
                         HeadsPerBatch&& heads_per_batch, Body&& body) {
  const int64_t num_heads = attention.q.num_heads, group = group_size(attention);
  int64_t first_mask_row = 0;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    SegmentShape segment = segment_shape(segment_at(attention, index), block_size);
    segment.first_mask_row = first_mask_row;
    first_mask_row += segment.num_q_blocks;
    int64_t step = std::clamp<int64_t>(heads_per_batch(attention, segment), 1, num_heads);
    if (step > group) step -= step % group;
    for (int64_t head = 0; head < num_heads; head += step) {
      body(HeadBatch{&attention, segment, index, head, std::min(step, num_heads - head)});
    }
  }
}

}  // namespace crisp
