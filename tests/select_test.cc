// select_test.cc - from given masses, exactly the oracle's blocks; token budgets
// from given q and k.
#include "select/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/reference.h"
#include "run.h"
#include "stage.h"
#include "structured.h"

namespace crisp::test {
namespace {

// ---- vertical and slash sets

// Masses of some heads, patterns in turn dense, vertical-slash, pooled.
struct Masses {
  Attention attention;
  int64_t num_blocks;
  std::vector<float> vertical, slash;
  std::vector<Pattern> patterns;

  Masses(int64_t num_heads, int64_t num_blocks_) : num_blocks(num_blocks_) {
    attention.q.num_heads = attention.k.num_heads = num_heads;
    for (int64_t h = 0; h < num_heads; ++h) patterns.push_back(static_cast<Pattern>(h % 3));
    vertical.resize(static_cast<size_t>(num_heads * num_blocks));
    slash.resize(vertical.size());
  }
  HeadBatch batch() const {
    SegmentShape segment;
    segment.num_kv_blocks = num_blocks;
    return {&attention, segment, 0, 0, attention.q.num_heads};
  }
  ProxyMap map() {
    ProxyMap map;
    map.num_blocks = num_blocks;
    map.vertical = vertical.data();
    map.slash = slash.data();
    return map;
  }
  std::vector<double> of(const std::vector<float>& masses, int64_t head) const {
    const auto begin = masses.begin() + head * num_blocks;
    return {begin, begin + num_blocks};
  }
};

enum class Shape { kRandom, kTies, kZeroBackground, kFlat, kAllInTheSink, kSteep };

void fill_direction(std::vector<float>& masses, Shape shape, Random& random) {
  for (float& mass : masses) {
    switch (shape) {
      case Shape::kRandom:
        mass = std::exp(2 * random.normal()) / 100;
        break;
      case Shape::kTies:  // few values, sums exact
        mass = static_cast<float>(random.below(4)) / 64;
        break;
      case Shape::kSteep:
        mass = std::exp(8 * random.normal());
        break;
      case Shape::kFlat:  // every block is exactly at the floor
        mass = 1.0f / 64;
        break;
      default:
        mass = 0;
    }
  }
}

Masses masses_of(Shape shape, int64_t num_blocks, Random& random) {
  Masses masses(6, num_blocks);
  fill_direction(masses.vertical, shape, random);
  fill_direction(masses.slash, shape, random);
  for (int64_t h = 0; shape == Shape::kAllInTheSink && h < 6; ++h) {
    masses.vertical[static_cast<size_t>(h * num_blocks)] = 1;
    masses.slash[static_cast<size_t>((h + 1) * num_blocks - 1)] = 1;
  }
  return masses;
}

struct Settings {
  int32_t sink_tokens = 128, recency_tokens = 128, min_budget_tokens = 256;
  bool pooled_keeps_budget = true;
  float alpha = 1, gamma = 0.9f;
  NoiseFloor noise_floor = NoiseFloor::kMean;
  Selection selection = Selection::kNoiseFloor;
};

reference::CrispOptions options_of(const Settings& s) {
  reference::CrispOptions o;
  o.sink_tokens = s.sink_tokens;
  o.recency_tokens = s.recency_tokens;
  o.min_budget_tokens = s.min_budget_tokens;
  o.alpha = s.alpha;
  o.gamma = s.gamma;
  o.noise_floor = s.noise_floor == NoiseFloor::kMean ? reference::NoiseFloor::kMean
                                                     : reference::NoiseFloor::kMedian;
  o.selection = s.selection == Selection::kNoiseFloor ? reference::SelectionRule::kNoiseFloor
                                                      : reference::SelectionRule::kCoverage;
  return o;
}

Forced forced_of(const Settings& s) {
  return {ceil_div(s.sink_tokens, 128), ceil_div(s.recency_tokens, 128),
          ceil_div(s.min_budget_tokens, 128), s.pooled_keeps_budget};
}

std::vector<bool> bits_of(const Kept& kept, const uint32_t* bits, int64_t head, bool is_reversed) {
  std::vector<bool> set;
  for (int64_t b = 0; b < kept.num_blocks; ++b) {
    const int64_t bit = is_reversed ? kept.num_blocks - 1 - b : b;
    set.push_back((bits[head * kept.words() + bit / 32] >> (bit % 32) & 1) != 0);
  }
  return set;
}

// One direction of one head by the oracle's parts.
std::vector<bool> expected(Pattern pattern, const std::vector<double>& mass, int64_t first_tokens,
                           int64_t last_tokens, const Settings& s) {
  if (pattern == Pattern::kDense) return std::vector<bool>(mass.size(), false);
  if (pattern == Pattern::kVerticalSlash) {
    return reference::crisp_direction(mass, first_tokens, last_tokens, options_of(s));
  }
  const std::vector<bool> forced =
      reference::forced_blocks(static_cast<int64_t>(mass.size()), first_tokens);
  return reference::top_up(mass, forced,
                           s.pooled_keeps_budget ? ceil_div(s.min_budget_tokens, 128) : 0);
}

void expect_like_reference(Masses& masses, const Settings& s, int num_threads) {
  const Context context{.num_threads = num_threads};
  const ProxyMap map = masses.map();
  const Routes routes{masses.patterns.data(), nullptr};
  const HeadBatch batch = masses.batch();
  const Staged<Kept> kept(context, [&](auto& run) {
    return s.selection == Selection::kNoiseFloor
               ? select_above_noise_floor(batch, map, routes, forced_of(s), s.alpha, s.noise_floor,
                                          run)
               : select_coverage(batch, map, routes, forced_of(s), s.gamma, run);
  });
  for (int64_t h = 0; h < batch.num_heads; ++h) {
    const Pattern pattern = masses.patterns[static_cast<size_t>(h)];
    EXPECT_EQ(bits_of(kept.result, kept.result.vertical, h, false),
              expected(pattern, masses.of(masses.vertical, h), s.sink_tokens, s.recency_tokens, s))
        << "vertical of head " << h << ", " << masses.num_blocks << " blocks";
    EXPECT_EQ(bits_of(kept.result, kept.result.slash, h, true),
              expected(pattern, masses.of(masses.slash, h), s.recency_tokens, s.sink_tokens, s))
        << "slash of head " << h << ", " << masses.num_blocks << " blocks";
  }
}

TEST(Select, ExactlyTheReferenceFromEqualMasses) {
  Random random(31);
  for (const Shape shape : {Shape::kRandom, Shape::kTies, Shape::kZeroBackground, Shape::kFlat,
                            Shape::kAllInTheSink, Shape::kSteep}) {
    for (const int64_t num_blocks : {1, 2, 3, 4, 9, 31, 32, 33, 100}) {
      Masses masses = masses_of(shape, num_blocks, random);
      for (const NoiseFloor floor : {NoiseFloor::kMean, NoiseFloor::kMedian}) {
        for (const Selection selection : {Selection::kNoiseFloor, Selection::kCoverage}) {
          for (const int32_t budget : {0, 1, 1024, 100000}) {
            SCOPED_TRACE(::testing::Message() << "shape " << static_cast<int>(shape) << " budget "
                                              << budget << " floor " << static_cast<int>(floor));
            Settings s;
            s.noise_floor = floor;
            s.selection = selection;
            s.min_budget_tokens = budget;
            expect_like_reference(masses, s, 3);
          }
        }
      }
    }
  }
}

TEST(Select, EveryParameterCounts) {
  Random random(32);
  for (const int64_t num_blocks : {2, 5, 40}) {
    Masses masses = masses_of(Shape::kRandom, num_blocks, random);
    for (const int32_t sink : {1, 128, 129, 600}) {
      for (const int32_t recency : {1, 128, 300, 5000}) {
        for (const float strength : {0.3f, 0.75f, 1.0f}) {
          Settings s;
          s.sink_tokens = sink;
          s.recency_tokens = recency;
          s.alpha = 2 * strength;
          s.gamma = strength;
          s.pooled_keeps_budget = sink == 1;
          expect_like_reference(masses, s, 1);
          s.selection = Selection::kCoverage;
          expect_like_reference(masses, s, 1);
        }
      }
    }
  }
}

// p > alpha mu is strict: with mu = 1/8 exactly, the block at the floor is left out.
TEST(Select, TheFloorItselfIsNotAbove) {
  Masses masses(2, 6);
  masses.patterns = {Pattern::kVerticalSlash, Pattern::kVerticalSlash};
  const float above = std::nextafter(0.125f, 1.0f), below = 0.25f - above;
  masses.vertical = {0.25f, 0.125f, 0.125f, 0.125f, 0.125f, 0.25f,
                     0.25f, 0.125f, above,  below,  0.125f, 0.25f};
  masses.slash = masses.vertical;
  const ProxyMap map = masses.map();
  const Staged<Kept> kept({}, [&](auto& run) {
    return select_above_noise_floor(masses.batch(), map, {masses.patterns.data(), nullptr},
                                    {1, 1, 0, true}, 1.0f, NoiseFloor::kMean, run);
  });
  EXPECT_EQ(kept.result.vertical[0], 0b100001u);
  EXPECT_EQ(kept.result.vertical[1], 0b100101u);
}

TEST(Select, TokenBudgetTopsUp) {
  Random random(33);
  for (const Shape shape : {Shape::kRandom, Shape::kTies}) {
    Masses masses = masses_of(shape, 40, random);
    std::vector<float> left_aligned(masses.slash.size());
    fill_direction(left_aligned, shape, random);
    std::vector<int64_t> num_vertical, num_slash;
    for (int h = 0; h < 6; ++h) {
      num_vertical.push_back(1 + random.below(40));
      num_slash.push_back(1 + random.below(40));
    }
    const ProxyMap map = masses.map();
    const Staged<Kept> kept({}, [&](auto& run) {
      return select_token_budget(masses.batch(), map, {masses.patterns.data(), nullptr},
                                 {num_vertical.data(), num_slash.data(), left_aligned.data()},
                                 {1, 1, 8, true}, run);
    });
    for (int64_t h = 0; h < 6; ++h) {
      const bool is_dense = h % 3 == 0, is_pooled = h % 3 == 2;
      const std::vector<bool> none(40, false), forced = reference::forced_blocks(40, 128);
      const int64_t k_v = is_pooled ? 8 : num_vertical[static_cast<size_t>(h)];
      const int64_t k_s = is_pooled ? 8 : num_slash[static_cast<size_t>(h)];
      EXPECT_EQ(bits_of(kept.result, kept.result.vertical, h, false),
                is_dense ? none : reference::top_up(masses.of(masses.vertical, h), forced, k_v));
      EXPECT_EQ(bits_of(kept.result, kept.result.slash, h, true),
                is_dense ? none : reference::top_up(masses.of(left_aligned, h), forced, k_s));
    }
  }
}

// ---- token budgets

Staged<TokenBudget> token_budget(const HeadBatch& batch, std::vector<Pattern> patterns,
                                 float gamma) {
  const Context context{.num_threads = 2};
  return {context, [&](auto& run) {
            const ProxyMap map = compute_proxy_map(batch, {}, run);
            return count_token_budget(batch, map, {patterns.data(), nullptr}, gamma, 1, run);
          }};
}

// Head 0 is pooled, which wants the slash masses alone; the others are Vertical-Slash.
void expect_token_budgets(const Inputs& inputs, float gamma) {
  const Call call(inputs);
  const HeadBatch batch = batch_of(call.attention);
  std::vector<Pattern> patterns(static_cast<size_t>(batch.num_heads), Pattern::kVerticalSlash);
  patterns[0] = Pattern::kPooled;
  const Staged<TokenBudget> staged = token_budget(batch, patterns, gamma);
  const TokenBudget& budget = staged.result;
  for (int64_t h = 0; h < batch.num_heads; ++h) {
    SCOPED_TRACE(::testing::Message() << "head " << h << " of " << inputs.config);
    const reference::ProxyMap want =
        reference::proxy_map(reference_head(inputs, inputs.segments[0], h), 128, 128);
    if (h > 0) {
      EXPECT_EQ(budget.num_vertical[h], reference::token_count_budget(want.a_v, gamma, 1));
      EXPECT_EQ(budget.num_slash[h], reference::token_count_budget(want.a_s, gamma, 1));
    }
    const std::vector<double> slash = reference::left_aligned_slash_sums(want.a_s);
    for (size_t b = 0; b < slash.size(); ++b) {
      const size_t at = static_cast<size_t>(h) * slash.size() + b;
      EXPECT_NEAR(budget.left_aligned_slash[at], slash[b], 2e-5 * slash[b] + 1e-7) << "Delta " << b;
    }
  }
}

TEST(TokenBudget, LikeReference) {
  Case c;
  c.num_q_heads = 6;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  for (const Lengths lengths : {Lengths{1, 1},
                                {1, 300},
                                {5, 130},
                                {130, 130},
                                {200, 391},
                                {640, 640},
                                {1025, 1025},
                                {1500, 1801}}) {
    c.segments = {lengths};
    c.seed = static_cast<uint64_t>(lengths.kv_len);
    expect_token_budgets(structured_inputs(c), 0.95f);
    expect_token_budgets(structured_inputs(c), 0.6f);
  }
}

// Routing calls such heads dense. Were one called Vertical-Slash, it would still get some count.
TEST(TokenBudget, NanIsOrderedToo) {
  Case c;
  c.num_q_heads = c.num_kv_heads = 2;
  c.head_dim = 16;
  c.segments = {{1500, 1500}};
  Inputs inputs = structured_inputs(c);
  inputs.q.row(1400, 0)[3] = std::nanf("");  // every mass of head 0
  inputs.k.row(700, 1)[0] = std::nanf("");   // and of head 1
  const Call call(inputs);
  const Staged<TokenBudget> staged =
      token_budget(batch_of(call.attention), {2, Pattern::kVerticalSlash}, 0.95f);
  for (int64_t h = 0; h < 2; ++h) {
    for (const int64_t num : {staged.result.num_vertical[h], staged.result.num_slash[h]}) {
      EXPECT_GE(num, 1);
      EXPECT_LE(num, 12);
    }
  }
}

}  // namespace
}  // namespace crisp::test
