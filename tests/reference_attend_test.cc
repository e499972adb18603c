// The oracle's attention, merge and measures, by hand and against each other.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "reference_cases.h"

namespace crisp::reference {
namespace {

TEST(Attend, ThreeKeysByHand) {
  const Head head = one_two_three(3);
  const AttendResult dense = attend(head, all_blocks(head));
  expect_near(dense.out.values, {1, 5. / 3, 14. / 6});
  expect_near(dense.lse, {0, std::log(3.0), std::log(6.0)});

  BlockSet blocks = empty_blocks(head, 1);  // one token per block
  blocks.at(2, 0) = blocks.at(2, 2) = true;
  blocks.at(1, 2) = true;  // not causal: ignored
  const AttendResult sparse = attend(head, blocks, 1);
  expect_near(sparse.out.values, {0, 0, 2.5});
  EXPECT_EQ(sparse.lse[0], -kInf);
  EXPECT_EQ(sparse.lse[1], -kInf);
  EXPECT_NEAR(sparse.lse[2], std::log(4.0), 1e-15);
  EXPECT_NEAR(coverage(head, blocks, 1), 4. / 6 / 3, 1e-15);
  EXPECT_NEAR(coverage_rows(head, blocks, {2}, 1), 4. / 6, 1e-15);
}

TEST(Attend, NonCausalAndOtherBlockSizes) {
  Head head = one_two_three(3);
  head.causal = false;
  expect_near(attend(head, all_blocks(head)).out.values, {14. / 6, 14. / 6, 14. / 6});
  head = random_head(150, 200, 8, 13);
  for (const bool causal : {true, false}) {
    head.causal = causal;
    const AttendResult a = attend(head, all_blocks(head)),
                       b = attend(head, all_blocks(head, 64), 64);
    EXPECT_EQ(a.out.values, b.out.values);
    EXPECT_EQ(a.lse, b.lse);
    EXPECT_NEAR(coverage(head, all_blocks(head, 64), 64), 1, 1e-13);
  }
}

TEST(Attend, ChunkIsBottomRightAligned) {
  const Head whole = random_head(300, 300, 8, 14);
  Head chunk = whole;
  chunk.q = Matrix(70, 8);
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t c = 0; c < 8; ++c) chunk.q(i, c) = whole.q(230 + i, c);
  }
  BlockSet some = empty_blocks(whole), part = empty_blocks(chunk);
  ASSERT_EQ(part.first_q_block, 1);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j <= i; ++j) some.at(i, j) = (i + j) % 2 == 0;
  }
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t j = 0; j < 3; ++j) part.at(r, j) = some.at(1 + r, j);
  }
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 70; ++i) rows.push_back(230 + i);
  const AttendResult expected = attend_rows(whole, some, rows), actual = attend(chunk, part);
  EXPECT_EQ(actual.out.values, expected.out.values);
  EXPECT_EQ(actual.lse, expected.lse);
}

TEST(Attend, RefusesBlocksOfAnotherGrid) {
  const Head head = random_head(200, 300, 4, 15);
  EXPECT_THROW(attend(head, all_blocks(head, 64)), std::invalid_argument);
  BlockSet shifted = all_blocks(head, 64);
  shifted.first_q_block = 0;
  EXPECT_THROW(attend(head, shifted, 64), std::invalid_argument);
}

TEST(Attend, NoKeysIsAnEmptyState) {
  Head head = random_head(2, 0, 4, 16);
  head.causal = false;
  const AttendResult empty = attend(head, all_blocks(head));
  expect_near(empty.out.values, std::vector<double>(8, 0.0));
  EXPECT_EQ(empty.lse, std::vector<double>(2, -kInf));
}

TEST(Merge, DisjointBlocksGiveTheWhole) {
  const Head head = random_head(300, 300, 8, 17);
  BlockSet a = empty_blocks(head), b = a;
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j <= i; ++j) (j % 2 == 0 ? a : b).at(i, j) = true;  // row 0 of b is empty
  }
  const AttendResult whole = attend(head, all_blocks(head));
  const AttendResult merged = merge(attend(head, a), attend(head, b));
  EXPECT_LE(relative_error(merged.out, whole.out), 1e-14);
  expect_near(merged.lse, whole.lse);
}

TEST(Merge, EmptyStates) {
  const AttendResult empty{column({0}), {-kInf}}, full{column({3}), {2.0}};
  EXPECT_EQ(merge(empty, empty).out(0, 0), 0);
  EXPECT_EQ(merge(empty, empty).lse[0], -kInf);
  EXPECT_EQ(merge(empty, full).out(0, 0), 3);
  EXPECT_EQ(merge(full, empty).lse[0], 2.0);
  const AttendResult nan{column({kNaN}), {kNaN}};
  EXPECT_TRUE(std::isnan(merge(empty, nan).out(0, 0)));
  EXPECT_TRUE(std::isnan(merge(nan, empty).lse[0]));
  EXPECT_THROW(merge(full, AttendResult{Matrix(2, 1), {0, 0}}), std::invalid_argument);
}

TEST(RelativeError, ByHand) {
  EXPECT_NEAR(relative_error(column({3, 4.5}), column({3, 4})), 0.1, 1e-15);
  EXPECT_EQ(relative_error(column({0, 0}), column({0, 0})), 0);
  EXPECT_EQ(relative_error(column({0, 1}), column({0, 0})), kInf);
  EXPECT_TRUE(std::isnan(relative_error(column({kNaN}), column({1}))));
}

}  // namespace
}  // namespace crisp::reference
