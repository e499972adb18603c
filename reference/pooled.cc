#include "reference/pooled.h"

#include <cmath>
#include <vector>

namespace crisp::reference {

Matrix group_means(const Matrix& x, int64_t first_position, int64_t size) {
  if (x.rows == 0) return Matrix(0, x.cols);
  const int64_t first_group = first_position / size;
  Matrix means(ceil_div(first_position + x.rows, size) - first_group, x.cols);
  std::vector<int64_t> tokens(static_cast<size_t>(means.rows), 0);
  for (int64_t t = 0; t < x.rows; ++t) {
    const int64_t r = (first_position + t) / size - first_group;
    ++tokens[static_cast<size_t>(r)];
    for (int64_t c = 0; c < x.cols; ++c) means(r, c) += x(t, c);
  }
  for (int64_t r = 0; r < means.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      means(r, c) /= static_cast<double>(tokens[static_cast<size_t>(r)]);
    }
  }
  return means;
}

Matrix pooled_map(const Head& head) {
  const Matrix mean_q = block_means(head.q, head.first_position());
  const Matrix mean_k = block_means(head.k, /*first_position=*/0);
  const int64_t first_q_block = head.first_position() / kBlockSize;
  Matrix map(mean_q.rows, mean_k.rows);
  for (int64_t r = 0; r < map.rows; ++r) {
    std::vector<double> logits;
    for (int64_t j = 0; j < map.cols && j <= first_q_block + r; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < mean_q.cols; ++c) dot += mean_q(r, c) * mean_k(j, c);
      logits.push_back(dot * head.softmax_scale);
    }
    const std::vector<double> weights = softmax(logits);
    for (size_t j = 0; j < weights.size(); ++j) map(r, static_cast<int64_t>(j)) = weights[j];
  }
  return map;
}

BlockSet pooled_prefix(const Matrix& map, int64_t first_q_block, double gamma, bool exclusive) {
  BlockSet kept{first_q_block, map.rows, map.cols, std::vector<bool>(map.values.size(), false)};
  std::vector<double> mass;    // causal entries, flattened by (row, col)
  std::vector<int64_t> entry;  // their place in the map
  for (int64_t r = 0; r < map.rows; ++r) {
    for (int64_t j = 0; j < map.cols && j <= first_q_block + r; ++j) {
      mass.push_back(map(r, j));
      entry.push_back(r * map.cols + j);
    }
  }
  const std::vector<int64_t> order = descending(mass);
  double total = 0;
  for (int64_t e : order) total += mass[static_cast<size_t>(e)];
  double cumulative = 0;
  for (int64_t e : order) {
    cumulative += mass[static_cast<size_t>(e)];
    if (exclusive && cumulative > gamma * total) break;
    kept.kept[static_cast<size_t>(entry[static_cast<size_t>(e)])] = true;
    if (!exclusive && cumulative >= gamma * total) break;
  }
  return kept;
}

}  // namespace crisp::reference
