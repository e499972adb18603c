// solve.h - amplitudes from mass targets.
#pragma once

#include "synth/masses.h"

namespace crisp::synth {

// Sets the amplitudes and realised masses of plan.heads[head] so that every component holds its
// target to within 0.02, and to within a quarter of itself. Throws Error naming the worst component
// if it cannot. `k` must be written.
void solve_amplitudes(Plan& plan, int64_t head, const void* k, DType dtype);

}  // namespace crisp::synth
