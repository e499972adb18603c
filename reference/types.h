// types.h - the matrices, heads and block sets that the reference works on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crisp::reference {

inline constexpr int64_t kBlockSize = 128;  // B, tokens: the granularity of every selector
inline constexpr int64_t kProxyRows =
    128;  // b: the proxy map is the attention of the last b queries

// Row-major matrix of doubles.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;
  Matrix() = default;
  Matrix(int64_t rows_, int64_t cols_)
      : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_), 0.0) {}
  double& operator()(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  double operator()(int64_t r, int64_t c) const {
    return values[static_cast<size_t>(r * cols + c)];
  }
};

// One query head: q [q_len, d], k and v [kv_len, d]. Causal is bottom-right aligned.
struct Head {
  Matrix q, k, v;
  double softmax_scale = 0;
  bool causal = true;

  int64_t q_len() const { return q.rows; }
  int64_t kv_len() const { return k.rows; }
  // Position of the first query among the keys: query i sits at first_position() + i.
  int64_t first_position() const { return kv_len() > q_len() ? kv_len() - q_len() : 0; }
};

// Kept blocks [q_blocks, kv_blocks]; row 0 is absolute block first_q_block.
struct BlockSet {
  int64_t first_q_block = 0, rows = 0, cols = 0;
  std::vector<bool> kept;
  std::vector<bool>::reference at(int64_t r, int64_t c) {
    return kept[static_cast<size_t>(r * cols + c)];
  }
  bool at(int64_t r, int64_t c) const { return kept[static_cast<size_t>(r * cols + c)]; }
  int64_t count() const;
};

// ceil(a / b) for a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Number of true entries.
int64_t count(const std::vector<bool>& bits);

// The grid of `head` in blocks of block_size, nothing kept. Its rows are the absolute blocks
// first_position / block_size ... of the chunk's queries, its columns every key block.
BlockSet empty_blocks(const Head& head, int64_t block_size = kBlockSize);

// Every block that holds a visible key: j <= i on the absolute grid, all of them when not causal.
BlockSet all_blocks(const Head& head, int64_t block_size = kBlockSize);

// softmax(x)[j] = exp(x[j] - max x) / sum_k exp(x[k] - max x); entries of -inf get weight 0.
std::vector<double> softmax(const std::vector<double>& logits);

// Indices 0..n-1 by descending mass; equal masses keep the lower index first.
std::vector<int64_t> descending(const std::vector<double>& mass);

}  // namespace crisp::reference
