// select.cc - route and select on the GPU against the same stages on the CPU, from equal
// masses: equal patterns and sets, bit for bit.
#include "select/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "on_device.h"
#include "route/route.h"
#include "values.h"

namespace crisp::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using RouteCuda = Cuda;
using SelectCuda = Cuda;

// ---- route

TEST_F(RouteCuda, StructuralMass) {
  std::vector<float> mass = {0.2f, std::nextafter(0.2f, 0.0f), 0, 1, kNan, kInfinity, -kInfinity};
  Random random(41);
  while (mass.size() < 300) mass.push_back(static_cast<float>(random.uniform()));
  HeadBatch batch;
  batch.num_heads = static_cast<int64_t>(mass.size());
  std::vector<Pattern> want(mass.size());
  ProxyMap map;
  map.structural_mass = mass.data();
  route_by_structural_mass_cpu(batch, map, 0.2f, {want.data(), nullptr});

  const OnDevice<float> device_mass(mass);
  const OnDevice<Pattern> pattern(std::vector<Pattern>(mass.size(), Pattern::kUserMask));
  map.structural_mass = device_mass.data();
  route_by_structural_mass_cuda(batch, map, 0.2f, {pattern.data(), nullptr}, nullptr);
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(pattern.read(), want);
}

// Two distributions per head: equal ones, disjoint ones, near ones, and some that are not finite.
TEST_F(RouteCuda, JsDistance) {
  constexpr int64_t kHeads = 32;
  Random random(42);
  for (const int64_t num_blocks : {1, 2, 7, 100, 512, 513, 4096, 10000}) {
    std::vector<float> estimate(at(kHeads * num_blocks)), vertical(estimate.size());
    std::vector<float> structural(at(kHeads), 0.5f);
    for (int64_t h = 0; h < kHeads; ++h) {
      float* p = estimate.data() + h * num_blocks;
      float* q = vertical.data() + h * num_blocks;
      for (int64_t b = 0; b < num_blocks; ++b) {
        p[b] = h % 8 == 1 ? static_cast<float>(b % 2) : std::exp(2 * random.normal());
        q[b] = h % 8 == 0   ? p[b]
               : h % 8 == 1 ? static_cast<float>(1 - b % 2)
                            : p[b] * std::exp(0.2f * static_cast<float>(h % 8) * random.normal());
      }
      for (float* side : {p, q}) {
        const float sum = std::max(std::accumulate(side, side + num_blocks, 0.0f), 1e-20f);
        for (int64_t b = 0; b < num_blocks; ++b) side[b] /= sum;
      }
    }
    estimate[at(2 * num_blocks)] = kNan;
    vertical[at(11 * num_blocks - 1)] = kInfinity;
    structural[3] = kNan;

    HeadBatch batch;
    batch.num_heads = kHeads;
    std::vector<Pattern> want(at(kHeads));
    std::vector<float> want_distance(at(kHeads));
    ProxyMap map;
    map.num_blocks = num_blocks;
    map.pooled_estimate = estimate.data();
    map.vertical = vertical.data();
    map.structural_mass = structural.data();
    constexpr float kTau = 0.1f;
    route_by_js_distance_cpu(batch, map, kTau, {want.data(), want_distance.data()});

    const OnDevice<float> device_estimate(estimate), device_vertical(vertical);
    const OnDevice<float> device_structural(structural), distance(std::vector<float>(at(kHeads)));
    const OnDevice<Pattern> pattern(std::vector<Pattern>(at(kHeads), Pattern::kUserMask));
    map.pooled_estimate = device_estimate.data();
    map.vertical = device_vertical.data();
    map.structural_mass = device_structural.data();
    route_by_js_distance_cuda(batch, map, kTau, {pattern.data(), distance.data()}, nullptr);
    ASSERT_CUDA(cudaGetLastError());
    const std::vector<float> got_distance = distance.read();
    const std::vector<Pattern> got = pattern.read();
    for (size_t h = 0; h < at(kHeads); ++h) {
      SCOPED_TRACE(::testing::Message() << "head " << h << " of " << num_blocks << " blocks");
      EXPECT_EQ(std::isfinite(got_distance[h]), std::isfinite(want_distance[h]));
      // The sums, below 1, differ by rounding alone; the root of a sum of 0 magnifies that.
      if (std::isfinite(want_distance[h])) {
        EXPECT_NEAR(got_distance[h], want_distance[h], 1e-6);
      }
      // NaN compares false: those heads must agree as well.
      if (!(std::abs(want_distance[h] - kTau) <= 1e-6)) {
        EXPECT_EQ(got[h], want[h]);
      }
    }
  }
}

// ---- select

// kTies, kFlat and kTenths have sums that are exact in any order.
enum class Shape { kRandom, kTies, kFlat, kTenths, kNothing, kAllInTheSink, kNearlyFlat, kSteep };
constexpr Shape kShapes[] = {Shape::kRandom,     Shape::kTies,    Shape::kFlat,
                             Shape::kTenths,     Shape::kNothing, Shape::kAllInTheSink,
                             Shape::kNearlyFlat, Shape::kSteep};

float mass_of(Shape shape, Random& random) {
  switch (shape) {
    case Shape::kRandom:
      return std::exp(2 * random.normal()) / 100;
    case Shape::kTies:
      return static_cast<float>(random.below(4)) / 64;
    case Shape::kFlat:  // every block is exactly at the floor
      return 1.0f / 64;
    case Shape::kTenths:
      return 0.1f;
    case Shape::kNearlyFlat:  // the last digit decides
      return 0.5f + static_cast<float>(random.below(3)) * 0x1p-24f;
    case Shape::kSteep:
      return std::exp(8 * random.normal());
    default:
      return 0;
  }
}

struct Masses {
  static constexpr int64_t kHeads = 6;
  int64_t num_blocks;
  std::vector<Pattern> patterns = patterns_in_turn(kHeads);
  std::vector<float> vertical, slash;
  std::vector<int64_t> num_vertical, num_slash;  // of kTokenBudget

  Masses(Shape shape, int64_t num_blocks_, Random& random) : num_blocks(num_blocks_) {
    for (int64_t i = 0; i < kHeads * num_blocks; ++i) {
      vertical.push_back(mass_of(shape, random));
      slash.push_back(mass_of(shape, random));
    }
    for (int64_t h = 0; h < kHeads; ++h) {
      num_vertical.push_back(1 + random.below(num_blocks));
      num_slash.push_back(random.below(2 * num_blocks));
      if (shape != Shape::kAllInTheSink) continue;
      vertical[at(h * num_blocks)] = 1;
      slash[at((h + 1) * num_blocks - 1)] = 1;
    }
  }
};

struct Settings {
  Rule rule = Rule::kNoiseFloor;
  Forced forced;
  float alpha = 1, gamma = 0.9f;
  NoiseFloor noise_floor = NoiseFloor::kMean;
};

SelectJob job_of(const Settings& s, const HeadBatch& batch, const ProxyMap& map,
                 const Routes& routes, const TokenBudget& budget, const Kept& kept) {
  SelectJob job{batch, map, routes, s.forced, s.rule, s.alpha, s.gamma, s.noise_floor};
  job.budget = budget;
  job.kept = kept;
  return job;
}

void expect_like_cpu(Masses& m, const Settings& s) {
  SCOPED_TRACE(::testing::Message()
               << m.num_blocks << " blocks, rule " << static_cast<int>(s.rule) << ", floor "
               << static_cast<int>(s.noise_floor) << ", gamma " << s.gamma << ", alpha " << s.alpha
               << ", min_blocks " << s.forced.min_blocks);
  HeadBatch batch;
  batch.num_heads = Masses::kHeads;
  ProxyMap map;
  map.num_blocks = m.num_blocks;
  map.vertical = m.vertical.data();
  map.slash = m.slash.data();
  Routes routes{m.patterns.data(), nullptr};
  Kept kept{m.num_blocks, nullptr, nullptr};
  std::vector<uint32_t> vertical(at(batch.num_heads * kept.words()), ~0u), slash = vertical;
  const OnDevice<uint32_t> got_vertical(vertical), got_slash(slash);
  kept.vertical = vertical.data();
  kept.slash = slash.data();
  SelectJob job = job_of(s, batch, map, routes,
                         {m.num_vertical.data(), m.num_slash.data(), m.slash.data()}, kept);
  std::vector<int32_t> order(at(m.num_blocks));
  std::vector<float> scratch(at(m.num_blocks));
  job.order = order.data();
  job.masses = scratch.data();
  select_cpu(job);

  const OnDevice<Pattern> patterns(m.patterns);
  const OnDevice<float> mass_vertical(m.vertical), mass_slash(m.slash);
  const OnDevice<int64_t> num_vertical(m.num_vertical), num_slash(m.num_slash);
  map.vertical = mass_vertical.data();
  map.slash = mass_slash.data();
  routes.pattern = patterns.data();
  kept.vertical = got_vertical.data();
  kept.slash = got_slash.data();
  select_cuda(job_of(s, batch, map, routes,
                     {num_vertical.data(), num_slash.data(), mass_slash.data()}, kept),
              nullptr);
  ASSERT_CUDA(cudaGetLastError());
  EXPECT_EQ(got_vertical.read(), vertical);
  EXPECT_EQ(got_slash.read(), slash);
}

void expect_like_cpu_by_every_rule(Masses& m, Shape shape, const Forced& forced) {
  SCOPED_TRACE(::testing::Message() << "shape " << static_cast<int>(shape));
  for (const float alpha : {0.75f, 1.0f, 1.25f}) {
    expect_like_cpu(m, {Rule::kNoiseFloor, forced, alpha, 0, NoiseFloor::kMean});
    expect_like_cpu(m, {Rule::kNoiseFloor, forced, alpha, 0, NoiseFloor::kMedian});
  }
  for (const float gamma : {0.5f, 0.9f, 1.0f}) {
    // All of a steep mass: its tail is below the rounding of the sums, which differ.
    if (shape == Shape::kSteep && gamma == 1) continue;
    expect_like_cpu(m, {Rule::kCoverage, forced, 0, gamma, NoiseFloor::kMean});
  }
  expect_like_cpu(m, {Rule::kTokenBudget, forced, 0, 0, NoiseFloor::kMean});
}

TEST_F(SelectCuda, EveryRuleOnEveryShape) {
  Random random(43);
  for (const int64_t num_blocks : {1, 2, 33, 300, 512, 4096, 8192, 8193, 10000}) {
    for (const Shape shape : kShapes) {
      Masses masses(shape, num_blocks, random);
      expect_like_cpu_by_every_rule(masses, shape, {1, 1, 8, true});
    }
  }
}

TEST_F(SelectCuda, EveryNumberOfBlocks) {
  Random random(44);
  for (int64_t num_blocks = 1; num_blocks <= 300; ++num_blocks) {
    const Shape shape = kShapes[num_blocks % 8];
    Masses masses(shape, num_blocks, random);
    expect_like_cpu_by_every_rule(masses, shape,
                                  {num_blocks % 3, num_blocks % 5, num_blocks % 20, true});
  }
}

TEST_F(SelectCuda, WindowsAndBudgets) {
  Random random(45);
  for (const int64_t num_blocks : {5, 100, 1000}) {
    for (const Shape shape : kShapes) {
      Masses masses(shape, num_blocks, random);
      for (const int64_t min_blocks :
           {int64_t{0}, int64_t{1}, int64_t{50}, num_blocks - 1, num_blocks, int64_t{1} << 40}) {
        expect_like_cpu_by_every_rule(masses, shape, {3, 40, min_blocks, min_blocks % 2 == 0});
        expect_like_cpu_by_every_rule(masses, shape, {1, int64_t{1} << 30, min_blocks, true});
      }
    }
  }
}

}  // namespace
}  // namespace crisp::test
