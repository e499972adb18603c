// The oracle's policies, on heads whose selection can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "reference_cases.h"

namespace crisp::reference {
namespace {

TEST(Crisp, PureColumnByHand) {
  const Head head = column_head(1280, 1280, 435);  // key block 3; offsets 717 .. 844 of the proxy
  CrispOptions options;
  options.tau_proxy = 0;
  options.min_budget_tokens = 0;
  const Selection kept = select_crisp(head, options);
  EXPECT_EQ(kept.pattern, Pattern::kVerticalSlash);
  EXPECT_EQ(kept.structural_mass, 0);
  EXPECT_EQ(kept.vertical, bits(10, {0, 3}));
  EXPECT_EQ(kept.slash, bits(10, {0, 5, 6}));  // 51 / 128 and 77 / 128, floor 1 / 8
  EXPECT_EQ(kept.pooled.count(), 0);
  // Columns 10 + 7, diagonals 10 + 5 + 4; (0,0) (3,3) (5,0) (6,0) (8,3) (9,3) were counted twice.
  EXPECT_EQ(kept.blocks.count(), 30);

  options.min_budget_tokens = 1024;
  const Selection topped = select_crisp(head, options);
  EXPECT_EQ(topped.vertical, bits(10, {0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(topped.slash, bits(10, {0, 1, 2, 3, 4, 5, 6, 7}));
  options.min_budget_tokens = 300;  // rounded up to 3 blocks
  EXPECT_EQ(select_crisp(head, options).vertical, bits(10, {0, 1, 3}));
}

TEST(Crisp, EverythingInTheSinkKeepsTheForcedOnly) {
  CrispOptions options;
  options.min_budget_tokens = 0;
  const Selection kept = select_crisp(column_head(1280, 1280, 0), options);
  EXPECT_EQ(kept.pattern, Pattern::kVerticalSlash);
  EXPECT_NEAR(kept.structural_mass, 1, 1e-14);
  EXPECT_EQ(kept.vertical, bits(10, {0}));
  EXPECT_EQ(kept.slash, bits(10, {0}));  // offsets 1152 .. 1279 are all of Delta 9: floor 0
  // A sink at column 7 leaks 7 / 128 of its mass into Delta 8, so the slash floor is above 0.
  EXPECT_EQ(select_crisp(column_head(1280, 1280, 7), options).slash, bits(10, {0, 8, 9}));
}

TEST(Crisp, WideWindowsForceMoreBlocks) {
  CrispOptions options;
  options.tau_proxy = 0;
  options.min_budget_tokens = 0;
  options.sink_tokens = 200;
  options.recency_tokens = 300;
  const Selection kept = select_crisp(column_head(1280, 1280, 7), options);
  EXPECT_EQ(kept.vertical, bits(10, {0, 1}));
  EXPECT_EQ(kept.slash, bits(10, {0, 1, 2}));  // the last two Deltas are no background: floor 0
}

TEST(Crisp, GateAndRoutes) {
  CrispOptions options;
  const Selection gated = select_crisp(random_head(1023, 1023, 4, 6), options);
  EXPECT_EQ(gated.pattern, Pattern::kDense);
  EXPECT_TRUE(std::isnan(gated.structural_mass));
  EXPECT_EQ(gated.blocks.count(), 8 * 9 / 2);
  EXPECT_EQ(gated.num_vertical(), 0);
  const Head head = random_head(1024, 1024, 4, 6);
  options.tau_proxy = 0;
  EXPECT_EQ(select_crisp(head, options).pattern, Pattern::kVerticalSlash);
  options.tau_proxy = 1.5;
  EXPECT_EQ(select_crisp(head, options).pattern, Pattern::kPooled);
  options.routing = Routing::kJsDistance;
  options.tau_js = 0;
  EXPECT_EQ(select_crisp(head, options).pattern, Pattern::kVerticalSlash);
  options.tau_js = 1;
  EXPECT_EQ(select_crisp(head, options).pattern, Pattern::kPooled);
}

TEST(Crisp, PooledHeadsKeepTheBudgetOrNot) {
  const Head head = random_head(2048, 2048, 4, 7);
  CrispOptions options;
  options.tau_proxy = 2;
  options.gamma = 0.3;
  options.min_budget_tokens = 512;
  const Selection with = select_crisp(head, options);
  EXPECT_EQ(with.num_vertical(), 4);
  EXPECT_EQ(with.num_slash(), 4);
  options.pooled_keeps_budget = false;
  const Selection without = select_crisp(head, options);
  EXPECT_EQ(without.vertical, bits(16, {0}));
  EXPECT_EQ(without.slash, bits(16, {0}));
  EXPECT_EQ(without.pooled.kept, with.pooled.kept);
  EXPECT_EQ(without.pooled.kept, pooled_prefix(pooled_map(head), 0, 0.3, false).kept);
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 16; ++j) {
      const bool forced = j <= i && (j == 0 || j == i);
      EXPECT_EQ(without.blocks.at(i, j), forced || without.pooled.at(i, j)) << i << " " << j;
    }
  }
}

TEST(Crisp, CoverageSelectionIsItsOwnRule) {
  const Head head = column_head(1280, 1280, 435);
  CrispOptions options;
  options.tau_proxy = 0;
  options.min_budget_tokens = 0;
  options.selection = SelectionRule::kCoverage;
  options.gamma = 0.6;  // Delta 6 holds 77 / 128
  EXPECT_EQ(select_crisp(head, options).vertical, bits(10, {0, 3}));
  EXPECT_EQ(select_crisp(head, options).slash, bits(10, {0, 6}));
  options.gamma = 0.95;
  EXPECT_EQ(select_crisp(head, options).slash, bits(10, {0, 5, 6}));
}

// The chunk's last queries are those of the whole prompt, so V and S are, too.
TEST(Crisp, ChunkSelectsOnItsOwnRows) {
  const Head whole = random_head(1300, 1300, 8, 8);
  Head chunk = whole;
  chunk.q = Matrix(200, 8);
  for (int64_t i = 0; i < 200; ++i) {
    for (int64_t c = 0; c < 8; ++c) chunk.q(i, c) = whole.q(1100 + i, c);
  }
  CrispOptions options;
  options.tau_proxy = 0;
  options.min_budget_tokens = 0;
  const Selection all = select_crisp(whole, options), part = select_crisp(chunk, options);
  EXPECT_EQ(part.vertical, all.vertical);
  EXPECT_EQ(part.slash, all.slash);
  EXPECT_EQ(part.blocks.first_q_block, 8);  // 1100 / 128
  ASSERT_EQ(part.blocks.rows, 3);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t j = 0; j < 11; ++j) EXPECT_EQ(part.blocks.at(r, j), all.blocks.at(8 + r, j));
  }
}

TEST(Crisp, NotFiniteIsKeptDense) {
  Head head = random_head(1280, 1280, 4, 9);
  head.k(100, 0) = kNaN;
  const Selection proxy_nan = select_crisp(head, {});
  EXPECT_EQ(proxy_nan.pattern, Pattern::kDense);
  EXPECT_TRUE(std::isnan(proxy_nan.structural_mass));
  EXPECT_EQ(proxy_nan.blocks.kept, all_blocks(head).kept);

  head = random_head(1280, 1280, 4, 9);
  head.q(5, 0) = kInf;  // only the pooled map sees it
  CrispOptions options;
  options.tau_proxy = 2;
  const Selection map_nan = select_crisp(head, options);
  EXPECT_EQ(map_nan.pattern, Pattern::kDense);
  EXPECT_TRUE(std::isfinite(map_nan.structural_mass));
  EXPECT_EQ(map_nan.blocks.kept, all_blocks(head).kept);
}

TEST(Crisp, RefusesWhatItCannotSelect) {
  Head head = random_head(1280, 1280, 4, 10);
  head.causal = false;
  EXPECT_THROW(select_crisp(head, {}), std::invalid_argument);
  EXPECT_THROW(select_flex_prefill(head, {}), std::invalid_argument);
  EXPECT_EQ(select_dense(head).blocks.count(), 100);
  EXPECT_THROW(select_crisp(random_head(1281, 1280, 4, 10), {}), std::invalid_argument);
  EXPECT_EQ(select_crisp(random_head(0, 1280, 4, 10), {}).blocks.rows, 0);
}

TEST(FlexPrefill, VerticalSlashPaperAndOfficial) {
  const Head head = random_head(2048, 2048, 4, 11);
  FlexPrefillOptions paper = FlexPrefillOptions::paper();
  paper.tau = 0;
  paper.gamma = 0.6;
  paper.min_budget_tokens = 128;
  const ProxyMap proxy = proxy_map(head, 128, 128);
  const Selection by_paper = select_flex_prefill(head, paper);
  EXPECT_EQ(by_paper.pattern, Pattern::kVerticalSlash);
  EXPECT_EQ(by_paper.vertical, select_coverage(proxy.p_v, forced_blocks(16, 128), 0.6));
  EXPECT_EQ(by_paper.slash, select_coverage(proxy.p_s, forced_blocks(16, 128), 0.6));

  FlexPrefillOptions official = FlexPrefillOptions::official();
  official.tau = 0;
  official.gamma = 0.6;
  official.min_budget_tokens = 128;
  const Selection by_code = select_flex_prefill(head, official);
  EXPECT_EQ(by_code.num_vertical(), token_count_budget(proxy.a_v, 0.6, 1));
  EXPECT_EQ(by_code.num_slash(), token_count_budget(proxy.a_s, 0.6, 1));
  EXPECT_TRUE(by_code.vertical[0]);
  EXPECT_TRUE(by_code.slash[0]);
  official.min_budget_tokens = 1700;  // 14 blocks, forced ones counted in
  EXPECT_EQ(select_flex_prefill(head, official).num_vertical(), 14);
}

TEST(FlexPrefill, PooledPaperAndOfficial) {
  const Head head = random_head(2048, 2048, 4, 12);
  FlexPrefillOptions paper = FlexPrefillOptions::paper();
  paper.tau = 1;
  paper.gamma = 0.3;
  paper.min_budget_tokens = 512;
  const Selection by_paper = select_flex_prefill(head, paper);
  EXPECT_EQ(by_paper.pattern, Pattern::kPooled);
  EXPECT_EQ(by_paper.vertical, bits(16, {0}));
  EXPECT_EQ(by_paper.slash, bits(16, {0}));

  FlexPrefillOptions official = FlexPrefillOptions::official();
  official.tau = 1;
  official.gamma = 0.3;
  official.min_budget_tokens = 512;
  const Selection by_code = select_flex_prefill(head, official);
  EXPECT_EQ(by_code.num_vertical(), 4);
  EXPECT_EQ(by_code.num_slash(), 4);
  EXPECT_EQ(by_code.pooled.count() + 1, by_paper.pooled.count());  // Q9: the crossing block
}

// Quirk Q5 on a column in the sink of a ragged length: the same diagonals, other buckets.
TEST(FlexPrefill, LeftAlignedSlash) {
  const Head head = column_head(1290, 1290, 0);  // offsets 1162 .. 1289, N_b = 11
  FlexPrefillOptions options = FlexPrefillOptions::paper();
  options.tau = 0;
  options.min_budget_tokens = 0;
  options.gamma = 0.9;
  EXPECT_EQ(select_flex_prefill(head, options).slash, bits(11, {0, 9}));  // 118 / 128 at Delta 9
  options.gamma = 1;
  EXPECT_EQ(select_flex_prefill(head, options).slash, bits(11, {0, 9, 10}));
  options.left_aligned_slash = true;  // columns 0 .. 127 of the last row: Delta 10, whole
  EXPECT_EQ(select_flex_prefill(head, options).slash, bits(11, {0, 10}));
}

TEST(FlexPrefill, NanRule) {
  const Head head = column_head(1280, 1280, 435);  // most blocks have mass 0
  FlexPrefillOptions options;
  options.tau = 1;
  EXPECT_EQ(select_flex_prefill(head, options).pattern, Pattern::kPooled);
  options.nan_routes_vertical_slash = true;
  const Selection kept = select_flex_prefill(head, options);
  EXPECT_TRUE(std::isnan(kept.js_distance));
  EXPECT_EQ(kept.pattern, Pattern::kVerticalSlash);
}

}  // namespace
}  // namespace crisp::reference
