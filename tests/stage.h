// stage.h - calls one stage alone: a batch of heads, a workspace of exactly the size the stage
// counts, full of NaN and guarded.
#pragma once

#include <gtest/gtest.h>

#include "core/head_batch.h"
#include "core/run.h"
#include "guarded.h"

namespace crisp::test {

// All heads of segment `index`, or heads [first, first + count) of it.
inline HeadBatch batch_of(const Attention& attention, int64_t index = 0, int64_t first = 0,
                          int64_t count = -1, int64_t block_size = kBlockSize) {
  int64_t first_mask_row = 0;
  for (int64_t s = 0; s < index; ++s) {
    first_mask_row += segment_shape(segment_at(attention, s), block_size).num_q_blocks;
  }
  HeadBatch batch{&attention, segment_shape(segment_at(attention, index), block_size), index, first,
                  count < 0 ? attention.q.num_heads : count};
  batch.segment.first_mask_row = first_mask_row;
  return batch;
}

// Calls stage(run) to count and then to run, and checks that both took the same memory. What the
// second call returns points into the memory that this holds.
template <class Result>
class Staged {
 public:
  template <class Stage>
  Staged(const Context& context, Stage&& stage) : memory_(count(context, stage)) {
    Workspace workspace(memory_.bytes());
    Run run{context, workspace};
    result = stage(run);
    EXPECT_EQ(workspace.peak_bytes(), memory_.size());
    EXPECT_TRUE(memory_.intact()) << "written outside the workspace";
  }
  Result result{};

 private:
  template <class Stage>
  static size_t count(const Context& context, Stage&& stage) {
    Workspace counting = Workspace::counting();
    Run run{context, counting};
    stage(run);
    return counting.peak_bytes();
  }
  Guarded memory_;
};

}  // namespace crisp::test
