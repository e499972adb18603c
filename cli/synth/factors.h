// factors.h - rows of q, k and v from a plan, RoPE applied, in float32.
#pragma once

#include <cstdint>
#include <vector>

#include "synth/plan.h"

namespace crisp::synth {

// Query or key positions first, first + stride, ...
struct Positions {
  int64_t first = 0, count = 0, stride = 1;
  int64_t at(int64_t row) const { return first + row * stride; }
};

// Cosines and sines of the positions' RoPE angles, [count][half]. Shared by every head.
struct Rotations {
  std::vector<float> cos, sin;
};
void fill_rotations(const Plan& plan, const Positions& positions, Rotations& rotations);

// rows: [count][head_dim], overwritten. Key and value rows must lie in one block of 128.
void make_key_rows(const Plan& plan, int64_t kv_head, const Positions& positions,
                   const Rotations& rotations, float* rows);
void make_value_rows(const Plan& plan, int64_t kv_head, const Positions& positions, float* rows);
// With the amplitudes that plan.heads[head] holds now.
void make_query_rows(const Plan& plan, int64_t head, const Positions& positions,
                     const Rotations& rotations, float* rows);

}  // namespace crisp::synth
