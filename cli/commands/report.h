// report.h - the result of `crisp prefill` on one input, as a table and as a JSON document.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/engine.h"
#include "commands/metrics.h"

namespace crisp::cli {

struct PolicyResult {
  std::string name;
  nlohmann::ordered_json parameters;
  Run run;
  std::vector<HeadMetrics> heads;
  int32_t gate_tokens = 0;            // dense_below_tokens of the policy
  const char* gate_source = nullptr;  // "typed", "measured" or "default"; nullptr: it has no gate
};

struct PrefillResult {
  std::string input;
  Attention attention;  // shapes only: the data may be gone
  int64_t chunk_tokens = 0;
  int num_threads = 0, repeats = 1;
  std::string gpu;  // its name; empty: the CPU
  bool by_reference = false, compared = false;
  std::vector<PolicyResult> policies;  // with --compare the first is dense
};

// Time of the dense attention, NaN unless the dense policy ran.
double dense_ms(const PrefillResult& result);

// One row per policy; without --compare also one row per head.
std::string as_text(const PrefillResult& result);

// {input, shape, device, threads, dense_ms, policies: [{name, parameters, density, coverage,
// relative_error, ms, heads: [...]}]}; null for what was not computed.
nlohmann::ordered_json as_json(const PrefillResult& result);

}  // namespace crisp::cli
