// oracle.h - the double-precision reference on the types of crisp.h.
#pragma once

#include <functional>

#include "commands/engine.h"
#include "reference/reference.h"

namespace crisp::cli {

// Query head `q_head` of a segment, converted. `with_v` false leaves v empty: enough to select.
// `pages` of the attention are followed.
reference::Head reference_head(const Attention& attention, const Segment& segment, int64_t q_head,
                               bool with_v = true);

// What the reference selects for that head. A UserMask gives its own causal bits; `mask_row` is the
// segment's first row in it.
reference::Selection reference_select(const reference::Head& head, const Policy& policy,
                                      int64_t q_head, int64_t mask_row);

reference::CrispOptions reference_options(const Crisp& policy);
reference::FlexPrefillOptions reference_options(const FlexPrefill& policy);

// Bits of one head's rows in a mask, from row `mask_row`, causal ones only.
reference::BlockSet blocks_of(const BlockMask& mask, const reference::Head& head, int64_t q_head,
                              int64_t mask_row);

// Fills `run`, lse included, as execute() does, by the reference; no stage times. Calls
// `progress(head, segment)` before each head.
void execute_reference(const Attention& attention, Run& run,
                       const std::function<void(int64_t, int64_t)>& progress);

}  // namespace crisp::cli
