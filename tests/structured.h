// structured.h - inputs whose heads are worth selecting from: sinks, columns, diagonals, noise.
#pragma once

#include "case.h"

namespace crisp::test {

// make_inputs(c) with structure laid over the noise of every segment, on the first 8 dimensions of
// q and k. Query heads h of one kv head differ in how strongly they use it: h % 3 == 0 hardly
// (flat, to be pooled), 1 moderately, 2 strongly. The keys offer a sink at token 0, one heavy key
// per ~200 tokens, and two rotating pairs whose score depends on query - key only.
Inputs structured_inputs(const Case& c);

// The keys rounded to multiples of 1 / 4 and every second block of 128 a copy of the one before it:
// masses tie exactly.
void make_ties(Inputs& inputs);

}  // namespace crisp::test
