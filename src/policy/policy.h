// policy.h - how a head chooses its blocks: one overload pair and one file per policy.
#pragma once

#include <cstddef>
#include <span>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

// Scratch the policy takes from context.workspace; a pure function of shapes and num_threads.
size_t select_workspace_bytes(const Attention&, const Dense&, const Context&);
size_t select_workspace_bytes(const Attention&, const Crisp&, const Context&);
size_t select_workspace_bytes(const Attention&, const FlexPrefill&, const Context&);
size_t select_workspace_bytes(const Attention&, const UserMask&, const Context&);

// Writes every word of the mask. `report` is empty or [num_segments, num_q_heads]. Arguments are
// already checked: shapes agree and, for Crisp and FlexPrefill, attention is causal in blocks of
// 128.
void run_policy(const Attention&, const Dense&, const BlockMask&, const Context&,
                std::span<HeadReport>);
void run_policy(const Attention&, const Crisp&, const BlockMask&, const Context&,
                std::span<HeadReport>);
void run_policy(const Attention&, const FlexPrefill&, const BlockMask&, const Context&,
                std::span<HeadReport>);
void run_policy(const Attention&, const UserMask&, const BlockMask&, const Context&,
                std::span<HeadReport>);

}  // namespace crisp
