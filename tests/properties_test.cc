// properties_test.cc - what attend keeps for any case: the truth, and what must change nothing.
#include "properties.h"

#include "compare.h"

namespace crisp::test {
namespace {

RC_GTEST_PROP(AttendProperty, EqualsTheOracle, ()) {
  const Inputs inputs = make_inputs(draw_case());
  require(is_exact(inputs), inputs.config);
}

// Strides, pages, threads and padding are not in the numbers.
RC_GTEST_PROP(AttendProperty, LayoutChangesNothing, ()) {
  const Case c = draw_case();
  Case plain = c;
  plain.layout = Layout::kContiguous;
  plain.page_size = 0;
  plain.num_threads = 1;
  const Inputs inputs = make_inputs(c), plain_inputs = make_inputs(plain);
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  require(same_bits(run_attend(inputs, mask), run_attend(plain_inputs, mask)), c);
}

RC_GTEST_PROP(AttendProperty, SegmentsStandAlone, ()) {
  const Case c = draw_case();
  const Inputs inputs = make_inputs(c);
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  const Outcome whole = run_attend(inputs, call, mask);
  const auto index =
      static_cast<size_t>(draw_between(0, static_cast<int64_t>(c.segments.size()) - 1));
  const MaskRows rows = mask_rows(inputs, c.block_size)[index];
  const Inputs part = slice(inputs, static_cast<int64_t>(index));
  const Call alone(part);
  OwnedMask own(alone.attention, c.block_size);
  for (int64_t head = 0; head < c.num_q_heads; ++head) {
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      for (int64_t block = 0; block < rows.num_kv_blocks; ++block) {
        own.set(head, row, block, mask.at(head, rows.first_row + row, block));
      }
    }
  }
  require(same_bits(run_attend(part, alone, own), cut(whole, inputs.segments[index])), c);
}

RC_GTEST_PROP(AttendProperty, GroupedHeadsEqualRepeatedKv, ()) {
  const Case c = draw_case();
  const Inputs grouped = make_inputs(c);
  const OwnedMask mask = mask_of(grouped, Call(grouped).attention);
  const Inputs repeated = take_heads(grouped, numbers(c.num_q_heads), repeated_kv_heads(c));
  require(same_bits(run_attend(grouped, mask), run_attend(repeated, mask)), c);
}

RC_GTEST_PROP(AttendProperty, PermutedHeadsPermuteResults, ()) {
  const Case c = draw_case();
  const HeadOrder order = draw_order(c);
  const Inputs inputs = make_inputs(c);
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Inputs permuted = take_heads(inputs, order.q_heads, order.kv_heads);
  const Outcome outcome = run_attend(permuted, mask_of_heads(mask, permuted, order.q_heads));
  require(same_bits(outcome, cut(run_attend(inputs, mask), 0, inputs.q.tokens, order.q_heads)), c);
}

// P1: heads may be spread over calls as one likes.
RC_GTEST_PROP(AttendProperty, HalfTheHeadsGiveHalfTheResults, ()) {
  Case c = draw_case();
  const int64_t group = c.num_q_heads / c.num_kv_heads;
  const Inputs inputs = make_inputs(c);
  const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
  const Outcome whole = run_attend(inputs, mask);
  const int64_t kv_head = draw_between(0, c.num_kv_heads - 1);
  std::vector<int64_t> heads = numbers(group);
  for (int64_t& head : heads) head += kv_head * group;
  const Inputs part = take_heads(inputs, heads, {kv_head});
  require(same_bits(run_attend(part, mask_of_heads(mask, part, heads)),
                    cut(whole, 0, inputs.q.tokens, heads)),
          c);
}

// A cut at a multiple of the block on the grid of the keys changes no bit.
RC_GTEST_PROP(AttendProperty, ChunksEqualOneShot, ()) {
  Case c = draw_case();
  const int64_t boundary = draw_between(1, 3) * c.block_size;  // of positions
  const int64_t tail = draw_between(1, 150), ahead = draw_between(0, boundary - 1);
  c.causal = true;
  c.padding = c.page_size = 0;
  c.segments = {{boundary + tail - ahead, boundary + tail}};
  const Inputs whole = make_inputs(c);
  const OwnedMask mask = mask_of(whole, Call(whole).attention);
  const Outcome one_shot = run_attend(whole, mask);
  const int64_t first_row = ahead / c.block_size, q_cut = boundary - ahead;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, q_cut}, {q_cut, q_cut + tail}}) {
    const Inputs chunk = slice(whole, 0, {begin, 0}, {end, end + ahead});
    OwnedMask own(Call(chunk).attention, c.block_size);
    const MaskRows rows = mask_rows(chunk, c.block_size)[0];
    for (int64_t head = 0; head < c.num_q_heads; ++head) {
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        for (int64_t block = 0; block < rows.num_kv_blocks; ++block) {
          own.set(head, row, block, mask.at(head, rows.first_q_block + row - first_row, block));
        }
      }
    }
    require(same_bits(run_attend(chunk, own), cut(one_shot, begin, end, numbers(c.num_q_heads))),
            c);
  }
}

RC_GTEST_PROP(AttendProperty, DenseMaskHoldsTheCausalBlocks, ()) {
  Case c = draw_case();
  c.density = 1;
  const Inputs inputs = make_inputs(c);
  const Call call(inputs);
  const OwnedMask all = mask_of(inputs, call.attention);
  for (int64_t head = 0; head < c.num_q_heads; ++head) {
    require(all.count(head) == num_causal_blocks(call.attention, c.block_size), "num_causal_blocks",
            c);
  }
  const Selected selected = run_select(inputs);
  require(selected.mask == all, "the Dense policy's mask", c);
}

}  // namespace
}  // namespace crisp::test
