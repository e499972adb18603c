// The reference's selections on the captured heads against an independent float32 analysis of them
// (data/README.md): routes equal, masses and distances to 1e-3, counts exact but for the blocks
// that a float32 sum cannot decide. Those are counted one by one and nothing else may differ.
#include "captures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "reference/reference.h"

namespace crisp::reference {
namespace {

constexpr double kMassTolerance = 1e-3;  // of the threshold: a block this close may fall either way
constexpr double kCumulativeTolerance = 1e-5;  // of the target: float32 sums of up to 2,080 masses

// Blocks a float32 run may decide otherwise, and how many blocks of the mask that may move.
struct Undecided {
  int64_t entries = 0, blocks = 0;
  void add(int64_t weight) { ++entries, blocks += weight; }
  void add(const Undecided& other) { entries += other.entries, blocks += other.blocks; }
};

// Number of (q_block, kv_block) pairs of column or diagonal `b`.
int64_t blocks_of(size_t num_blocks, size_t b) { return static_cast<int64_t>(num_blocks - b); }

// Of "mass > threshold"; the forced block 0 is decided.
Undecided near_threshold(const std::vector<double>& mass, double threshold) {
  Undecided undecided;
  for (size_t b = 1; b < mass.size(); ++b) {
    if (std::abs(mass[b] - threshold) <= kMassTolerance * threshold) {
      undecided.add(blocks_of(mass.size(), b));
    }
  }
  return undecided;
}

// Of "the heaviest k blocks": a kept and a left-out block whose masses lie closer than the
// tolerance may trade places. `weight(size, b)` is how many blocks of the mask entry b stands for.
template <class Weight>
Undecided near_cut(const std::vector<double>& mass, const std::vector<bool>& keep, Weight weight) {
  double lightest_kept = INFINITY, heaviest_left = 0;
  for (size_t b = 1; b < mass.size(); ++b) {
    if (keep[b]) lightest_kept = std::min(lightest_kept, mass[b]);
    if (!keep[b]) heaviest_left = std::max(heaviest_left, mass[b]);
  }
  Undecided undecided;
  if (heaviest_left < lightest_kept * (1 - kMassTolerance)) return undecided;
  for (size_t b = 1; b < mass.size(); ++b) {
    const double cut = keep[b] ? heaviest_left : lightest_kept;
    if (std::abs(mass[b] - cut) <= kMassTolerance * cut) undecided.add(weight(mass.size(), b));
  }
  return undecided;
}

// Of "the smallest prefix that reaches gamma": an entry before which the sum is within the
// tolerance of the target.
template <class Weight>
Undecided near_coverage(const std::vector<double>& mass, double gamma, Weight weight) {
  Undecided undecided;
  double cumulative = 0;
  for (int64_t b : descending(mass)) {
    if (std::abs(cumulative - gamma) <= kCumulativeTolerance && b != 0) {
      undecided.add(weight(mass.size(), static_cast<size_t>(b)));
    }
    cumulative += mass[static_cast<size_t>(b)];
  }
  return undecided;
}

// What the reference reads from one captured head, and the figures to hold it to.
struct Case {
  std::string name;
  nlohmann::json expected;
  ProxyMap proxy;  // without the map itself
  double distance = 0;
  Matrix pooled;
};

std::vector<Case> read_cases() {
  std::vector<Case> cases;
  const nlohmann::json all = expected_figures();
  for (const auto& [file, figures] : all.items()) {
    const Capture capture(file);
    if (capture.num_q_heads() != figures.at("shape").at("num_q_heads")) {
      throw std::runtime_error(file + " and expected.json differ in shape");
    }
    for (const auto& expected : figures.at("heads")) {
      const int64_t index = expected.at("head");
      const Head head = capture.head(index);
      ProxyMap proxy = proxy_map(head, 128, 128);
      proxy.map = {};
      const double distance = js_distance(pooled_estimate(head), proxy.p_v);
      cases.push_back({file + " head " + std::to_string(index), expected, std::move(proxy),
                       distance, pooled_map(head)});
    }
  }
  return cases;
}

// Read once: the proxy maps are most of this test's time.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = read_cases();
  return all;
}

void expect_count(int64_t actual, const nlohmann::json& expected, int64_t allowed) {
  EXPECT_LE(std::abs(actual - expected.get<int64_t>()), allowed)
      << actual << " instead of " << expected << ", undecided " << allowed;
}

// The mask of 64 x 64 blocks, nothing kept.
BlockSet grid() { return {0, 64, 64, std::vector<bool>(64 * 64, false)}; }

std::string name(Pattern pattern) {
  return pattern == Pattern::kVerticalSlash ? "vertical_slash"
         : pattern == Pattern::kPooled      ? "pooled"
                                            : "dense";
}

TEST(Captures, RoutesAndStatistics) {
  ASSERT_EQ(cases().size(), 15u);
  for (const auto& [head, expected, proxy, distance, pooled] : cases()) {
    SCOPED_TRACE(head);
    EXPECT_EQ(name(route_by_structural_mass(proxy.structural_mass, 0.2)),
              expected.at("route crisp tau_proxy=0.2"));
    EXPECT_EQ(name(route_by_js_distance(distance, 0.1)), expected.at("route flexprefill tau=0.1"));
    EXPECT_NEAR(proxy.structural_mass, expected.at("structural_mass"), 1e-3);
    EXPECT_NEAR(structural_mass(proxy.a_v, 128, 0), expected.at("sink_mass"), 1e-3);
    EXPECT_NEAR(structural_mass(proxy.a_v, 0, 128), expected.at("recency_mass"), 1e-3);
    EXPECT_NEAR(distance, expected.at("js_distance"), 1e-3);
    const std::vector<bool> background = background_blocks(64, 128, 128);
    const double floor_v = expected.at("noise_floor_vertical");
    const double floor_s = expected.at("noise_floor_slash");
    EXPECT_NEAR(noise_floor(proxy.p_v, background), floor_v, 1e-3 * floor_v);
    EXPECT_NEAR(noise_floor(proxy.p_s, background), floor_s, 1e-3 * floor_s);
  }
}

// The policies as a whole give the routes, and on a head of either pattern the counts.
TEST(Captures, WholePolicies) {
  const nlohmann::json figures = expected_figures().at("book-8k-layer05-group0.safetensors");
  const Capture capture("book-8k-layer05-group0.safetensors");
  for (const auto& expected : figures.at("heads")) {
    const Head head = capture.head(expected.at("head"));
    const Selection crisp = select_crisp(head, {});
    ASSERT_EQ(name(crisp.pattern), expected.at("route crisp tau_proxy=0.2"));
    const nlohmann::json& kept =
        expected.at(crisp.pattern == Pattern::kPooled ? "pooled gamma=0.95 + 8 vertical + 8 slash"
                                                      : "vertical_slash alpha=1.0");
    EXPECT_EQ(crisp.blocks.count(), kept.at("num_blocks"));
    if (crisp.pattern == Pattern::kVerticalSlash) {
      EXPECT_EQ(crisp.num_vertical(), kept.at("num_vertical"));
      EXPECT_EQ(crisp.num_slash(), kept.at("num_slash"));
    }
    const Selection flex = select_flex_prefill(head, FlexPrefillOptions::official());
    EXPECT_EQ(name(flex.pattern), expected.at("route flexprefill tau=0.1"));
  }
}

TEST(Captures, VerticalSlashAboveTheNoiseFloor) {
  int64_t num_undecided = 0;
  for (const auto& [head, expected, proxy, distance, pooled] : cases()) {
    for (const char* alpha : {"1.0", "1.25", "1.5"}) {
      SCOPED_TRACE(head + " alpha " + alpha);
      const nlohmann::json& figures = expected.at(std::string("vertical_slash alpha=") + alpha);
      CrispOptions options;
      options.alpha = std::stod(alpha);
      Undecided all;
      const auto direction = [&](const std::vector<double>& mass, const nlohmann::json& num) {
        const std::vector<bool> keep = crisp_direction(mass, 128, 128, options);
        const double floor = noise_floor(mass, background_blocks(64, 128, 128));
        const Undecided undecided = near_threshold(mass, options.alpha * floor);
        expect_count(count(keep), num, undecided.entries);
        all.add(undecided);
        if (count(keep) == 8) all.add(near_cut(mass, keep, blocks_of));  // the minimum may bind
        return keep;
      };
      const std::vector<bool> vertical = direction(proxy.p_v, figures.at("num_vertical"));
      const std::vector<bool> slash = direction(proxy.p_s, figures.at("num_slash"));
      expect_count(unite(vertical, slash, grid()).count(), figures.at("num_blocks"), all.blocks);
      num_undecided += all.entries;
    }
  }
  EXPECT_EQ(num_undecided, 0);
}

TEST(Captures, VerticalSlashByCoverage) {
  int64_t num_undecided = 0;
  for (const auto& [head, expected, proxy, distance, pooled] : cases()) {
    SCOPED_TRACE(head);
    const nlohmann::json& figures = expected.at("vertical_slash gamma=0.95");
    CrispOptions options;
    options.selection = SelectionRule::kCoverage;
    options.min_budget_tokens = 0;
    Undecided all;
    const auto direction = [&](const std::vector<double>& mass, const nlohmann::json& num) {
      const std::vector<bool> keep = crisp_direction(mass, 128, 128, options);
      const Undecided undecided = near_coverage(mass, options.gamma, blocks_of);
      expect_count(count(keep), num, undecided.entries);
      all.add(undecided);
      all.add(near_cut(mass, keep, blocks_of));
      return keep;
    };
    const std::vector<bool> vertical = direction(proxy.p_v, figures.at("num_vertical"));
    const std::vector<bool> slash = direction(proxy.p_s, figures.at("num_slash"));
    expect_count(unite(vertical, slash, grid()).count(), figures.at("num_blocks"), all.blocks);
    num_undecided += all.entries;
  }
  EXPECT_LE(num_undecided, 2);
}

TEST(Captures, Pooled) {
  int64_t num_undecided = 0;
  for (const auto& [head, expected, proxy, distance, pooled] : cases()) {
    SCOPED_TRACE(head);
    const BlockSet prefix = pooled_prefix(pooled, 0, 0.95, /*exclusive=*/false);
    std::vector<double> share = pooled.values;
    for (double& x : share) x /= static_cast<double>(pooled.rows);
    const auto one = [](size_t, size_t) { return int64_t{1}; };
    Undecided all = near_coverage(share, 0.95, one);
    all.add(near_cut(share, prefix.kept, one));
    const std::vector<bool> forced = forced_blocks(64, 128);
    expect_count(unite(forced, forced, prefix).count(),
                 expected.at("pooled gamma=0.95").at("num_blocks"), all.blocks);
    const std::vector<bool> vertical = top_up(proxy.p_v, forced, 8);
    const std::vector<bool> slash = top_up(proxy.p_s, forced, 8);
    all.add(near_cut(proxy.p_v, vertical, blocks_of));
    all.add(near_cut(proxy.p_s, slash, blocks_of));
    expect_count(unite(vertical, slash, prefix).count(),
                 expected.at("pooled gamma=0.95 + 8 vertical + 8 slash").at("num_blocks"),
                 all.blocks);
    num_undecided += all.entries;
  }
  EXPECT_LE(num_undecided, 12);
}

}  // namespace
}  // namespace crisp::reference
