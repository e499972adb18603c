// policy_suite.h - whole selections against the oracle, on any backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "backend.h"
#include "compare.h"
#include "policy_oracle.h"
#include "run.h"
#include "structured.h"

namespace crisp::test {

inline void expect_statistic(float got, double want, const std::string& what) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << what << " is " << got << ", must be NaN";
  } else {
    EXPECT_NEAR(got, want, 1e-5) << what;
  }
}

// Every head of every segment keeps exactly the oracle's blocks. Returns the number of heads per
// pattern, so that a test can see that it met the patterns it is about.
inline std::vector<int> expect_like_reference(const Inputs& inputs) {
  std::vector<int> patterns(3, 0);
  const Selected selected = run_select(inputs);
  const std::vector<MaskRows> rows = mask_rows(inputs, 128);
  for (size_t s = 0; s < inputs.segments.size(); ++s) {
    for (int64_t head = 0; head < inputs.q.heads; ++head) {
      const reference::Head one = reference_head(inputs, inputs.segments[s], head);
      const reference::Selection want = expected(one, inputs.config.policy);
      const HeadReport& report =
          selected.report[s * static_cast<size_t>(inputs.q.heads) + static_cast<size_t>(head)];
      std::ostringstream where;
      where << "segment " << s << " head " << head << " of " << inputs.config;
      EXPECT_EQ(static_cast<int>(report.pattern), static_cast<int>(want.pattern)) << where.str();
      expect_statistic(report.structural_mass, want.structural_mass, "C_struct, " + where.str());
      expect_statistic(report.js_distance,
                       routes_by_distance(inputs.config.policy) ? want.js_distance : NAN,
                       "js_distance, " + where.str());
      EXPECT_EQ(report.num_vertical, want.num_vertical()) << where.str();
      EXPECT_EQ(report.num_slash, want.num_slash()) << where.str();
      EXPECT_EQ(report.num_blocks, want.blocks.count()) << where.str();
      EXPECT_EQ(block_set(selected.mask, rows[s], head).kept, want.blocks.kept) << where.str();
      EXPECT_EQ(selected.mask.count(head, rows[s].first_row, rows[s].num_rows), want.blocks.count())
          << "bits outside the causal blocks: " << where.str();
      ++patterns[static_cast<size_t>(want.pattern)];
    }
  }
  return patterns;
}

inline Case policy_case(std::vector<Lengths> segments, Policy policy) {
  Case c;
  c.num_q_heads = 6;
  c.num_kv_heads = 2;
  c.head_dim = 16;
  c.segments = std::move(segments);
  c.policy = policy;
  c.seed = static_cast<uint64_t>(c.segments[0].kv_len);
  return c;
}

inline Crisp crisp_of(int32_t min_budget_tokens) {
  Crisp policy;
  policy.min_budget_tokens = min_budget_tokens;
  policy.dense_below_tokens = 0;
  return policy;
}

inline FlexPrefill flex_of(FlexPrefill::Variant variant, float gamma, float tau) {
  FlexPrefill policy;
  policy.variant = variant;
  policy.gamma = gamma;
  policy.tau = tau;
  policy.min_budget_tokens = 200;
  policy.dense_below_tokens = 0;
  return policy;
}

inline constexpr int64_t kLengths[] = {1, 128, 129, 257, 391, 640, 1025, 1700};

// On CUDA one backend has a head_dim that the wgmma kernels take, the other one that they do not.
class Policies : public OnBackend {
 protected:
  Inputs inputs_of(const Case& c) const { return structured_inputs(on(c)); }

  // Runs the policy over all lengths, as a whole and as a chunk, and checks that both routes were
  // met.
  void expect_like_reference_at_all_lengths(const Policy& policy, bool needs_both = true) {
    std::vector<int> met(3, 0);
    for (const int64_t n : kLengths) {
      for (const int64_t q_len : {n, std::min<int64_t>(n, 200), int64_t{1}}) {
        const Inputs inputs = inputs_of(policy_case({{q_len, n}}, policy));
        const std::vector<int> patterns = expect_like_reference(inputs);
        for (size_t p = 0; p < met.size(); ++p) met[p] += patterns[p];
      }
    }
    if (!needs_both) return;
    EXPECT_GT(met[1], 10) << "Vertical-Slash heads";
    EXPECT_GT(met[2], 10) << "pooled heads";
  }
};

TEST_P(Policies, CrispLikeReference) {
  expect_like_reference_at_all_lengths(crisp_of(0));
  expect_like_reference_at_all_lengths(crisp_of(300));
}

TEST_P(Policies, CrispAllHeadsOneWay) {
  Crisp policy = crisp_of(300);
  policy.tau_proxy = 0;
  expect_like_reference_at_all_lengths(policy, false);
  policy.tau_proxy = 1.5f;
  expect_like_reference_at_all_lengths(policy, false);
  policy.pooled_keeps_budget = false;
  expect_like_reference_at_all_lengths(policy, false);
}

TEST_P(Policies, CrispParametersAndAblations) {
  Crisp policy = crisp_of(200);
  policy.alpha = 1.25f;
  policy.sink_tokens = 4;
  policy.recency_tokens = 300;
  policy.gamma = 0.8f;
  policy.noise_floor = NoiseFloor::kMedian;
  expect_like_reference_at_all_lengths(policy);
  policy.selection = Selection::kCoverage;
  expect_like_reference_at_all_lengths(policy);
  policy.routing = Routing::kJsDistance;
  policy.tau_js = 0.2f;
  expect_like_reference_at_all_lengths(policy);
  policy.selection = Selection::kNoiseFloor;
  expect_like_reference_at_all_lengths(policy);
}

TEST_P(Policies, FlexPrefillLikeReference) {
  for (const auto variant : {FlexPrefill::Variant::kOfficial, FlexPrefill::Variant::kPaper}) {
    expect_like_reference_at_all_lengths(flex_of(variant, 0.95f, 0.2f));
    expect_like_reference_at_all_lengths(flex_of(variant, 0.7f, 0.2f));
    expect_like_reference_at_all_lengths(flex_of(variant, 0.9f, 0), false);
    expect_like_reference_at_all_lengths(flex_of(variant, 0.9f, 1), false);
  }
}

TEST_P(Policies, GroupsDtypesLayoutsPagesSegments) {
  for (const int64_t group : {1, 3, 4, 7}) {
    Case c = policy_case({{700, 700}, {1, 400}, {130, 1030}, {0, 300}, {257, 257}}, crisp_of(300));
    c.num_q_heads = 2 * group;
    c.dtype = group % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    c.layout = static_cast<Layout>(group % 4);
    c.page_size = group == 7 ? 48 : 0;
    c.padding = 9;
    c.num_threads = 2;
    expect_like_reference(inputs_of(c));
    c.policy = flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f);
    expect_like_reference(inputs_of(c));
  }
}

TEST_P(Policies, TiesGoToTheLowerIndex) {
  for (const int64_t n : {1024, 1536, 2304}) {
    for (const Policy& policy :
         {Policy{crisp_of(700)}, Policy{flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f)}}) {
      Inputs inputs = inputs_of(policy_case({{n, n}}, policy));
      make_ties(inputs);
      expect_like_reference(inputs);
    }
  }
}

// All mass in the sink: the floor is 0, and only forced and budget blocks are kept.
TEST_P(Policies, NothingButTheSink) {
  Inputs inputs = make_inputs(on(policy_case({{2000, 2000}}, crisp_of(300))));
  for (int64_t t = 0; t < 2000; ++t) {
    for (int64_t h = 0; h < 6; ++h) inputs.q.row(t, h)[0] = 30;
    for (int64_t h = 0; h < 2; ++h) inputs.k.row(t, h)[0] = t == 0 ? 100.0f : -100.0f;
  }
  expect_like_reference(inputs);
  const Selected selected = run_select(inputs);
  EXPECT_EQ(selected.report[0].num_vertical, 3);
  EXPECT_EQ(selected.report[0].num_slash, 3);
}

TEST_P(Policies, GateKeepsShortContextsDense) {
  Crisp crisp = crisp_of(0);
  FlexPrefill flex;
  flex.min_budget_tokens = 0;
  crisp.dense_below_tokens = flex.dense_below_tokens = 500;
  for (const Policy& policy : {Policy{crisp}, Policy{flex}}) {
    const Inputs inputs =
        inputs_of(policy_case({{499, 499}, {100, 499}, {500, 500}, {100, 500}}, policy));
    expect_like_reference(inputs);
    const Selected selected = run_select(inputs);
    EXPECT_EQ(selected.report[0].pattern, Pattern::kDense);
    EXPECT_TRUE(std::isnan(selected.report[0].structural_mass));
    EXPECT_NE(selected.report[12].pattern, Pattern::kDense);
  }
}

TEST_P(Policies, NothingToAttendTo) {
  for (const Policy& policy : {Policy{crisp_of(0)}, Policy{FlexPrefill{}}, Policy{Dense{}}}) {
    const Inputs inputs = make_inputs(on(policy_case({{5, 0}, {0, 0}, {0, 700}, {3, 3}}, policy)));
    const Selected selected = run_select(inputs);
    for (size_t entry = 0; entry < 18; ++entry) EXPECT_EQ(selected.report[entry].num_blocks, 0);
    EXPECT_EQ(selected.report[18].num_blocks, 1);
  }
}

// A head whose proxy sees a NaN keeps every block; the heads of the other group do not change.
TEST_P(Policies, NaNKeepsItsHeadsDense) {
  for (const Policy& policy :
       {Policy{crisp_of(300)}, Policy{flex_of(FlexPrefill::Variant::kOfficial, 0.9f, 0.2f)},
        Policy{flex_of(FlexPrefill::Variant::kPaper, 0.9f, 0.2f)}}) {
    Inputs inputs = inputs_of(policy_case({{900, 1100}}, policy));
    inputs.k.row(500, 1)[7] = NAN;
    inputs.q.row(20, 0)[7] = NAN;  // seen by the pooled map only
    expect_like_reference(inputs);
    const Selected selected = run_select(inputs);
    for (size_t head = 3; head < 6; ++head) {
      EXPECT_EQ(selected.report[head].pattern, Pattern::kDense) << head;
      EXPECT_TRUE(std::isnan(selected.report[head].structural_mass)) << head;
    }
    EXPECT_NE(selected.report[1].pattern, Pattern::kDense);
  }
}

}  // namespace crisp::test
