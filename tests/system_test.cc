// system_test.cc - the whole system on the captured heads of a real model, in the fast CPU path,
// against the figures of an independent analysis (data/README.md): routes equal, masses and
// distances to 1e-3, counts and densities exact, coverage and relative output error to 2 %.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "files/qkv.h"
#include "run.h"
#include "sanitized.h"

namespace crisp::test {
namespace {

// Head-wise copy in float32: the captures are bfloat16, and so would be the rounding of the output.
Values widened(const ConstTensor& tensor) {
  Values values(tensor.num_tokens, tensor.num_heads, tensor.head_dim);
  const auto* data = static_cast<const std::byte*>(tensor.data);
  for (int64_t token = 0; token < values.tokens; ++token) {
    for (int64_t head = 0; head < values.heads; ++head) {
      const int64_t row = token * tensor.token_stride + head * tensor.head_stride;
      for (int64_t i = 0; i < values.dim; ++i) {
        values.row(token, head)[i] =
            load(tensor.dtype, data + (row + i) * element_bytes(tensor.dtype));
      }
    }
  }
  return values;
}

Inputs read_capture(const std::string& file) {
  const files::QkvFile qkv =
      files::load_qkv(std::vector<std::string>{std::string(CRISP_DATA_DIR "/") + file});
  Inputs inputs;
  inputs.q = widened(qkv.q);
  inputs.k = widened(qkv.k);
  inputs.v = widened(qkv.v);
  inputs.softmax_scale = qkv.softmax_scale;
  inputs.segments = {{0, inputs.q.tokens, 0, inputs.k.tokens, 0}};
  inputs.config.num_q_heads = inputs.q.heads;
  inputs.config.num_kv_heads = inputs.k.heads;
  inputs.config.head_dim = inputs.q.dim;
  inputs.config.segments = {{inputs.q.tokens, inputs.k.tokens}};
  inputs.config.num_threads = 2;
  return inputs;
}

struct Named {
  const char* name;  // in expected.json
  Crisp policy;
};

// A tau_proxy of 0 makes every head Vertical-Slash, one above 1 pools every head. The coverage
// entries are the routing-only ablation without a minimum budget.
std::vector<Named> selections() {
  return {{"vertical_slash alpha=1.0", {.tau_proxy = 0, .alpha = 1}},
          {"vertical_slash alpha=1.25", {.tau_proxy = 0, .alpha = 1.25f}},
          {"vertical_slash alpha=1.5", {.tau_proxy = 0, .alpha = 1.5f}},
          {"vertical_slash gamma=0.95",
           {.tau_proxy = 0, .min_budget_tokens = 0, .selection = Selection::kCoverage}},
          {"pooled gamma=0.95", {.tau_proxy = 2, .pooled_keeps_budget = false}},
          {"pooled gamma=0.95 + 8 vertical + 8 slash", {.tau_proxy = 2}}};
}

// Mean over the rows of exp(lse_kept - lse_dense): the true attention mass that was kept.
double coverage(const Outcome& kept, const Outcome& dense, int64_t head) {
  const auto tokens = static_cast<size_t>(dense.out.tokens),
             first = static_cast<size_t>(head) * tokens;
  double sum = 0;
  for (size_t i = first; i < first + tokens; ++i)
    sum += std::exp(static_cast<double>(kept.lse[i]) - dense.lse[i]);
  return sum / static_cast<double>(tokens);
}

// |kept - dense|_F / |dense|_F
double relative_error(const Outcome& kept, const Outcome& dense, int64_t head) {
  double difference = 0, norm = 0;
  for (int64_t token = 0; token < dense.out.tokens; ++token) {
    for (int64_t i = 0; i < dense.out.dim; ++i) {
      const double exact = dense.out.row(token, head)[i],
                   error = kept.out.row(token, head)[i] - exact;
      difference += error * error;
      norm += exact * exact;
    }
  }
  return std::sqrt(difference / norm);
}

const char* name_of(Pattern pattern) {
  return pattern == Pattern::kPooled          ? "pooled"
         : pattern == Pattern::kVerticalSlash ? "vertical_slash"
                                              : "dense";
}

void expect_routes(Inputs inputs, const nlohmann::json& heads) {
  inputs.config.policy = Crisp{};
  const Selected crisp = run_select(inputs);
  inputs.config.policy = FlexPrefill{};
  const Selected flex = run_select(inputs);
  for (size_t h = 0; h < heads.size(); ++h) {
    SCOPED_TRACE("head " + heads[h].at("head").dump());
    EXPECT_EQ(name_of(crisp.report[h].pattern), heads[h].at("route crisp tau_proxy=0.2"));
    EXPECT_EQ(name_of(flex.report[h].pattern), heads[h].at("route flexprefill tau=0.1"));
    EXPECT_NEAR(crisp.report[h].structural_mass, heads[h].at("structural_mass"), 1e-3);
    EXPECT_NEAR(flex.report[h].js_distance, heads[h].at("js_distance"), 1e-3);
  }
}

void expect_selection(Inputs inputs, const Named& named, const Outcome& dense,
                      const nlohmann::json& heads) {
  inputs.config.policy = named.policy;
  const Selected selected = run_select(inputs);
  const Outcome kept = run_attend(inputs, selected.mask);
  const auto causal = static_cast<double>(num_causal_blocks(Call(inputs).attention));
  for (size_t h = 0; h < heads.size(); ++h) {
    SCOPED_TRACE("head " + heads[h].at("head").dump() + ", " + named.name);
    const nlohmann::json& expected = heads[h].at(named.name);
    const HeadReport& report = selected.report[h];
    const auto head = static_cast<int64_t>(h);
    EXPECT_EQ(report.num_blocks, expected.at("num_blocks"));
    EXPECT_EQ(selected.mask.count(head), report.num_blocks);
    EXPECT_NEAR(static_cast<double>(report.num_blocks) / causal, expected.at("density"),
                6e-6);  // 5 digits
    if (expected.contains("num_vertical")) {
      EXPECT_EQ(report.num_vertical, expected.at("num_vertical"));
      EXPECT_EQ(report.num_slash, expected.at("num_slash"));
    }
    const double wanted_coverage = expected.at("coverage"),
                 wanted_error = expected.at("relative_error");
    EXPECT_NEAR(coverage(kept, dense, head), wanted_coverage, 0.02 * wanted_coverage);
    EXPECT_NEAR(relative_error(kept, dense, head), wanted_error, 0.02 * wanted_error);
  }
}

class System : public ::testing::TestWithParam<const char*> {};

TEST_P(System, GivesTheFiguresOfTheAnalysis) {
  std::ifstream file(CRISP_DATA_DIR "/expected.json");
  ASSERT_TRUE(file) << "data/expected.json";
  const nlohmann::json heads = nlohmann::json::parse(file).at(GetParam()).at("heads");
  const Inputs inputs = read_capture(GetParam());
  ASSERT_EQ(static_cast<int64_t>(heads.size()), inputs.q.heads);
  expect_routes(inputs, heads);
  const Outcome dense = run_prefill(inputs);
  for (const Named& named : selections()) expect_selection(inputs, named, dense, heads);
}

// What a sanitizer could find, one capture shows it: they differ in values and number of heads
// only.
std::vector<const char*> captures() {
  std::vector<const char*> files = {"book-8k-layer05-group0.safetensors"};
  if (kIsSanitized) return files;
  files.insert(files.end(), {"book-8k-layer17-group2.safetensors", "code-8k-layer07.safetensors"});
  return files;
}

INSTANTIATE_TEST_SUITE_P(Captures, System, ::testing::ValuesIn(captures()));

}  // namespace
}  // namespace crisp::test
