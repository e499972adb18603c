// pooled_test.cc - the pooled prefix from given q and k: the oracle's blocks.
#include "select/pooled.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "compare.h"
#include "reference/reference.h"
#include "run.h"
#include "stage.h"
#include "structured.h"

namespace crisp::test {
namespace {

struct Nothing {};

OwnedMask run_pooled(const Inputs& inputs, const Call& call, std::vector<Pattern>& patterns,
                     const PooledRule& rule, int num_threads = 2) {
  OwnedMask mask(call.attention, 128);
  mask.memory().refill();
  const Context context{.num_threads = num_threads};
  for (size_t s = 0; s < inputs.segments.size(); ++s) {
    const HeadBatch batch = batch_of(call.attention, static_cast<int64_t>(s));
    const Staged<Nothing> staged(context, [&](auto& run) {
      const ProxyMap map = compute_proxy_map(batch, {}, run);
      select_pooled(batch, map, {patterns.data(), nullptr}, rule, mask.mask, run);
      return Nothing{};
    });
  }
  EXPECT_TRUE(mask.memory().intact());
  return mask;
}

// Equal but for entries whose mass is within float error of the one at which the prefix ends.
void expect_prefix(const Inputs& inputs, const PooledRule& rule, bool exactly) {
  const Call call(inputs);
  std::vector<Pattern> patterns(static_cast<size_t>(inputs.q.heads), Pattern::kPooled);
  const OwnedMask mask = run_pooled(inputs, call, patterns, rule);
  const std::vector<MaskRows> rows = mask_rows(inputs, 128);
  for (size_t s = 0; s < inputs.segments.size(); ++s) {
    for (int64_t h = 0; h < inputs.q.heads; ++h) {
      const reference::Head head = reference_head(inputs, inputs.segments[s], h);
      const reference::Matrix map = reference::pooled_map(head);
      const reference::BlockSet want =
          reference::pooled_prefix(map, rows[s].first_q_block, rule.gamma, !rule.is_inclusive);
      const reference::BlockSet got = block_set(mask, rows[s], h);
      double cut = 1;
      for (size_t e = 0; e < map.values.size(); ++e) {
        if (want.kept[e]) cut = std::min(cut, map.values[e]);
      }
      for (size_t e = 0; e < map.values.size(); ++e) {
        const bool may_differ = !exactly && std::fabs(map.values[e] - cut) < 1e-4 * cut;
        EXPECT_TRUE(got.kept[e] == want.kept[e] || may_differ)
            << "entry " << e << " mass " << map.values[e] << " cut " << cut << " segment " << s
            << " head " << h << " gamma " << rule.gamma << " of " << inputs.config;
      }
      EXPECT_EQ(mask.count(h, rows[s].first_row, rows[s].num_rows), got.count())
          << "bits outside the causal blocks";
      EXPECT_NEAR(static_cast<double>(got.count()), static_cast<double>(want.count()),
                  exactly ? 0 : 1);
    }
  }
}

Case pooled_case(std::vector<Lengths> segments) {
  Case c;
  c.num_q_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  c.segments = std::move(segments);
  return c;
}

// No gamma may fall on a whole number of rows: the flattest rows come last, so the prefix would end
// between two of them and rounding would choose.
TEST(Pooled, PrefixLikeReference) {
  for (const bool is_inclusive : {true, false}) {
    for (const float gamma : {0.01f, 0.47f, 0.95f, 1.0f}) {
      for (const int64_t n : {1, 128, 130, 257, 1025, 2500}) {
        expect_prefix(structured_inputs(pooled_case({{n, n}})), {gamma, is_inclusive}, gamma < 1);
      }
      expect_prefix(structured_inputs(pooled_case({{1, 300}, {300, 1000}, {129, 2000}})),
                    {gamma, is_inclusive}, gamma < 1);
    }
  }
}

// More q_blocks than any panel has lanes, and more kv_blocks than a word has bits.
TEST(Pooled, LongMap) {
  Case c = pooled_case({{9000, 10000}});
  c.num_q_heads = c.num_kv_heads = 1;
  c.head_dim = 8;
  expect_prefix(structured_inputs(c), {0.8f, true}, false);
}

// Equal keys: row i of the map holds i + 1 equal entries, and the cut falls among them. They go by
// ascending (row, column).
TEST(Pooled, TiesByRowThenColumn) {
  Case c = pooled_case({{1300, 1300}});
  Inputs inputs = make_inputs(c);
  std::fill(inputs.k.data.begin(), inputs.k.data.end(), 0.0f);
  for (const bool is_inclusive : {true, false}) {
    for (const float gamma : {0.05f, 0.33f, 0.55f, 0.71f, 0.93f}) {
      expect_prefix(inputs, {gamma, is_inclusive}, true);
    }
  }
}

TEST(Pooled, OtherHeadsAreNotTouchedAndNaNMeansDense) {
  Inputs inputs = structured_inputs(pooled_case({{900, 900}}));
  inputs.q.row(10, 3)[2] = NAN;  // far from the proxy rows
  const Call call(inputs);
  std::vector<Pattern> patterns = {Pattern::kDense, Pattern::kPooled, Pattern::kVerticalSlash,
                                   Pattern::kPooled};
  OwnedMask mask = run_pooled(inputs, call, patterns, {});
  EXPECT_EQ(patterns[1], Pattern::kPooled);
  EXPECT_EQ(patterns[3], Pattern::kDense);
  const int64_t words = mask.mask.num_q_blocks * mask.mask.words_per_row();
  for (const int64_t head : {0, 2, 3}) {
    for (int64_t w = 0; w < words; ++w) {
      ASSERT_EQ(mask.mask.words[head * words + w], 0xffffffffu) << "head " << head;
    }
  }
}

TEST(Pooled, SameForEveryThreadCount) {
  const Inputs inputs = structured_inputs(pooled_case({{1400, 1500}}));
  const Call call(inputs);
  std::vector<Pattern> patterns(4, Pattern::kPooled);
  const OwnedMask one = run_pooled(inputs, call, patterns, {}, 1);
  for (const int threads : {2, 3, 7}) {
    EXPECT_TRUE(run_pooled(inputs, call, patterns, {}, threads) == one) << threads;
  }
}

}  // namespace
}  // namespace crisp::test
