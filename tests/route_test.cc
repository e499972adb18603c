// route_test.cc - the pattern of a head from given masses.
#include "route/route.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "reference/reference.h"
#include "stage.h"
#include "values.h"

namespace crisp::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Heads {
  Attention attention;
  std::vector<float> structural, vertical, estimate;
  int64_t num_blocks = 1;

  explicit Heads(std::vector<float> structural_mass) : structural(std::move(structural_mass)) {
    attention.q.num_heads = attention.k.num_heads = static_cast<int64_t>(structural.size());
  }
  HeadBatch batch() const { return {&attention, {}, 0, 0, attention.q.num_heads}; }
  ProxyMap map() {
    ProxyMap map;
    map.num_blocks = num_blocks;
    map.structural_mass = structural.data();
    map.vertical = vertical.data();
    map.pooled_estimate = estimate.data();
    return map;
  }
};

TEST(Route, StructuralMassAgainstTau) {
  // At, just below and just above tau; nothing; everything; not finite.
  Heads heads({0.2f, std::nextafter(0.2f, 0.0f), std::nextafter(0.2f, 1.0f), 0.0f, 1.0f, kNaN, kInf,
               -kInf});
  for (const float tau : {0.0f, 0.2f, 1.5f}) {
    const Staged<Routes> routes({}, [&](auto& run) {
      return route_by_structural_mass(heads.batch(), heads.map(), tau, run);
    });
    EXPECT_EQ(routes.result.js_distance, nullptr);
    for (size_t h = 0; h < heads.structural.size(); ++h) {
      EXPECT_EQ(static_cast<int>(routes.result.pattern[h]),
                static_cast<int>(reference::route_by_structural_mass(heads.structural[h], tau)))
          << "C_struct " << heads.structural[h] << " tau " << tau;
    }
  }
}

std::vector<float> random_masses(Random& random, int64_t count, int zero_every) {
  std::vector<float> masses(static_cast<size_t>(count));
  double sum = 0;
  for (size_t b = 0; b < masses.size(); ++b) {
    const bool is_zero = zero_every > 0 && random.below(zero_every) == 0;
    masses[b] = is_zero ? 0.0f : std::exp(2 * random.normal());
    sum += masses[b];
  }
  if (sum == 0) masses[0] = 1, sum = 1;
  for (float& mass : masses) mass = static_cast<float>(mass / sum);
  return masses;
}

TEST(Route, JsDistanceLikeReference) {
  Random random(5);
  for (const int64_t num_blocks : {1, 2, 7, 64, 300}) {
    Heads heads(std::vector<float>(12, 0.5f));
    heads.num_blocks = num_blocks;
    std::vector<double> want;
    for (int h = 0; h < 12; ++h) {
      const std::vector<float> p = random_masses(random, num_blocks, h % 3);
      // Equal arrays (distance 0), near ones, and unrelated ones.
      std::vector<float> q = p;
      if (h % 4 != 0) {
        const float mix = h % 4 == 1 ? 0.05f : 1.0f;
        const std::vector<float> other = random_masses(random, num_blocks, h % 2 == 0 ? 2 : 0);
        for (size_t b = 0; b < q.size(); ++b) q[b] = (1 - mix) * q[b] + mix * other[b];
      }
      heads.estimate.insert(heads.estimate.end(), p.begin(), p.end());
      heads.vertical.insert(heads.vertical.end(), q.begin(), q.end());
      want.push_back(reference::js_distance({p.begin(), p.end()}, {q.begin(), q.end()}));
    }
    const float tau = 0.1f;
    const Staged<Routes> routes(
        {}, [&](auto& run) { return route_by_js_distance(heads.batch(), heads.map(), tau, run); });
    for (size_t h = 0; h < want.size(); ++h) {
      EXPECT_NEAR(routes.result.js_distance[h], want[h], 1e-6 * want[h] + 1e-7) << h;
      EXPECT_EQ(static_cast<int>(routes.result.pattern[h]),
                static_cast<int>(reference::route_by_js_distance(want[h], tau)))
          << "distance " << want[h];
    }
  }
}

// Disjoint masses are as far apart as can be, and a mass of 0 adds nothing.
TEST(Route, JsDistanceKnownValues) {
  Heads heads({0.5f, 0.5f, kNaN, 0.5f, 0.5f});
  heads.num_blocks = 2;
  heads.estimate = {1, 0, 0.5f, 0.5f, 1, 0, kNaN, 1, 1, 0};
  heads.vertical = {0, 1, 0.5f, 0.5f, 0, 1, 0, 1, kInf, 0};
  const Staged<Routes> routes(
      {}, [&](auto& run) { return route_by_js_distance(heads.batch(), heads.map(), 0.1f, run); });
  const Pattern want[] = {Pattern::kVerticalSlash, Pattern::kPooled, Pattern::kDense,
                          Pattern::kDense, Pattern::kDense};
  for (int h = 0; h < 5; ++h) {
    EXPECT_EQ(static_cast<int>(routes.result.pattern[h]), static_cast<int>(want[h])) << h;
  }
  EXPECT_FLOAT_EQ(routes.result.js_distance[0], std::sqrt(std::log(2.0f)));
  EXPECT_EQ(routes.result.js_distance[1], 0);
}

}  // namespace
}  // namespace crisp::test
