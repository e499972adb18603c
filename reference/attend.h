// attend.h - exact attention over kept blocks, and how far a selection is from dense.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/types.h"

namespace crisp::reference {

struct AttendResult {
  Matrix out;               // [rows, d]
  std::vector<double> lse;  // [rows], natural log
};

// Query i, at position p = first_position + i, sees key j iff (not causal or j <= p) and block
// (p / block_size, j / block_size) is kept:
//   lse_i = ln sum_j exp(s_ij),  out_i = sum_j exp(s_ij - lse_i) v_j,  s_ij = scale * q_i . k_j
// A row that sees nothing gives out 0 and lse -inf. `blocks` has the shape of empty_blocks(head,
// block_size), else std::invalid_argument. Causal or not, any block_size.
AttendResult attend(const Head& head, const BlockSet& blocks, int64_t block_size = kBlockSize);

// The same for the queries `rows` only, in that order.
AttendResult attend_rows(const Head& head, const BlockSet& blocks, const std::vector<int64_t>& rows,
                         int64_t block_size = kBlockSize);

// Joins two states over disjoint keys:
//   lse = ln(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
// Two empty states (lse -inf) give an empty one.
AttendResult merge(const AttendResult& a, const AttendResult& b);

// Mean over rows of the true (dense) attention mass that lies in the kept blocks.
double coverage(const Head& head, const BlockSet& blocks, int64_t block_size = kBlockSize);

// The same over the queries `rows` only.
double coverage_rows(const Head& head, const BlockSet& blocks, const std::vector<int64_t>& rows,
                     int64_t block_size = kBlockSize);

// |out - exact|_F / |exact|_F; 0 when both are all 0.
double relative_error(const Matrix& out, const Matrix& exact);

}  // namespace crisp::reference
