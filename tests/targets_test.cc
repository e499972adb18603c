// targets_test.cc - every instruction set that this build holds and this machine runs, emulated
// vectors included, gives right results: attend and selection against the oracle.
#include "hwy/targets.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compare.h"
#include "hwy/detect_targets.h"
#include "run.h"

namespace crisp::test {
namespace {

// Narrows dispatch to one instruction set until it goes out of scope.
class OnlyTarget {
 public:
  explicit OnlyTarget(int64_t target) { choose(target); }
  ~OnlyTarget() { choose(0); }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;

 private:
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// For machines with none of the others: emulated vectors, or scalars where a compiler gets those
// wrong.
constexpr int64_t kFallback = HWY_BASELINE_SCALAR;

std::vector<int64_t> targets_to_run() {
  std::vector<int64_t> targets;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON}) {
    if ((hwy::SupportedTargets() & target) != 0) targets.push_back(target);
  }
  targets.push_back(kFallback);
  return targets;
}

TEST(Targets, AttendIsExactOnEach) {
  for (const int64_t target : targets_to_run()) {
    const OnlyTarget only(target);
    ASSERT_STREQ(cpu_target(), hwy::TargetName(target));
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int64_t head_dim : {8, 40, 128}) {
        const Case c{.num_q_heads = 3,
                     .head_dim = head_dim,
                     .segments = {{100, 230}, {131, 131}, {1, 7}},
                     .dtype = dtype,
                     .density = 0.7f};
        EXPECT_TRUE(is_exact(make_inputs(c))) << hwy::TargetName(target);
      }
    }
  }
}

// Scores differ in the last bits from one instruction set to the next, decisions must not.
TEST(Targets, SelectionAgreesOnEach) {
  for (const float tau_proxy : {0.0f, 1.1f}) {
    const Case c{.num_q_heads = 4,
                 .num_kv_heads = 2,
                 .head_dim = 64,
                 .segments = {{700, 1500}},
                 .policy = Crisp{.tau_proxy = tau_proxy, .min_budget_tokens = 256},
                 .num_threads = 2};
    const Inputs inputs = make_inputs(c);
    const Selected best = run_select(inputs);
    for (const int64_t target : targets_to_run()) {
      const OnlyTarget only(target);
      const Selected other = run_select(inputs);
      EXPECT_TRUE(other.mask == best.mask) << hwy::TargetName(target);
      for (size_t h = 0; h < best.report.size(); ++h) {
        EXPECT_NEAR(other.report[h].structural_mass, best.report[h].structural_mass, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace crisp::test
