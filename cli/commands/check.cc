// check.cc - `crisp check`: the kernels of this build on this machine against the reference.
#include <fmt/format.h>

#include <memory>

#include "commands/check_case.h"
#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/machine.h"
#include "commands/policy_options.h"
#include "commands/terminal.h"
#include "device_memory.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Every case runs select_blocks and attend on small inputs and compares with the double-precision
reference: the kept blocks must be those of the reference (a block whose mass is within 1e-4 of its
threshold may fall either way), output and log-sum-exp must lie within the rounding-error bound of
the arithmetic, and one thread must give the same bits as several. With --device cuda the cases are
dense and random masks in float16 and bfloat16, and two runs must give the same bits. Exit code 1 on
any difference.)";

// Lengths that are no multiple of the block, q_len 1, chunks, several segments, pages of any size.
std::vector<CheckCase> all_cases() {
  std::vector<CheckCase> cases;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t head_dim : {8, 64, 96, 128, 256}) {
      cases.push_back({dtype, head_dim, 2, 1, {{300, 300}}, 0, Dense{}});
    }
    for (const int64_t group : {1, 3, 7, 8}) {
      cases.push_back({dtype, 64, 2 * group, 2, {{130, 200}}, 0, Dense{}});
    }
    for (const int64_t page_size : {1, 16, 100}) {
      cases.push_back(
          {dtype, 64, 2, 1, {{1, 257}, {129, 129}, {0, 0}, {64, 320}}, page_size, Dense{}});
    }
  }
  Crisp crisp{.min_budget_tokens = 256, .dense_below_tokens = 0};
  FlexPrefill flex{.min_budget_tokens = 256, .dense_below_tokens = 0};
  std::vector<Policy> policies = {crisp, flex};
  crisp.alpha = 1.5f;
  crisp.noise_floor = NoiseFloor::kMedian;
  policies.emplace_back(crisp);
  crisp.selection = Selection::kCoverage;
  crisp.pooled_keeps_budget = false;
  policies.emplace_back(crisp);
  crisp.routing = Routing::kJsDistance;
  policies.emplace_back(crisp);
  flex.variant = FlexPrefill::Variant::kPaper;
  policies.emplace_back(flex);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Policy& policy : policies) {
      cases.push_back({dtype, 64, 2, 2, {{1300, 1300}}, 0, policy});
    }
    cases.push_back({dtype, 128, 2, 1, {{500, 1400}, {1280, 1280}}, 0, policies[0]});
    cases.push_back({dtype, 64, 3, 1, {{1111, 1111}}, 32, policies[0]});
  }
  return cases;
}

// What CUDA accepts: both families of kernels, by head_dim, page size and where segments start.
std::vector<CheckCase> cuda_cases() {
  std::vector<CheckCase> cases;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const double density : {1.0, 0.6, 0.2}) {
      for (const int64_t head_dim : {8, 64, 96, 128, 256}) {
        cases.push_back({dtype, head_dim, 2, 1, {{300, 300}, {130, 1000}}, 0, Dense{}, density});
      }
      for (const int64_t group : {1, 3, 7, 8}) {
        cases.push_back({dtype, 128, 2 * group, 2, {{130, 200}}, 0, Dense{}, density});
      }
      for (const int64_t page_size : {1, 16, 100, 128}) {
        for (const int64_t head_dim : {64, 128}) {
          cases.push_back({dtype,
                           head_dim,
                           2,
                           1,
                           {{1, 256}, {100, 128}, {0, 0}, {64, 320}, {9, 0}},
                           page_size,
                           Dense{},
                           density});
        }
      }
      cases.push_back({dtype, 128, 4, 2, {{2000, 2000}}, 0, Dense{}, density});
    }
  }
  return cases;
}

Json as_json(const CheckCase& one, const CheckResult& result) {
  return {{"case", describe(one)},
          {"ok", result.ok()},
          {"out_error", json_number(result.out_error)},
          {"out_bound", json_number(result.out_bound)},
          {"lse_error", json_number(result.lse_error)},
          {"lse_bound", json_number(result.lse_bound)},
          {"blocks_off", result.blocks_off},
          {"same_bits", result.same_bits}};
}

std::string line_of(const CheckCase& one, const CheckResult& result, bool on_cuda) {
  std::string text = fmt::format("{}  {}: output error {:.1e} (bound {:.1e}), lse {:.1e} ({:.1e})",
                                 result.ok() ? "ok  " : "FAIL", describe(one), result.out_error,
                                 result.out_bound, result.lse_error, result.lse_bound);
  if (result.blocks_off > 0) text += fmt::format(", {} blocks differ", result.blocks_off);
  if (!result.same_bits)
    text += on_cuda ? ", bits differ from run to run" : ", bits depend on the thread count";
  return text + "\n";
}

Json document(const std::string& gpu, int num_threads, size_t failed, Json results) {
  Json out;
  out["version"] = version();
  out["device"] = gpu.empty() ? "cpu" : "cuda";
  out["cpu"] = cpu_model();
  out["instruction_set"] = gpu.empty() ? Json(cpu_target()) : Json();
  out["gpu"] = gpu.empty() ? Json() : Json(gpu);
  out["threads"] = gpu.empty() ? Json(num_threads) : Json();
  out["ok"] = failed == 0;
  out["failed"] = failed;
  out["cases"] = std::move(results);
  return out;
}

int run_check(const DeviceOptions& device, bool json) {
  device.check();
  device.require_device();
  const bool on_cuda = device.is_cuda();
  const std::string gpu = on_cuda ? cuda_machine().devices[0].name : "";
  const std::vector<CheckCase> cases = on_cuda ? cuda_cases() : all_cases();
  const int num_threads = std::max(device.resolved_threads(), 2);
  Json results = Json::array();
  size_t failed = 0;
  Progress progress;
  for (size_t i = 0; i < cases.size(); ++i) {
    progress.show(fmt::format("case {} of {}", i + 1, cases.size()));
    const CheckResult result = run_case(cases[i], num_threads, on_cuda);
    failed += result.ok() ? 0u : 1u;
    if (json) {
      results.push_back(as_json(cases[i], result));
    } else {
      progress.show("");
      fmt::print("{}", line_of(cases[i], result, on_cuda));
    }
  }
  if (json) {
    print_json(document(gpu, num_threads, failed, std::move(results)));
  } else {
    fmt::print("{} of {} cases agree with the reference ({})\n", cases.size() - failed,
               cases.size(),
               on_cuda ? gpu : fmt::format("{}, 1 and {} threads", cpu_target(), num_threads));
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

void add_check_command(CLI::App& app, int& exit_code) {
  struct Options {
    DeviceOptions device;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("check", "Test this build on this machine against the reference");
  command->footer(kFooter);
  options->device.add_to(*command);
  command->add_flag("--json", options->json, "Print one JSON document");
  command->callback(
      [options, &exit_code] { exit_code = run_check(options->device, options->json); });
}

}  // namespace crisp::cli
