// gate_test.cc - the gates compiled in are those that were measured.
#include "policy/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "crisp/crisp.h"
#include "crisp/crisp_c.h"

namespace crisp {
namespace {

TEST(Gate, IsTheLongestMeasured) {
  std::ifstream file(CRISP_DATA_DIR "/../bench/results/gpu_gates.jsonl");
  std::map<std::pair<std::string, std::string>, int32_t> longest;
  for (std::string line; std::getline(file, line);) {
    const auto run = nlohmann::json::parse(line);
    // A gate holds from its own length on, so no measured length from there on may be slower.
    for (const auto& point : run["points"]) {
      if (point["tokens"] >= run["gate_tokens"]) {
        EXPECT_LE(point["layer_ms"], point["dense_ms"]) << line;
      }
    }
    int32_t& gate = longest[{run["gpu"], run["policy"]}];
    gate = std::max(gate, run["gate_tokens"].get<int32_t>());
  }
  ASSERT_FALSE(longest.empty());
  for (const auto& [key, tokens] : longest) {
    const Policy policy = key.second == "crisp" ? Policy(Crisp{}) : Policy(FlexPrefill{});
    EXPECT_EQ(gate_on(key.first, policy), tokens) << key.first << ", " << key.second;
  }
}

TEST(Gate, IsKnownWhereItWasMeasuredOnly) {
  EXPECT_EQ(gate_on("", Crisp{}), -1);
  EXPECT_EQ(gate_on("NVIDIA H20", Crisp{}), -1);
  EXPECT_EQ(gate_on("NVIDIA H200", Dense{}), -1);
  EXPECT_EQ(gate_on("NVIDIA H200", UserMask{}), -1);
  EXPECT_EQ(measured_gate(Crisp{}, Context{}), -1) << "the CPU's default is the papers'";
}

TEST(Gate, ThroughTheCInterface) {
  crisp_policy policy = crisp_policy_default(CRISP_CRISP);
  crisp_args args = {};
  args.struct_size = sizeof(args);
  args.policy = &policy;
  int32_t tokens = 7;
  EXPECT_EQ(crisp_measured_gate(&args, &tokens), CRISP_OK);
  EXPECT_EQ(tokens, -1);
  EXPECT_EQ(crisp_measured_gate(&args, nullptr), CRISP_INVALID_ARGUMENT);
  args.device = 7;
  tokens = 7;
  EXPECT_EQ(crisp_measured_gate(&args, &tokens), CRISP_INVALID_ARGUMENT);
  EXPECT_EQ(tokens, 7);
}

}  // namespace
}  // namespace crisp
