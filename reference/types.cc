#include "reference/types.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace crisp::reference {

int64_t BlockSet::count() const { return reference::count(kept); }

int64_t count(const std::vector<bool>& bits) {
  return static_cast<int64_t>(std::count(bits.begin(), bits.end(), true));
}

BlockSet empty_blocks(const Head& head, int64_t block_size) {
  BlockSet blocks;
  blocks.first_q_block = head.first_position() / block_size;
  if (head.q_len() > 0) {
    blocks.rows = ceil_div(head.first_position() + head.q_len(), block_size) - blocks.first_q_block;
  }
  blocks.cols = ceil_div(head.kv_len(), block_size);
  blocks.kept.assign(static_cast<size_t>(blocks.rows * blocks.cols), false);
  return blocks;
}

BlockSet all_blocks(const Head& head, int64_t block_size) {
  BlockSet blocks = empty_blocks(head, block_size);
  for (int64_t r = 0; r < blocks.rows; ++r) {
    for (int64_t j = 0; j < blocks.cols; ++j) {
      blocks.at(r, j) = !head.causal || j <= blocks.first_q_block + r;
    }
  }
  return blocks;
}

std::vector<double> softmax(const std::vector<double>& logits) {
  std::vector<double> weights(logits.size());
  double largest = -INFINITY;
  for (double x : logits) largest = std::max(largest, x);
  double sum = 0;
  for (size_t j = 0; j < logits.size(); ++j) sum += weights[j] = std::exp(logits[j] - largest);
  for (double& w : weights) w /= sum;
  return weights;
}

std::vector<int64_t> descending(const std::vector<double>& mass) {
  std::vector<int64_t> order(mass.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&mass](int64_t a, int64_t b) {
    return mass[static_cast<size_t>(a)] > mass[static_cast<size_t>(b)];
  });
  return order;
}

}  // namespace crisp::reference
