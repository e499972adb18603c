// merge.h - two attention states over disjoint keys -> the state over their union.
#pragma once

#include "crisp/crisp.h"

namespace crisp {

// The executor behind the public merge_states(): arguments are already checked. `lse` may be null.
void merge_attention_states(const ConstTensor& out_a, const float* lse_a, const ConstTensor& out_b,
                            const float* lse_b, const Tensor& out, float* lse,
                            const Context& context);
// The same on CUDA, in builds that have it; the device that owns the memory is current.
void merge_attention_states_cuda(const ConstTensor& out_a, const float* lse_a,
                                 const ConstTensor& out_b, const float* lse_b, const Tensor& out,
                                 float* lse, const Context& context);

}  // namespace crisp
