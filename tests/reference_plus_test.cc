// The oracle of crisp+: its two maps by hand, and what its rule promises.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "reference/crisp_plus.h"
#include "reference_cases.h"

namespace crisp::reference {
namespace {

CrispPlusOptions ungated() {
  CrispPlusOptions options;
  options.dense_below_tokens = 0;
  return options;
}

// The whole prompt's last q_len queries against the keys up to `end`.
Head chunk(const Head& head, int64_t begin, int64_t end) {
  const auto rows = [](const Matrix& m, int64_t first, int64_t last) {
    Matrix part(last - first, m.cols);
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < m.cols; ++c) part(r - first, c) = m(r, c);
    }
    return part;
  };
  return {rows(head.q, begin, end), rows(head.k, 0, end), rows(head.v, 0, end), head.softmax_scale,
          true};
}

bool is_subset(const BlockSet& a, const BlockSet& b) {
  for (size_t i = 0; i < a.kept.size(); ++i) {
    if (a.kept[i] && !b.kept[i]) return false;
  }
  return true;
}

TEST(MeanQueryMap, ByHand) {
  // Queries 1 in block 0 and 1, 3 in turn in block 1: means 1 and 2. Two keys that are not 0.
  Head head{Matrix(256, 1), Matrix(256, 1), Matrix(256, 1), 0.5, true};
  for (int64_t t = 0; t < 256; ++t) head.q(t, 0) = t < 128 || t % 2 == 0 ? 1 : 3;
  head.k(5, 0) = 2 * std::log(127.0);  // weight 127 for the mean 1, 127^2 for the mean 2
  head.k(200, 0) = 2 * std::log(9.0);  // seen by block 1 only: 81
  const Matrix map = mean_query_map(head);
  EXPECT_NEAR(map(0, 0), 1, 1e-14);
  EXPECT_EQ(map(0, 1), 0);
  const double first = 127 * 127 + 127, second = 81 + 127;
  EXPECT_NEAR(map(1, 0), first / (first + second), 1e-13);
  EXPECT_NEAR(map(1, 1), second / (first + second), 1e-13);
}

TEST(FinePooledMap, ByHand) {
  // Two groups a block. Queries of group 2 are 1, of group 3 2; key group 0 has mean log 2.
  Head head{Matrix(256, 1), Matrix(256, 1), Matrix(256, 1), 1, true};
  for (int64_t t = 128; t < 256; ++t) head.q(t, 0) = t < 192 ? 1 : 2;
  head.k(7, 0) = 64 * std::log(2.0);
  const Matrix map = fine_pooled_map(head, 2);
  EXPECT_NEAR(map(0, 0), 1, 1e-14);
  // Group 2 sees key groups 0 to 2: weights 2, 1 | 1. Group 3: 4, 1 | 1, 1.
  EXPECT_NEAR(map(1, 0), (3.0 / 4 + 5.0 / 7) / 2, 1e-14);
  EXPECT_NEAR(map(1, 1), (1.0 / 4 + 2.0 / 7) / 2, 1e-14);
}

TEST(FinePooledMap, ShortGroupsHaveTheMeanOfWhatTheyHold) {
  // 150 tokens: the last block holds 22 in groups of 16 and 6.
  const Head head = random_head(150, 150, 4, 3);
  const Matrix map = fine_pooled_map(head, 8);
  ASSERT_EQ(map.rows, 2);
  for (int64_t r = 0; r < 2; ++r) EXPECT_NEAR(map(r, 0) + map(r, 1), 1, 1e-14);
  const Matrix one_group = fine_pooled_map(head, 1), blocks = pooled_map(head);
  for (size_t i = 0; i < blocks.values.size(); ++i)
    EXPECT_NEAR(one_group.values[i], blocks.values[i], 1e-14)
        << "one group a block is the pooled map";
}

TEST(CrispPlus, ChunksChooseAsOneShotDoes) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const Head head = random_head(1333, 1333, 8, seed);
    const CrispPlusSelection whole = select_crisp_plus(head, ungated());
    for (int64_t begin = 0; begin < 1333; begin += 384) {
      const int64_t end = std::min<int64_t>(begin + 384, 1333);
      const BlockSet part = select_crisp_plus(chunk(head, begin, end), ungated()).blocks;
      for (int64_t r = 0; r < part.rows; ++r) {
        for (int64_t j = 0; j < part.cols; ++j)
          EXPECT_EQ(part.at(r, j), whole.blocks.at(begin / 128 + r, j))
              << begin << " " << r << " " << j;
      }
    }
  }
}

TEST(CrispPlus, AlphaAndGammaAreMonotone) {
  const Head head = random_head(1000, 1500, 8, 7);
  CrispPlusOptions loose = ungated(), tight = ungated();
  tight.alpha = 3;
  EXPECT_TRUE(
      is_subset(select_crisp_plus(head, tight).blocks, select_crisp_plus(head, loose).blocks));
  tight.alpha = 2;
  tight.gamma = 0.5;
  EXPECT_TRUE(
      is_subset(select_crisp_plus(head, tight).blocks, select_crisp_plus(head, loose).blocks));
  loose.gamma = 1;
  EXPECT_EQ(select_crisp_plus(head, loose).blocks.kept, all_blocks(head).kept);
}

TEST(CrispPlus, SinkAndDiagonalAreKept) {
  CrispPlusOptions options = ungated();
  options.sink_tokens = 200;
  for (const auto& [q_len, kv_len] :
       {std::pair<int64_t, int64_t>{900, 900}, {300, 1111}, {1, 700}}) {
    const BlockSet blocks = select_crisp_plus(random_head(q_len, kv_len, 4, 5), options).blocks;
    for (int64_t r = 0; r < blocks.rows; ++r) {
      const int64_t i = blocks.first_q_block + r;
      EXPECT_TRUE(blocks.at(r, 0) && blocks.at(r, std::min<int64_t>(1, i)) && blocks.at(r, i));
      for (int64_t j = i + 1; j < blocks.cols; ++j) EXPECT_FALSE(blocks.at(r, j));
    }
  }
}

// One key that the mean query sees: map 1 keeps its block, however many blocks there are.
TEST(CrispPlus, NeedleOfTheMeanQuery) {
  Head head = random_head(2048, 2048, 16, 11);
  for (int64_t t = 0; t < 2048; ++t) head.q(t, 0) = 4;
  head.k(700, 0) = 8;  // 8 nats above the rest, in key block 5
  const CrispPlusSelection kept = select_crisp_plus(head, ungated());
  for (int64_t r = 6; r < 16; ++r) EXPECT_TRUE(kept.mean_query.at(r, 5)) << r;
}

// A group of queries that look for what the block's mean does not: map 2 keeps it.
TEST(CrispPlus, NeedleOfAGroup) {
  Head head = random_head(2048, 2048, 16, 12);
  for (int64_t t = 0; t < 2048; ++t) {
    head.q(t, 0) = 0;
    head.k(t, 0) = t / 16 == 43 ? 8 : 0;  // a key group of block 5
    head.q(t, 1) = 0;
  }
  for (int64_t t = 15 * 128 + 32; t < 15 * 128 + 48; ++t) head.q(t, 0) = 8;  // 16 nats
  const CrispPlusSelection kept = select_crisp_plus(head, ungated());
  EXPECT_TRUE(kept.fine_pooled.at(15, 5));
}

// All keys alike: every mass ties, the floor keeps none above twice itself, and coverage takes the
// blocks from the left.
TEST(CrispPlus, TiesGoToTheLowerIndex) {
  Head head{Matrix(1280, 2), Matrix(1280, 2), Matrix(1280, 2), 1, true};
  CrispPlusOptions options = ungated();
  options.gamma = 0.5;
  const CrispPlusSelection kept = select_crisp_plus(head, options);
  EXPECT_EQ(kept.mean_query.count(), 0);
  // Row 9: key groups 0..72+g are seen by group g; nine whole blocks hold nearly all.
  for (int64_t j = 0; j < 10; ++j) EXPECT_EQ(kept.fine_pooled.at(9, j), j < 5) << j;
}

TEST(CrispPlus, AFloorOfZeroKeepsNothingByTheMeanQuery) {
  const CrispPlusSelection kept = select_crisp_plus(column_head(1280, 1280, 0), ungated());
  EXPECT_EQ(kept.mean_query.count(), 0);
  for (int64_t r = 0; r < 10; ++r) EXPECT_TRUE(kept.blocks.at(r, 0) && kept.blocks.at(r, r));
}

TEST(CrispPlus, GateNaNAndRefusals) {
  CrispPlusOptions options;
  EXPECT_TRUE(select_crisp_plus(random_head(1023, 1023, 4, 6), options).is_dense);
  EXPECT_FALSE(select_crisp_plus(random_head(1024, 1024, 4, 6), options).is_dense);
  Head head = random_head(1280, 1280, 4, 6);
  head.k(700, 1) = kNaN;  // block 5: earlier rows do not see it
  const BlockSet whole = select_crisp_plus(head, options).blocks, all = all_blocks(head);
  const BlockSet before = select_crisp_plus(chunk(head, 0, 640), ungated()).blocks;
  for (int64_t r = 0; r < 10; ++r) {
    for (int64_t j = 0; j < 10; ++j)
      EXPECT_EQ(whole.at(r, j), r < 5 ? j < 5 && before.at(r, j) : all.at(r, j)) << r << " " << j;
  }
  options.pool_groups = 7;
  EXPECT_THROW(select_crisp_plus(head, options), std::invalid_argument);
  options.pool_groups = 8;
  EXPECT_THROW(select_crisp_plus(random_head(10, 9, 4, 6), options), std::invalid_argument);
}

}  // namespace
}  // namespace crisp::reference
