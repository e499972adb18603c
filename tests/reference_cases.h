// reference_cases.h - small heads and comparisons for the tests of the reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "reference/reference.h"

namespace crisp::reference {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();
using Bits = std::vector<bool>;

inline Matrix column(const std::vector<double>& values) {
  Matrix m(static_cast<int64_t>(values.size()), 1);
  m.values = values;
  return m;
}

// Three keys with exp(q . k) = 1, 2, 3 for q = 1; the last `q_len` queries, all 1; v = 1, 2, 3.
inline Head one_two_three(int64_t q_len) {
  Head head{column(std::vector<double>(static_cast<size_t>(q_len), 1.0)),
            column({0, 2 * std::log(2.0), 2 * std::log(3.0)}), column({1, 2, 3}), 0.5, true};
  return head;
}

inline Matrix random_matrix(int64_t rows, int64_t cols, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  Matrix m(rows, cols);
  for (double& x : m.values) x = normal(random);
  return m;
}

inline Head random_head(int64_t q_len, int64_t kv_len, int64_t d, uint64_t seed) {
  std::mt19937_64 random(seed);
  return {random_matrix(q_len, d, random), random_matrix(kv_len, d, random),
          random_matrix(kv_len, d, random), 1 / std::sqrt(static_cast<double>(d)), true};
}

// All queries put all their attention on key `token` as soon as they see it.
inline Head column_head(int64_t q_len, int64_t kv_len, int64_t token) {
  Head head{column(std::vector<double>(static_cast<size_t>(q_len), 1.0)), Matrix(kv_len, 1),
            Matrix(kv_len, 1), 1.0, true};
  head.k(token, 0) = 1000;  // exp(-1000) is 0
  return head;
}

inline double sum(const std::vector<double>& values) {
  double total = 0;
  for (double x : values) total += x;
  return total;
}

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-14) << i;
}

// Bits with the given indices set.
inline Bits bits(size_t size, const std::vector<size_t>& set) {
  Bits b(size, false);
  for (size_t i : set) b[i] = true;
  return b;
}

}  // namespace crisp::reference
