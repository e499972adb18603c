// properties.h - cases drawn by RapidCheck, and how a property says what failed. The seed is fixed
// unless RC_PARAMS sets another, so that a run says the same every time.
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <numeric>
#include <sstream>

#include "run.h"

namespace crisp::test {

[[maybe_unused]] inline const int kSeeded = setenv("RC_PARAMS", "seed=2609 max_success=40", 0);

template <class T>
T draw(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}
inline int64_t draw_between(int64_t lowest, int64_t highest) {
  return *rc::gen::inRange<int64_t>(lowest, highest + 1);
}

// Fails the property with the message and the case that reruns it.
inline void require(const ::testing::AssertionResult& result, const Case& c) {
  if (result) return;
  std::ostringstream text;
  text << result.message() << "\n  CRISP_CASE='" << c << "'";
  RC_FAIL(text.str());
}
inline void require(bool holds, const char* what, const Case& c) {
  require(holds ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << what, c);
}

// Any accepted case of attend, small.
inline Case draw_case() {
  Case c;
  c.num_kv_heads = draw_between(1, 3);
  c.num_q_heads = c.num_kv_heads * draw<int64_t>({1, 2, 3, 4, 5, 7, 8});
  c.head_dim = draw<int64_t>({8, 16, 24, 40, 64, 72});
  c.causal = draw({true, true, false});
  c.segments.clear();
  for (int64_t left = draw_between(1, 3); left > 0; --left) {
    const int64_t q_len = draw_between(0, 200);
    const int64_t ahead = draw<int64_t>({0, 0, 1, 64, 130, 300});
    const bool is_empty = draw_between(0, 9) == 0;
    c.segments.push_back({q_len, is_empty ? 0 : q_len + ahead});
  }
  c.padding = draw<int64_t>({0, 0, 1, 50});
  c.dtype = draw({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  c.layout =
      draw({Layout::kContiguous, Layout::kHeadMajor, Layout::kPackedQkv, Layout::kOddStrides});
  c.page_size = draw<int64_t>({0, 0, 1, 5, 16, 64, 100, 128});
  c.block_size = draw<int64_t>({128, 64});
  c.density = draw({1.f, 0.8f, 0.4f, 0.1f, 0.f});
  c.num_threads = static_cast<int>(draw_between(1, 3));
  c.seed = static_cast<uint64_t>(draw_between(1, 1000000));
  return c;
}

inline std::vector<int64_t> numbers(int64_t count) {
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), int64_t{0});
  return all;
}

// A shuffle of the kv heads, and of the query heads within each group.
struct HeadOrder {
  std::vector<int64_t> q_heads, kv_heads;
};
inline HeadOrder draw_order(const Case& c) {
  const int64_t group = c.num_q_heads / c.num_kv_heads;
  Random random(static_cast<uint64_t>(draw_between(1, 1000000)));
  const auto shuffled = [&](std::vector<int64_t> all) {
    for (size_t i = all.size(); i > 1; --i) {
      std::swap(all[i - 1], all[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    }
    return all;
  };
  HeadOrder order{{}, shuffled(numbers(c.num_kv_heads))};
  for (const int64_t kv_head : order.kv_heads) {
    for (const int64_t member : shuffled(numbers(group)))
      order.q_heads.push_back(kv_head * group + member);
  }
  return order;
}

// The kv head of every query head, so that k and v are repeated.
inline std::vector<int64_t> repeated_kv_heads(const Case& c) {
  std::vector<int64_t> heads = numbers(c.num_q_heads);
  for (int64_t& head : heads) head /= c.num_q_heads / c.num_kv_heads;
  return heads;
}

// The rows of `heads`, in that order, as a mask of their own.
inline OwnedMask mask_of_heads(const OwnedMask& mask, const Inputs& inputs,
                               const std::vector<int64_t>& heads) {
  OwnedMask taken(Call(inputs).attention, mask.mask.block_size);
  const int64_t words = mask.mask.words_per_row() * mask.mask.num_q_blocks;
  for (size_t h = 0; h < heads.size(); ++h) {
    std::copy_n(mask.mask.words + heads[h] * words, words,
                taken.mask.words + static_cast<int64_t>(h) * words);
  }
  return taken;
}

}  // namespace crisp::test
