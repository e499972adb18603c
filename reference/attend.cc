#include "reference/attend.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace crisp::reference {
namespace {

void check_shape(const Head& head, const BlockSet& blocks, int64_t block_size) {
  const BlockSet grid = empty_blocks(head, block_size);
  if (blocks.first_q_block != grid.first_q_block || blocks.rows != grid.rows ||
      blocks.cols != grid.cols) {
    throw std::invalid_argument("blocks are " + std::to_string(blocks.rows) + " x " +
                                std::to_string(blocks.cols) + " from row " +
                                std::to_string(blocks.first_q_block) + ", must be " +
                                std::to_string(grid.rows) + " x " + std::to_string(grid.cols) +
                                " from row " + std::to_string(grid.first_q_block));
  }
}

std::vector<int64_t> all_rows(const Head& head) {
  std::vector<int64_t> rows(static_cast<size_t>(head.q_len()));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return rows;
}

// Number of keys that query i may see: keys [0, limit).
int64_t key_limit(const Head& head, int64_t i) {
  return head.causal ? std::min(head.first_position() + i + 1, head.kv_len()) : head.kv_len();
}

bool keeps(const Head& head, const BlockSet& blocks, int64_t block_size, int64_t i, int64_t j) {
  const int64_t row = (head.first_position() + i) / block_size - blocks.first_q_block;
  return blocks.at(row, j / block_size);
}

// s_ij = scale * q_i . k_j
double logit(const Head& head, int64_t i, int64_t j) {
  double dot = 0;
  for (int64_t c = 0; c < head.q.cols; ++c) dot += head.q(i, c) * head.k(j, c);
  return dot * head.softmax_scale;
}

}  // namespace

AttendResult attend(const Head& head, const BlockSet& blocks, int64_t block_size) {
  return attend_rows(head, blocks, all_rows(head), block_size);
}

AttendResult attend_rows(const Head& head, const BlockSet& blocks, const std::vector<int64_t>& rows,
                         int64_t block_size) {
  check_shape(head, blocks, block_size);
  AttendResult result{Matrix(static_cast<int64_t>(rows.size()), head.v.cols), {}};
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t i = rows[r];
    std::vector<int64_t> keys;
    std::vector<double> logits;
    double largest = -INFINITY;
    for (int64_t j = 0; j < key_limit(head, i); ++j) {
      if (!keeps(head, blocks, block_size, i, j)) continue;
      keys.push_back(j);
      logits.push_back(logit(head, i, j));
      largest = std::max(largest, logits.back());
    }
    if (keys.empty()) {
      result.lse.push_back(-INFINITY);
      continue;
    }
    // Scores of -inf alone sum to 0: lse -inf, and weights 0 / 0.
    if (largest == -INFINITY) largest = 0;
    double sum = 0;
    for (double s : logits) sum += std::exp(s - largest);
    result.lse.push_back(largest + std::log(sum));
    for (size_t e = 0; e < keys.size(); ++e) {
      const double weight = std::exp(logits[e] - largest) / sum;
      for (int64_t c = 0; c < head.v.cols; ++c) {
        result.out(static_cast<int64_t>(r), c) += weight * head.v(keys[e], c);
      }
    }
  }
  return result;
}

AttendResult merge(const AttendResult& a, const AttendResult& b) {
  if (a.out.rows != b.out.rows || a.out.cols != b.out.cols) {
    throw std::invalid_argument("states to merge are " + std::to_string(a.out.rows) + " x " +
                                std::to_string(a.out.cols) + " and " + std::to_string(b.out.rows) +
                                " x " + std::to_string(b.out.cols) + ", must be of one shape");
  }
  AttendResult merged{Matrix(a.out.rows, a.out.cols), {}};
  for (int64_t r = 0; r < a.out.rows; ++r) {
    const double lse_a = a.lse[static_cast<size_t>(r)], lse_b = b.lse[static_cast<size_t>(r)];
    if (lse_a == -INFINITY && lse_b == -INFINITY) {
      merged.lse.push_back(-INFINITY);
      continue;
    }
    const double largest = std::max(lse_a, lse_b);
    const double lse = largest + std::log(std::exp(lse_a - largest) + std::exp(lse_b - largest));
    merged.lse.push_back(lse);
    for (int64_t c = 0; c < a.out.cols; ++c) {
      merged.out(r, c) = std::exp(lse_a - lse) * a.out(r, c) + std::exp(lse_b - lse) * b.out(r, c);
    }
  }
  return merged;
}

double coverage(const Head& head, const BlockSet& blocks, int64_t block_size) {
  return coverage_rows(head, blocks, all_rows(head), block_size);
}

double coverage_rows(const Head& head, const BlockSet& blocks, const std::vector<int64_t>& rows,
                     int64_t block_size) {
  check_shape(head, blocks, block_size);
  double sum = 0;
  for (int64_t i : rows) {
    std::vector<double> logits;
    for (int64_t j = 0; j < key_limit(head, i); ++j) logits.push_back(logit(head, i, j));
    const std::vector<double> mass = softmax(logits);
    for (size_t j = 0; j < mass.size(); ++j) {
      if (keeps(head, blocks, block_size, i, static_cast<int64_t>(j))) sum += mass[j];
    }
  }
  return sum / static_cast<double>(rows.size());
}

double relative_error(const Matrix& out, const Matrix& exact) {
  double difference = 0, norm = 0;
  for (size_t e = 0; e < exact.values.size(); ++e) {
    difference += (out.values[e] - exact.values[e]) * (out.values[e] - exact.values[e]);
    norm += exact.values[e] * exact.values[e];
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

}  // namespace crisp::reference
