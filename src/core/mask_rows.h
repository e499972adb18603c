// mask_rows.h - where the rows of one segment lie in a BlockMask.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

// First word of row `row` of the segment, of query head `head`.
inline uint32_t* mask_row(const BlockMask& mask, const SegmentShape& segment, int64_t head,
                          int64_t row) {
  return mask.words +
         (head * mask.num_q_blocks + segment.first_mask_row + row) * mask.words_per_row();
}

}  // namespace crisp
