// tokens.h - what the policies derive from their token parameters.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace crisp {

inline int64_t blocks_of(int32_t tokens) { return ceil_div(tokens, kBlockSize); }

// The short-context gate, and segments that have nothing to select: every causal block is kept.
inline bool keeps_dense(const SegmentShape& segment, int32_t dense_below_tokens) {
  return segment.kv_len < dense_below_tokens || segment.kv_len == 0 || segment.q_len == 0;
}

}  // namespace crisp
