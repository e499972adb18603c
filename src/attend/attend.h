// attend.h - Q, K, V + BlockMask -> out, lse. Exact softmax over the kept blocks.
#pragma once

#include <cstddef>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

// Scratch attend_blocks takes from context.workspace; a pure function of shapes and num_threads.
size_t attend_workspace_bytes(const Attention& attention, int64_t block_size,
                              const Context& context);

// The executor behind the public attend(): arguments are already checked, shapes agree. `lse` is
// [num_q_heads, num_q_tokens] or null.
void attend_blocks(const Attention& attention, const BlockMask& mask, const Tensor& out, float* lse,
                   const Context& context);

// The same on CUDA, in builds that have it; the device that owns the memory is current.
size_t attend_workspace_bytes_cuda(const Attention& attention, int64_t block_size);
void attend_blocks_cuda(const Attention& attention, const BlockMask& mask, const Tensor& out,
                        float* lse, const Context& context);

// Instruction set the CPU kernels run with on this machine, as Highway names it.
const char* attend_target() noexcept;

}  // namespace crisp
