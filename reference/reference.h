// reference.h - the papers in plain double precision: the only oracle. No src/ include, no SIMD, no
// threads, the papers' order and names. All functions work on one query head of one sequence.
#pragma once

#include <cstdint>
#include <vector>

namespace crisp::reference {

// Row-major matrix of doubles.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;
  Matrix() = default;
  Matrix(int64_t rows_, int64_t cols_)
      : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_), 0.0) {}
  double& operator()(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  double operator()(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

// One query head: q [q_len, d], k and v [kv_len, d]. Causal is bottom-right aligned.
struct Head {
  Matrix q, k, v;
  double softmax_scale = 0;
  bool causal = true;
};

// Kept blocks [q_blocks, kv_blocks]; row 0 is absolute block first_q_block.
struct BlockSet {
  int64_t first_q_block = 0, rows = 0, cols = 0;
  std::vector<bool> kept;
  std::vector<bool>::reference at(int64_t r, int64_t c) { return kept[static_cast<size_t>(r * cols + c)]; }
  bool at(int64_t r, int64_t c) const { return kept[static_cast<size_t>(r * cols + c)]; }
  int64_t count() const;
};

}  // namespace crisp::reference
