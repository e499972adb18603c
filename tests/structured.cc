#include "structured.h"

#include <algorithm>
#include <cmath>

namespace crisp::test {
namespace {

// Scores are softmax_scale * q . k; gains are chosen for logits of a few units.
void shape_queries(Inputs& inputs, const Segment& segment) {
  const float unit = std::sqrt(1 / inputs.softmax_scale);
  for (int64_t head = 0; head < inputs.q.heads; ++head) {
    const float gain = unit * (head % 3 == 0 ? 0.05f : head % 3 == 1 ? 1.0f : 2.0f);
    for (int64_t i = 0; i < segment.q_len; ++i) {
      float* q = inputs.q.row(segment.q_start + i, head);
      const auto position = static_cast<double>(segment.kv_len - segment.q_len + i);
      q[0] = q[1] = gain;
      for (int pair = 0; pair < 2; ++pair) {
        const double angle = position * (pair == 0 ? 0.013 : 0.11);
        q[2 + 2 * pair] = gain * static_cast<float>(std::cos(angle));
        q[3 + 2 * pair] = gain * static_cast<float>(std::sin(angle));
      }
    }
  }
}

void shape_keys(Inputs& inputs, const Segment& segment, Random& random) {
  const float unit = std::sqrt(1 / inputs.softmax_scale);
  for (int64_t head = 0; head < inputs.k.heads; ++head) {
    for (int64_t j = 0; j < segment.kv_len; ++j) {
      float* k = inputs.k.row(segment.kv_start + j, head);
      k[0] = j == 0 ? 3 * unit : 0;
      k[1] = random.below(200) == 0 ? 2.5f * unit : 0;
      for (int pair = 0; pair < 2; ++pair) {
        const double angle = static_cast<double>(j) * (pair == 0 ? 0.013 : 0.11);
        k[2 + 2 * pair] = unit * static_cast<float>(std::cos(angle));
        k[3 + 2 * pair] = unit * static_cast<float>(std::sin(angle));
      }
    }
  }
}

}  // namespace

Inputs structured_inputs(const Case& c) {
  Inputs inputs = make_inputs(c);
  Random random(c.seed + 99);
  for (const Segment& segment : inputs.segments) {
    shape_queries(inputs, segment);
    shape_keys(inputs, segment, random);
  }
  inputs.q.round(c.dtype);
  inputs.k.round(c.dtype);
  return inputs;
}

void make_ties(Inputs& inputs) {
  for (float& value : inputs.k.data) value = std::round(value * 4) / 4;
  for (const Segment& segment : inputs.segments) {
    for (int64_t j = 128; j < segment.kv_len; ++j) {
      if (j / 128 % 2 == 0) continue;
      const float* from = inputs.k.row(segment.kv_start + j - 128, 0);
      std::copy_n(from, inputs.k.heads * inputs.k.dim, inputs.k.row(segment.kv_start + j, 0));
    }
  }
}

}  // namespace crisp::test
