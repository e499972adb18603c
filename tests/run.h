// run.h - calls the library on a case with every buffer guarded, and masks to call it with.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "case.h"
#include "guarded.h"

namespace crisp::test {

// The rows of a mask that belong to one segment, worked out from the words of crisp.h.
struct MaskRows {
  int64_t first_row = 0, num_rows = 0, first_q_block = 0, num_kv_blocks = 0;
  // kv_blocks [0, limit) are visible to some query of row `row`.
  int64_t limit(int64_t row, bool causal) const;
};
std::vector<MaskRows> mask_rows(const Inputs& inputs, int64_t block_size);

// Owns the words, all zero at first.
class OwnedMask {
 public:
  OwnedMask(const Attention& attention, int64_t block_size);

  BlockMask mask;
  bool at(int64_t head, int64_t row, int64_t kv_block) const;
  void set(int64_t head, int64_t row, int64_t kv_block, bool kept = true);
  int64_t count(int64_t head, int64_t first_row, int64_t num_rows) const;  // set bits, any column
  int64_t count(int64_t head) const { return count(head, 0, mask.num_q_blocks); }
  bool operator==(const OwnedMask& other) const;
  Guarded& memory() const { return memory_; }

 private:
  uint32_t& word(int64_t head, int64_t row, int64_t kv_block) const;
  mutable Guarded memory_;  // a call that only reads it still checks its guards
};

// Blocks that some query may see, each kept with probability `density`.
void keep_random(OwnedMask& mask, const Inputs& inputs, double density, uint64_t seed);
// The mask its case asks for.
OwnedMask mask_of(const Inputs& inputs, const Attention& attention);

// The kernels that ran. Bits are promised within a family; two families agree within rounding.
enum class Family : uint8_t { kCpu, kSm80, kSm90 };

struct Outcome {
  Values out;              // NaN where nothing was written
  std::vector<float> lse;  // [head, token]
  Family family = Family::kCpu;
};

// attend() of a case, ready to be called, and to be called again: out in the case's layout and a
// workspace of exactly workspace_bytes(), both full of NaN, all on the case's device.
class PreparedAttend {
 public:
  PreparedAttend(const Inputs& inputs, const Call& call, const OwnedMask& mask);
  ~PreparedAttend();

  // On CUDA it returns once the work is enqueued.
  void enqueue(CUstream_st* stream = nullptr);
  // Once the device is done: the result, after a check that nothing outside the rows of the
  // segments and the workspace was written.
  Outcome read();
  // NaN again where it will write.
  void refill();
  // Makes the list of segments garbage, as a caller may once his call has returned.
  void scribble_segments();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// attend() on the case's device, with out in the case's layout and a workspace of exactly
// workspace_bytes(), both full of NaN; checks that nothing outside the rows of the segments was
// written.
Outcome run_attend(const Inputs& inputs, const Call& call, const OwnedMask& mask);
inline Outcome run_attend(const Inputs& inputs, const OwnedMask& mask) {
  return run_attend(inputs, Call(inputs), mask);
}

struct Selected {
  OwnedMask mask;
  std::vector<HeadReport> report;  // [segment, head]
  Selected(const Attention& attention, int64_t block_size) : mask(attention, block_size) {}
};
// select_blocks() with the case's policy, or with UserMask of `user_mask`, into a mask whose words
// were all ones.
Selected run_select(const Inputs& inputs, const OwnedMask* user_mask = nullptr);

// prefill() with the case's policy, or with UserMask of `user_mask`.
Outcome run_prefill(const Inputs& inputs, const OwnedMask* user_mask = nullptr);

::testing::AssertionResult same_bits(const Outcome& a, const Outcome& b);
::testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b,
                                     const char* what);

// Outcome of a segment alone, cut out of the outcome of the whole call.
Outcome cut(const Outcome& whole, const Segment& segment);
// Rows [begin, end) and the listed heads.
Outcome cut(const Outcome& whole, int64_t begin, int64_t end, const std::vector<int64_t>& heads);

}  // namespace crisp::test
