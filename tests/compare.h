// compare.h - is an outcome right? The bound is derived, never tuned:
//   max |out - reference| <= 2 max |naive - reference| + atol
// `naive` is a plain program in the dtype under test: float sums; inputs, P and output rounded to
// the dtype. Two are run and the worse one counts: softmax_scale applied to the scores (on CUDA,
// scores added up as tensor cores do), and folded into the queries with log2 e for exp2, as every
// tiled kernel has it. atol is one unit in the last place of the largest reference + 0.3: adding to
// a number and rounding twice. Infinities and NaNs must stand in the same places.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "case.h"
#include "run.h"

namespace crisp::test {

// One quantity of all rows of a call; rows outside every segment are NaN.
struct Expected {
  std::vector<int64_t> shape;
  std::vector<double> reference;
  std::vector<float> naive, folded;  // the two plain programs
  double tolerance = 0;
};

// What the call with this mask should give.
struct Truth {
  Case config;
  Expected out;  // [token, head, dim]
  Expected lse;  // [head, token]
};
Truth truth_of(const Inputs& inputs, const OwnedMask& mask);

::testing::AssertionResult matches(const Outcome& outcome, const Truth& truth);
// Rows [begin, end) and the listed heads.
Truth cut(const Truth& truth, int64_t begin, int64_t end, const std::vector<int64_t>& heads);
// The same bits where the same kernels ran, else the truth.
::testing::AssertionResult same_or_true(const Outcome& outcome, const Outcome& expected,
                                        const Truth& truth);

// attend() with the mask of the case gives the truth.
::testing::AssertionResult is_exact(const Inputs& inputs);

// attend() of the first n tokens with every causal block gives the truth, for every n up to the
// case's q_len. Row i of causal attention does not depend on n, so one truth serves all.
::testing::AssertionResult is_exact_for_every_length(const Case& c);

// Fills in the tolerance. `dtype` is that of the outcome.
void derive_tolerance(Expected& expected, DType dtype);
::testing::AssertionResult within(const std::vector<float>& got, const Expected& expected,
                                  const char* what);

// Blocks of the mask for one head of one segment, as the oracle wants them.
reference::BlockSet block_set(const OwnedMask& mask, const MaskRows& rows, int64_t head);

}  // namespace crisp::test
