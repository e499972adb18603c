// policy_properties_test.cc - what every selection keeps, whatever its inputs: causality, diagonal
// and sink, counts, monotony, and independence of heads, layout, threads and neighbours.
#include <bit>
#include <cmath>

#include "compare.h"
#include "properties.h"
#include "structured.h"

namespace crisp::test {
namespace {

Policy draw_policy() {
  const auto min_budget = draw<int32_t>({0, 128, 256, 1024});
  const float gamma = draw({0.5f, 0.9f, 0.95f, 1.f});
  if (draw({true, true, false})) {
    Crisp crisp;
    crisp.tau_proxy = draw({0.2f, 0.2f, 0.f, 2.f});
    crisp.alpha = draw({0.5f, 1.f, 1.25f, 3.f});
    crisp.gamma = gamma;
    crisp.min_budget_tokens = min_budget;
    crisp.dense_below_tokens = 0;
    crisp.noise_floor = draw({NoiseFloor::kMean, NoiseFloor::kMedian});
    crisp.selection = draw({Selection::kNoiseFloor, Selection::kNoiseFloor, Selection::kCoverage});
    crisp.routing =
        draw({Routing::kStructuralMass, Routing::kStructuralMass, Routing::kJsDistance});
    return crisp;
  }
  FlexPrefill flex;
  flex.gamma = gamma;
  flex.min_budget_tokens = min_budget;
  flex.dense_below_tokens = 0;
  flex.variant = draw({FlexPrefill::Variant::kOfficial, FlexPrefill::Variant::kPaper});
  return flex;
}

Case draw_selection() {
  Case c = draw_case();
  c.causal = true;
  c.block_size = 128;
  c.head_dim = draw<int64_t>({16, 24, 64});
  c.segments.clear();
  for (int64_t left = draw_between(1, 2); left > 0; --left) {
    const int64_t q_len = draw_between(1, 900);
    c.segments.push_back({q_len, q_len + draw<int64_t>({0, 0, 1, 130, 700})});
  }
  c.policy = draw_policy();
  return c;
}

bool same_report(const HeadReport& a, const HeadReport& b) {
  return a.pattern == b.pattern && a.num_blocks == b.num_blocks &&
         a.num_vertical == b.num_vertical && a.num_slash == b.num_slash &&
         std::bit_cast<uint32_t>(a.structural_mass) == std::bit_cast<uint32_t>(b.structural_mass) &&
         std::bit_cast<uint32_t>(a.js_distance) == std::bit_cast<uint32_t>(b.js_distance);
}

const HeadReport& report_of(const Selected& selected, size_t segment, int64_t head) {
  return selected.report[segment * static_cast<size_t>(selected.mask.mask.num_heads) +
                         static_cast<size_t>(head)];
}

// Blocks that no query sees are never set, the diagonal always, and so is the sink's column. (The
// paper's FlexPrefill forces the diagonal and the sink through its budget of at least one block.)
RC_GTEST_PROP(PolicyProperty, MaskIsCausalAndHoldsDiagonalAndSink, ()) {
  const Inputs inputs = structured_inputs(draw_selection());
  const Case& c = inputs.config;
  const Selected selected = run_select(inputs);
  const std::vector<MaskRows> all = mask_rows(inputs, 128);
  for (size_t s = 0; s < all.size(); ++s) {
    for (int64_t head = 0; head < c.num_q_heads; ++head) {
      int64_t visible = 0;
      for (int64_t row = 0; row < all[s].num_rows; ++row) {
        const int64_t r = all[s].first_row + row, limit = all[s].limit(row, true);
        for (int64_t block = 0; block < limit; ++block) visible += selected.mask.at(head, r, block);
        require(selected.mask.at(head, r, limit - 1), "the diagonal", c);
        require(selected.mask.at(head, r, 0), "the sink's column", c);
      }
      require(selected.mask.count(head, all[s].first_row, all[s].num_rows) == visible, "causality",
              c);
      require(report_of(selected, s, head).num_blocks == visible, "num_blocks equals the popcount",
              c);
    }
  }
}

RC_GTEST_PROP(PolicyProperty, LargerAlphaKeepsASubset, ()) {
  Case c = draw_selection();
  Crisp small;
  small.tau_proxy = 0;
  small.dense_below_tokens = 0;
  small.min_budget_tokens = draw<int32_t>({0, 128, 512});
  small.alpha = draw({0.3f, 0.75f, 1.f});
  Crisp large = small;
  large.alpha = small.alpha * draw({1.01f, 1.5f, 4.f});
  c.policy = small;
  const Selected more = run_select(structured_inputs(c));
  c.policy = large;
  const Selected fewer = run_select(structured_inputs(c));
  const int64_t words = more.mask.mask.bytes() / 4;
  for (int64_t w = 0; w < words; ++w) {
    require((fewer.mask.mask.words[w] & ~more.mask.mask.words[w]) == 0, "subset", c);
  }
}

// As RC draws them: layout, pages and threads against the plain form.
RC_GTEST_PROP(PolicyProperty, LayoutChangesNothing, ()) {
  const Case c = draw_selection();
  Case plain = c;
  plain.layout = Layout::kContiguous;
  plain.page_size = 0;
  plain.num_threads = 1;
  const Selected a = run_select(structured_inputs(c)), b = run_select(structured_inputs(plain));
  require(a.mask == b.mask, "mask", c);
  for (size_t i = 0; i < a.report.size(); ++i)
    require(same_report(a.report[i], b.report[i]), "report", c);
}

RC_GTEST_PROP(PolicyProperty, PermutedHeadsPermuteMasks, ()) {
  const Case c = draw_selection();
  const HeadOrder order = draw_order(c);
  const Inputs inputs = structured_inputs(c),
               permuted = take_heads(inputs, order.q_heads, order.kv_heads);
  const Selected straight = run_select(inputs), shuffled = run_select(permuted);
  require(shuffled.mask == mask_of_heads(straight.mask, permuted, order.q_heads), "mask", c);
  for (size_t h = 0; h < order.q_heads.size(); ++h) {
    require(same_report(report_of(shuffled, 0, static_cast<int64_t>(h)),
                        report_of(straight, 0, order.q_heads[h])),
            "report", c);
  }
}

RC_GTEST_PROP(PolicyProperty, GroupedHeadsEqualRepeatedKv, ()) {
  const Case c = draw_selection();
  const Inputs inputs = structured_inputs(c);
  const Inputs repeated = take_heads(inputs, numbers(c.num_q_heads), repeated_kv_heads(c));
  require(run_select(inputs).mask == run_select(repeated).mask, "mask", c);
  require(same_bits(run_prefill(inputs), run_prefill(repeated)), c);
}

// P1: a kv group selects the same alone.
RC_GTEST_PROP(PolicyProperty, HeadsAreIndependent, ()) {
  const Case c = draw_selection();
  const int64_t group = c.num_q_heads / c.num_kv_heads,
                kv_head = draw_between(0, c.num_kv_heads - 1);
  std::vector<int64_t> heads = numbers(group);
  for (int64_t& head : heads) head += kv_head * group;
  const Inputs inputs = structured_inputs(c), part = take_heads(inputs, heads, {kv_head});
  require(run_select(part).mask == mask_of_heads(run_select(inputs).mask, part, heads), "mask", c);
}

// F2, O3: a segment selects the same alone, in blocks counted from its own first key.
RC_GTEST_PROP(PolicyProperty, SegmentsStandAlone, ()) {
  const Case c = draw_selection();
  const Inputs inputs = structured_inputs(c);
  const Selected whole = run_select(inputs);
  const std::vector<MaskRows> all = mask_rows(inputs, 128);
  for (size_t s = 0; s < all.size(); ++s) {
    const Selected alone = run_select(slice(inputs, static_cast<int64_t>(s)));
    for (int64_t head = 0; head < c.num_q_heads; ++head) {
      require(same_report(report_of(alone, 0, head), report_of(whole, s, head)), "report", c);
      for (int64_t row = 0; row < all[s].num_rows; ++row) {
        for (int64_t block = 0; block < all[s].num_kv_blocks; ++block) {
          require(
              alone.mask.at(head, row, block) == whole.mask.at(head, all[s].first_row + row, block),
              "mask", c);
        }
      }
    }
  }
}

// X2: prefill is select_blocks, then attend with the mask it returned, which gives the truth.
RC_GTEST_PROP(PolicyProperty, PrefillAttendsToTheMaskItReturns, ()) {
  const Inputs inputs = structured_inputs(draw_selection());
  const Selected selected = run_select(inputs);
  require(same_bits(run_prefill(inputs), run_attend(inputs, selected.mask)), inputs.config);
}

// A user's mask is copied, causal bits only.
RC_GTEST_PROP(PolicyProperty, UserMaskIsCopied, ()) {
  Case c = draw_case();
  const Inputs plain = make_inputs(c);
  const Call call(plain);
  OwnedMask wanted = mask_of(plain, call.attention);
  OwnedMask given(call.attention, c.block_size);
  std::copy_n(wanted.mask.words, wanted.mask.bytes() / 4, given.mask.words);
  const int64_t row_bits = 32 * given.mask.words_per_row();
  for (const MaskRows& rows : mask_rows(plain, c.block_size)) {
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      for (int64_t block = rows.limit(row, c.causal); block < row_bits; ++block)
        given.set(0, rows.first_row + row, block);
    }
  }
  Inputs inputs = plain;
  inputs.config.policy = UserMask{given.mask};
  const Selected selected = run_select(inputs);
  require(selected.mask == wanted, "mask", c);
  for (const HeadReport& report : selected.report)
    require(report.pattern == Pattern::kUserMask, "pattern", c);
}

// ---- Single cases

Case heads_of(int64_t length, Policy policy) {
  return {.num_q_heads = 3,
          .head_dim = 32,
          .segments = {{length, length}},
          .policy = policy,
          .num_threads = 2};
}

// N3: below 1,024 keys every causal block is kept, and the report says so.
TEST(PolicyFault, ShortContextsAreDense) {
  for (const Policy& policy : {Policy(Crisp{}), Policy(FlexPrefill{})}) {
    for (const int64_t length : {512, 1023, 1024}) {
      const Inputs inputs = structured_inputs(heads_of(length, policy));
      const Call call(inputs);
      const Selected selected = run_select(inputs);
      for (const HeadReport& report : selected.report) {
        EXPECT_EQ(report.pattern == Pattern::kDense, length < 1024) << length;
        if (length < 1024) {
          EXPECT_EQ(report.num_blocks, num_causal_blocks(call.attention));
        }
      }
    }
  }
}

// O1: quantised keys tie by the hundred; ten runs on any threads agree.
TEST(PolicyFault, TiesAreDecidedTheSameWay) {
  for (const Policy& policy :
       {Policy(Crisp{}), Policy(Crisp{.tau_proxy = 2}), Policy(FlexPrefill{})}) {
    Inputs inputs = structured_inputs(heads_of(2048, policy));
    for (float& value : inputs.k.data) value = std::round(value * 16) / 16;
    for (int64_t token = 128; token < 2048; ++token) {  // the same 128 keys over and over
      std::copy_n(inputs.k.row(token % 128, 0), 32, inputs.k.row(token, 0));
    }
    const Selected first = run_select(inputs);
    for (int run = 0; run < 10; ++run) {
      inputs.config.num_threads = 1 + run % 4;
      EXPECT_TRUE(run_select(inputs).mask == first.mask) << inputs.config;
    }
  }
}

// H4: proxy scores of +-1e30 in one head. It keeps sink, diagonal and the block of the top key; the
// other heads keep what they keep without it.
TEST(PolicyFault, HugeScores) {
  Inputs inputs = structured_inputs(heads_of(2048, Crisp{}));
  inputs.softmax_scale = 1;
  const Selected before = run_select(inputs);
  for (int64_t token = 0; token < 2048; ++token) {
    for (int64_t i = 0; i < 32; ++i) inputs.q.row(token, 1)[i] = 0;
    inputs.q.row(token, 1)[31] = 1e30f;
    inputs.k.row(token, 0)[31] = 0;
    for (const int64_t other : {0, 2}) inputs.q.row(token, other)[31] = 0;
  }
  const Selected flat = run_select(inputs);
  for (int64_t token = 0; token < 2048; ++token)
    inputs.k.row(token, 0)[31] = token == 700 ? 1.f : -1.f;
  const Selected huge = run_select(inputs);
  for (int64_t row = 0; row < 16; ++row) {
    EXPECT_TRUE(huge.mask.at(1, row, 0) && huge.mask.at(1, row, row)) << row;
    EXPECT_TRUE(row < 5 || huge.mask.at(1, row, 5)) << "the block of the top key, row " << row;
  }
  EXPECT_EQ(report_of(huge, 0, 1).pattern, Pattern::kPooled);
  for (const int64_t other : {0, 2})
    EXPECT_TRUE(same_report(report_of(huge, 0, other), report_of(flat, 0, other)));
  for (const float value : run_prefill(inputs).out.data) ASSERT_TRUE(std::isfinite(value));
}

}  // namespace
}  // namespace crisp::test
