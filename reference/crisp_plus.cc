#include "reference/crisp_plus.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference/pooled.h"
#include "reference/select.h"

namespace crisp::reference {
namespace {

// scale * x[row] . y[t] for t < count.
std::vector<double> logits_of(const Matrix& x, int64_t row, const Matrix& y, int64_t count,
                              double scale) {
  std::vector<double> logits(static_cast<size_t>(count), 0);
  for (int64_t t = 0; t < count; ++t) {
    double dot = 0;
    for (int64_t c = 0; c < x.cols; ++c) dot += x(row, c) * y(t, c);
    logits[static_cast<size_t>(t)] = dot * scale;
  }
  return logits;
}

std::vector<double> causal_row(const Matrix& map, int64_t row, int64_t count) {
  const auto begin = map.values.begin() + row * map.cols;
  return {begin, begin + count};
}

void keep(BlockSet& set, int64_t row, const std::vector<bool>& columns) {
  for (size_t j = 0; j < columns.size(); ++j) {
    if (columns[j]) set.at(row, static_cast<int64_t>(j)) = true;
  }
}

void check(const Head& head, const CrispPlusOptions& options) {
  if (!head.causal) throw std::invalid_argument("head is not causal; a selector needs causal");
  if (head.q_len() > head.kv_len()) {
    throw std::invalid_argument("q_len is " + std::to_string(head.q_len()) +
                                ", must be at most kv_len " + std::to_string(head.kv_len()));
  }
  if (options.pool_groups < 1 || kBlockSize % options.pool_groups != 0) {
    throw std::invalid_argument("pool_groups is " + std::to_string(options.pool_groups) +
                                ", must divide 128");
  }
}

}  // namespace

Matrix mean_query_map(const Head& head) {
  const Matrix mean_q = block_means(head.q, head.first_position());
  const int64_t first_q_block = head.first_position() / kBlockSize;
  Matrix map(mean_q.rows, ceil_div(head.kv_len(), kBlockSize));
  for (int64_t r = 0; r < map.rows; ++r) {
    const int64_t seen = std::min((first_q_block + r + 1) * kBlockSize, head.kv_len());
    const std::vector<double> weights =
        softmax(logits_of(mean_q, r, head.k, seen, head.softmax_scale));
    for (int64_t t = 0; t < seen; ++t) map(r, t / kBlockSize) += weights[static_cast<size_t>(t)];
  }
  return map;
}

Matrix fine_pooled_map(const Head& head, int64_t pool_groups) {
  const int64_t size = kBlockSize / pool_groups;
  const Matrix mean_q = group_means(head.q, head.first_position(), size);
  const Matrix mean_k = group_means(head.k, /*first_position=*/0, size);
  const int64_t first_group = head.first_position() / size;
  const int64_t first_q_block = head.first_position() / kBlockSize;
  Matrix map(
      mean_q.rows == 0 ? 0 : (first_group + mean_q.rows - 1) / pool_groups - first_q_block + 1,
      ceil_div(head.kv_len(), kBlockSize));
  std::vector<double> groups(static_cast<size_t>(map.rows), 0);
  for (int64_t g = 0; g < mean_q.rows; ++g) {
    const int64_t r = (first_group + g) / pool_groups - first_q_block;
    ++groups[static_cast<size_t>(r)];
    const std::vector<double> weights =
        softmax(logits_of(mean_q, g, mean_k, first_group + g + 1, head.softmax_scale));
    for (size_t k = 0; k < weights.size(); ++k) {
      map(r, static_cast<int64_t>(k) / pool_groups) += weights[k];
    }
  }
  for (int64_t r = 0; r < map.rows; ++r) {
    for (int64_t j = 0; j < map.cols; ++j) map(r, j) /= groups[static_cast<size_t>(r)];
  }
  return map;
}

CrispPlusSelection select_crisp_plus(const Head& head, const CrispPlusOptions& options) {
  check(head, options);
  CrispPlusSelection selection{empty_blocks(head), empty_blocks(head), empty_blocks(head)};
  if (head.q_len() == 0 || head.kv_len() < options.dense_below_tokens) {
    selection.blocks = all_blocks(head);
    selection.is_dense = true;
    return selection;
  }
  const Matrix mean_query = mean_query_map(head);
  const Matrix fine = fine_pooled_map(head, options.pool_groups);
  for (int64_t r = 0; r < mean_query.rows; ++r) {
    const int64_t count = selection.blocks.first_q_block + r + 1;  // blocks the row may keep
    const std::vector<double> m = causal_row(mean_query, r, count), p = causal_row(fine, r, count);
    const auto is_finite = [](double x) { return std::isfinite(x); };
    if (!std::all_of(m.begin(), m.end(), is_finite) ||
        !std::all_of(p.begin(), p.end(), is_finite)) {
      keep(selection.blocks, r, std::vector<bool>(static_cast<size_t>(count), true));
      continue;
    }
    const std::vector<bool> none(static_cast<size_t>(count), false);
    const auto background = background_blocks(count, options.sink_tokens, /*last_tokens=*/1);
    keep(selection.mean_query, r, select_above_noise_floor(m, background, none, options.alpha));
    keep(selection.fine_pooled, r, select_coverage(p, none, options.gamma));
    for (int64_t j = 0; j < count; ++j) {
      const bool is_sink = j < ceil_div(options.sink_tokens, kBlockSize);
      if (selection.mean_query.at(r, j) || selection.fine_pooled.at(r, j) || is_sink ||
          j == count - 1) {
        selection.blocks.at(r, j) = true;
      }
    }
  }
  return selection;
}

}  // namespace crisp::reference
