// The oracle's stages, held to values worked out by hand and to the identities of the papers.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "reference_cases.h"

namespace crisp::reference {
namespace {

// ---- proxy

TEST(Proxy, ThreeKeysByHand) {
  const ProxyMap proxy = proxy_map(one_two_three(2), 1, 1);
  expect_near(proxy.map.values, {1. / 3, 2. / 3, 0, 1. / 6, 2. / 6, 3. / 6});
  expect_near(proxy.a_v, {1. / 4, 1. / 2, 1. / 4});
  expect_near(proxy.a_s, {7. / 12, 1. / 3, 1. / 12});
  EXPECT_NEAR(proxy.structural_mass, 1. / 2, 1e-14);
  expect_near(proxy.p_v, {1});
  expect_near(proxy.p_s, {1});
}

TEST(Proxy, UsesOnlyTheLast128Queries) {
  Head head = random_head(300, 300, 4, 1);
  const ProxyMap before = proxy_map(head, 128, 128);
  EXPECT_EQ(before.map.rows, 128);
  head.q(171, 0) += 1;  // the last query outside the proxy
  EXPECT_EQ(proxy_map(head, 128, 128).a_v, before.a_v);
  head.q(172, 0) += 1;  // the first inside
  EXPECT_NE(proxy_map(head, 128, 128).a_v, before.a_v);
}

// Fewer than 128 queries: as many as there are, divided by their number.
TEST(Proxy, ShortChunk) {
  const ProxyMap proxy = proxy_map(one_two_three(1), 1, 0);
  expect_near(proxy.a_v, {1. / 6, 2. / 6, 3. / 6});
  expect_near(proxy.a_s, {3. / 6, 2. / 6, 1. / 6});
  EXPECT_NEAR(proxy.structural_mass, 1. / 6, 1e-14);
}

TEST(Proxy, MassesSumToOneAndMatchTheirDefinition) {
  for (const auto& [q_len, kv_len] :
       {std::pair<int64_t, int64_t>{384, 384}, {300, 300}, {50, 300}, {200, 700}, {1, 129}}) {
    const ProxyMap proxy = proxy_map(random_head(q_len, kv_len, 8, 2), 128, 128);
    EXPECT_NEAR(sum(proxy.a_v), 1, 1e-13);
    EXPECT_NEAR(sum(proxy.a_s), 1, 1e-13);
    EXPECT_NEAR(sum(proxy.p_v), 1, 1e-13);
    EXPECT_NEAR(sum(proxy.p_s), 1, 1e-13);
    const Matrix& A = proxy.map;
    std::vector<double> p_v(proxy.p_v.size()), p_s(proxy.p_s.size());
    for (int64_t i = 0; i < A.rows; ++i) {
      for (int64_t j = 0; j < A.cols; ++j) {
        const int64_t offset = kv_len - A.rows + i - j;
        if (offset < 0) {
          EXPECT_EQ(A(i, j), 0);
          continue;
        }
        p_v[static_cast<size_t>(j / 128)] += A(i, j) / static_cast<double>(A.rows);
        p_s[static_cast<size_t>(offset / 128)] += A(i, j) / static_cast<double>(A.rows);
      }
    }
    for (size_t b = 0; b < p_v.size(); ++b) {
      EXPECT_NEAR(proxy.p_v[b], p_v[b], 1e-13);
      EXPECT_NEAR(proxy.p_s[b], p_s[b], 1e-13);
    }
  }
}

// n % 128 == 0: the proxy rows are one row block, so p_v[N_b - 1 - D] is the mass of block diagonal
// D.
TEST(Proxy, TileIdentity) {
  const ProxyMap proxy = proxy_map(random_head(512, 512, 8, 3), 128, 128);
  for (int64_t diagonal = 0; diagonal < 4; ++diagonal) {
    double mass = 0;
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t j = 0; j < 512; ++j) {
        if (3 - j / 128 == diagonal) mass += proxy.map(i, j) / 128;
      }
    }
    EXPECT_NEAR(proxy.p_v[static_cast<size_t>(3 - diagonal)], mass, 1e-13);
  }
}

TEST(Proxy, PureColumnSplitsOverTwoDiagonals) {
  const ProxyMap proxy = proxy_map(column_head(512, 512, 179), 128, 128);
  expect_near(proxy.p_v, {0, 1, 0, 0});
  expect_near(proxy.p_s, {0, 51. / 128, 77. / 128, 0});  // offsets 205 .. 332
  EXPECT_EQ(proxy.structural_mass, 0);
}

TEST(Proxy, PureDiagonalSplitsOverTwoColumns) {
  Matrix map(128, 512);
  for (int64_t i = 0; i < 128; ++i) map(i, 384 + i - 179) = 1;
  expect_near(block_sums(offset_mass(map)), {0, 1, 0, 0});
  expect_near(block_sums(column_mass(map)), {0, 51. / 128, 77. / 128, 0});  // columns 205 .. 332
}

// n = 300: by offset the buckets are 128, 128 and 44 wide; left-aligned, Delta 0 is the short one.
TEST(Proxy, SlashBucketsOfARaggedLength) {
  std::vector<double> a_s(300, 1.0);
  expect_near(block_sums(a_s), {128, 128, 44});
  expect_near(left_aligned_slash_sums(a_s), {44, 128, 128});
  for (size_t o = 0; o < 300; ++o) {
    std::vector<double> one(300, 0.0);
    one[o] = 1;
    EXPECT_EQ(block_sums(one)[o / 128], 1);
    EXPECT_EQ(left_aligned_slash_sums(one)[o < 44 ? 0 : o < 172 ? 1 : 2], 1);
  }
  std::vector<double> whole(256);
  for (size_t o = 0; o < 256; ++o) whole[o] = static_cast<double>(o);
  EXPECT_EQ(block_sums(whole), left_aligned_slash_sums(whole));
}

TEST(Proxy, StructuralMassWindows) {
  const std::vector<double> even(200, 1. / 200);
  EXPECT_NEAR(structural_mass(even, 64, 32), 96. / 200, 1e-13);
  EXPECT_NEAR(structural_mass(even, 128, 128), 1, 1e-13);  // 56 tokens in both, counted once
  EXPECT_NEAR(structural_mass(even, 1000, 1), 1, 1e-13);   // clipped to the keys
  for (const auto& [token, counted] :
       {std::pair<size_t, double>{0, 1}, {127, 1}, {128, 0}, {871, 0}, {872, 1}, {999, 1}}) {
    std::vector<double> one(1000, 0.0);
    one[token] = 1;
    EXPECT_EQ(structural_mass(one, 128, 128), counted) << token;
  }
}

TEST(Proxy, Bf16LogitsRoundToEightBits) {
  Head head = one_two_three(1);
  head.softmax_scale = 1;
  head.k = column({1 + 1. / 512, 1 + 3. / 512, 1 + 1. / 256});  // 1, 1 + 1/128, tie to even: 1
  const double e = std::exp(1. / 128);
  expect_near(proxy_rows(head, true).values, {1 / (2 + e), e / (2 + e), 1 / (2 + e)});
  const double x = std::exp(2. / 512), y = std::exp(1. / 512), total = 1 + x + y;
  expect_near(proxy_rows(head, false).values, {1 / total, x / total, y / total});
}

TEST(Proxy, NanStaysInTheRowsThatSeeIt) {
  Head head = random_head(4, 6, 3, 4);
  head.k(5, 1) = kNaN;  // only the last query sees it
  const Matrix map = proxy_rows(head);
  for (int64_t j = 0; j < 6; ++j) {
    EXPECT_TRUE(std::isnan(map(3, j)));
    EXPECT_FALSE(std::isnan(map(2, j)));
  }
  EXPECT_TRUE(std::isnan(proxy_map(head, 128, 128).structural_mass));
}

// ---- distance

TEST(Distance, PooledEstimateByHand) {
  Head head{Matrix(130, 1), Matrix(130, 1), Matrix(130, 1), 0.5, true};
  head.q(0, 0) = head.q(1, 0) = 1e6;                                     // outside the proxy
  for (int64_t i = 2; i < 130; ++i) head.q(i, 0) = i % 2 == 0 ? 0 : 2;   // mean 1
  for (int64_t j = 0; j < 128; ++j) head.k(j, 0) = j % 2 == 0 ? -3 : 3;  // mean 0
  head.k(128, 0) = 0;  // the last block: mean of two tokens
  head.k(129, 0) = 4 * std::log(3.0);
  expect_near(pooled_estimate(head), {0.25, 0.75});
}

TEST(Distance, ValuesAndBounds) {
  const double bound = std::sqrt(std::log(2.0));
  EXPECT_EQ(js_distance({0.25, 0.75}, {0.25, 0.75}), 0);
  EXPECT_NEAR(js_distance({1, 0}, {0, 1}), bound, 1e-15);
  const double divergence = 0.5 * std::log(4. / 3) + 0.25 * std::log(2. / 3) + 0.25 * std::log(2.);
  EXPECT_NEAR(js_distance({1, 0}, {0.5, 0.5}), std::sqrt(divergence), 1e-15);
  EXPECT_EQ(js_distance({1, 0}, {0.5, 0.5}), js_distance({0.5, 0.5}, {1, 0}));
  std::mt19937_64 random(5);
  for (int round = 0; round < 100; ++round) {
    std::vector<double> p = random_matrix(1, 9, random).values, q = p;
    for (double& x : q) x *= 1 + 1e-9;
    p = softmax(p);
    q = softmax(q);
    const double distance = js_distance(p, q);
    EXPECT_GE(distance, 0);
    EXPECT_LE(distance, 1e-6);
    EXPECT_LE(js_distance(p, softmax(random_matrix(1, 9, random).values)), bound);
  }
}

TEST(Distance, NanRuleOfThePublishedCode) {
  EXPECT_TRUE(std::isnan(js_distance({1, 0}, {0.5, 0.5}, true)));
  EXPECT_TRUE(std::isnan(js_distance({1, 1e-50}, {0.5, 0.5}, true)));  // 0 in float32
  EXPECT_FALSE(std::isnan(js_distance({1, 1e-50}, {0.5, 0.5}, false)));
  EXPECT_NEAR(js_distance({0.75, 0.25}, {0.5, 0.5}, true),
              js_distance({0.75, 0.25}, {0.5, 0.5}, false), 1e-15);
}

TEST(Route, Thresholds) {
  EXPECT_EQ(route_by_structural_mass(0.2, 0.2), Pattern::kVerticalSlash);
  EXPECT_EQ(route_by_structural_mass(0.1999, 0.2), Pattern::kPooled);
  EXPECT_EQ(route_by_structural_mass(kNaN, 0.2), Pattern::kDense);
  EXPECT_EQ(route_by_structural_mass(kInf, 0.2), Pattern::kDense);
  EXPECT_EQ(route_by_js_distance(0.1, 0.1), Pattern::kVerticalSlash);
  EXPECT_EQ(route_by_js_distance(0.0999, 0.1), Pattern::kPooled);
  EXPECT_EQ(route_by_js_distance(kNaN, 0.1), Pattern::kDense);
  EXPECT_EQ(route_by_js_distance(kNaN, 0.1, true), Pattern::kVerticalSlash);
}

// ---- select

TEST(Select, ForcedAndBackgroundBlocks) {
  EXPECT_EQ(forced_blocks(4, 128), bits(4, {0}));
  EXPECT_EQ(forced_blocks(4, 129), bits(4, {0, 1}));
  EXPECT_EQ(forced_blocks(2, 4096), bits(2, {0, 1}));
  EXPECT_EQ(background_blocks(5, 128, 128), bits(5, {1, 2, 3}));
  EXPECT_EQ(background_blocks(8, 200, 300), bits(8, {2, 3, 4}));
  EXPECT_EQ(background_blocks(2, 128, 128), bits(2, {}));
  EXPECT_EQ(background_blocks(2, 1024, 1024), bits(2, {}));
}

TEST(Select, NoiseFloorByHand) {
  const std::vector<double> mass = {0.5, 0.125, 0.25, 0.0625, 0.0625};
  const Bits background = background_blocks(5, 128, 128), forced = forced_blocks(5, 128);
  EXPECT_NEAR(noise_floor(mass, background), 0.4375 / 3, 1e-15);
  EXPECT_EQ(noise_floor(mass, background, NoiseFloor::kMedian), 0.125);
  EXPECT_EQ(noise_floor(mass, bits(5, {1, 2}), NoiseFloor::kMedian), 0.1875);
  EXPECT_EQ(select_above_noise_floor(mass, background, forced, 1.0), bits(5, {0, 2}));
  EXPECT_EQ(select_above_noise_floor(mass, background, forced, 0.5), bits(5, {0, 1, 2}));
  EXPECT_EQ(select_above_noise_floor(mass, background, forced, 0.25), bits(5, {0, 1, 2, 3, 4}));
  EXPECT_EQ(select_above_noise_floor(mass, background, forced, 0.99, NoiseFloor::kMedian),
            bits(5, {0, 1, 2}));
}

TEST(Select, NoiseFloorIsStrict) {
  const std::vector<double> flat = {0.125, 0.125, 0.125, 0.125, 0.5};
  const Bits background = background_blocks(5, 128, 128), forced = forced_blocks(5, 128);
  // The last block is no background and not forced: it stays because it is above the floor.
  EXPECT_EQ(select_above_noise_floor(flat, background, forced, 1.0), bits(5, {0, 4}));
  EXPECT_EQ(select_above_noise_floor(flat, background, forced, 4.0), bits(5, {0}));
}

TEST(Select, NothingInTheBackgroundKeepsTheForcedOnly) {
  const Bits forced = forced_blocks(5, 128);
  const std::vector<double> mass = {0.5, 0, 0, 0, 0.5};
  EXPECT_EQ(select_above_noise_floor(mass, background_blocks(5, 128, 128), forced, 1.0), forced);
  EXPECT_EQ(select_above_noise_floor(mass, Bits(5, false), forced, 1.0), forced);
}

TEST(Select, TopUp) {
  const std::vector<double> mass = {0.1, 0.2, 0.3, 0.2, 0.2};
  EXPECT_EQ(top_up(mass, bits(5, {0}), 0), bits(5, {0}));
  EXPECT_EQ(top_up(mass, bits(5, {0}), 1), bits(5, {0}));
  EXPECT_EQ(top_up(mass, bits(5, {0}), 2), bits(5, {0, 2}));
  EXPECT_EQ(top_up(mass, bits(5, {0}), 3), bits(5, {0, 1, 2}));  // ties: the lowest index
  EXPECT_EQ(top_up(mass, bits(5, {0, 1}), 3), bits(5, {0, 1, 2}));
  EXPECT_EQ(top_up(mass, bits(5, {0}), 4), bits(5, {0, 1, 2, 3}));
  EXPECT_EQ(top_up(mass, bits(5, {0}), 99), bits(5, {0, 1, 2, 3, 4}));
  EXPECT_EQ(top_up(mass, bits(5, {0, 3, 4}), 2), bits(5, {0, 3, 4}));
}

TEST(Select, CoverageIsTheSmallestInclusivePrefix) {
  const std::vector<double> mass = {0.0625, 0.25, 0.5, 0.0625, 0.125};
  const Bits none(5, false);
  EXPECT_EQ(select_coverage(mass, none, 0.1), bits(5, {2}));
  EXPECT_EQ(select_coverage(mass, none, 0.5), bits(5, {2}));
  EXPECT_EQ(select_coverage(mass, none, 0.75), bits(5, {1, 2}));
  EXPECT_EQ(select_coverage(mass, none, 0.751), bits(5, {1, 2, 4}));
  EXPECT_EQ(select_coverage(mass, none, 0.9), bits(5, {0, 1, 2, 4}));  // tie: block 0 before 3
  EXPECT_EQ(select_coverage(mass, none, 1.0), bits(5, {0, 1, 2, 3, 4}));
  EXPECT_EQ(select_coverage(mass, bits(5, {0}), 0.75), bits(5, {0, 1, 2}));
}

TEST(Select, TokenCountBudget) {
  const std::vector<double> even(1024, 1. / 1024);
  EXPECT_EQ(token_count_budget(even, 0.5, 1), 5);   // 512 + 1 tokens, 513 // 128 + 1
  EXPECT_EQ(token_count_budget(even, 0.95, 1), 8);  // 972 + 1 tokens
  EXPECT_EQ(token_count_budget(even, 1.0, 1), 8);   // 1025 // 128 + 1 = 9, clamped to N_b
  EXPECT_EQ(token_count_budget(even, 0.5, 7), 7);   // clamped to the minimum
  EXPECT_EQ(token_count_budget(even, 0.5, 99), 8);  // which N_b bounds
  std::vector<double> sink(1024, 0.0);
  sink[3] = 1;
  EXPECT_EQ(token_count_budget(sink, 0.95, 1), 1);  // 0 + 1 tokens
  // 127 scattered tokens hold nearly everything and still get one or two blocks: the quirk.
  std::vector<double> scattered(1024 * 128, 0.0);
  for (size_t t = 0; t < 128; ++t) scattered[t * 1024] = 1. / 128;
  EXPECT_EQ(token_count_budget(scattered, 0.95, 1), 1);    // 121 + 1 tokens
  EXPECT_EQ(token_count_budget(scattered, 0.9999, 1), 2);  // 127 + 1 tokens
}

// ---- pooled

TEST(Pooled, MapOfAChunkByHand) {
  Head head{Matrix(100, 1), Matrix(300, 1), Matrix(300, 1), 1.0, true};
  for (int64_t i = 0; i < 100; ++i) {  // positions 200 .. 255 and 256 .. 299, means 1 and 2
    head.q(i, 0) = (i < 56 ? 1 : 2) + (i % 2 == 0 ? 0.5 : -0.5);
  }
  for (int64_t j = 0; j < 300; ++j) {  // block means 0, ln 2, ln 4
    head.k(j, 0) = static_cast<double>(j / 128) * std::log(2.0) + (j % 2 == 0 ? 0.25 : -0.25);
  }
  const Matrix map = pooled_map(head);
  ASSERT_EQ(map.rows, 2);
  ASSERT_EQ(map.cols, 3);
  expect_near(map.values, {1. / 3, 2. / 3, 0, 1. / 21, 4. / 21, 16. / 21});
}

Matrix three_rows() {
  Matrix map(3, 3);
  map.values = {1, 0, 0, 0.5, 0.5, 0, 0.25, 0.25, 0.5};
  return map;
}

TEST(Pooled, PrefixInclusiveAndExclusive) {
  // Order: (0,0) 1, (1,0) (1,1) (2,2) 0.5 each, (2,0) (2,1) 0.25 each; total 3.
  const auto keeps = [](double gamma, bool exclusive) {
    return pooled_prefix(three_rows(), 0, gamma, exclusive).kept;
  };
  EXPECT_EQ(keeps(0.5, false), bits(9, {0, 3}));  // cumulative 1.5 reaches 1.5 exactly
  EXPECT_EQ(keeps(0.5, true), bits(9, {0, 3}));
  EXPECT_EQ(keeps(0.6, false), bits(9, {0, 3, 4}));  // the entry that crosses 1.8 is kept ...
  EXPECT_EQ(keeps(0.6, true), bits(9, {0, 3}));      // ... or left out
  EXPECT_EQ(keeps(0.3, false), bits(9, {0}));
  EXPECT_EQ(keeps(0.3, true), bits(9, {}));
  EXPECT_EQ(keeps(0.9, false), bits(9, {0, 3, 4, 6, 8}));
  EXPECT_EQ(keeps(1.0, false), bits(9, {0, 3, 4, 6, 7, 8}));
  EXPECT_EQ(keeps(1.0, true), bits(9, {0, 3, 4, 6, 7, 8}));  // never above the diagonal
}

TEST(Pooled, PrefixOfAChunkStartsAtItsAbsoluteRow) {
  Matrix map(2, 3);
  map.values = {0.25, 0.75, 0, 0.5, 0.25, 0.25};
  const BlockSet kept = pooled_prefix(map, 1, 1.0, false);
  EXPECT_EQ(kept.first_q_block, 1);
  EXPECT_EQ(kept.kept, bits(6, {0, 1, 3, 4, 5}));
}

}  // namespace
}  // namespace crisp::reference
