// inspect.cc - `crisp inspect`: one head's route, masses, kept blocks and mask, drawn.
#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/drawing.h"
#include "commands/engine.h"
#include "commands/oracle.h"
#include "commands/policy_options.h"
#include "commands/terminal.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
The masses are those of the proxy map, the attention of the last 128 queries, computed in double
precision; a bar is logarithmic, from 1e-6 to 1. For crisp with --selection floor the noise floor is
the mean (or median) mass of the background blocks, and the dotted column is alpha x noise floor,
above which a Vertical-Slash head keeps a block. The mask is what the kernels selected.

Example:
  crisp inspect layer07.safetensors --head 3 --alpha 1.25)";

struct InspectOptions {
  std::vector<std::string> files;
  int64_t head = 0;
  PolicyOptions policy;
  DeviceOptions device;
  InputOptions input;
  bool json = false;
};

// What the library did, beside what the reference says about the same head.
struct Inspection {
  std::string input;
  int64_t head = 0, num_heads = 0;
  Policy policy;
  HeadReport report;
  reference::BlockSet mask;
  int64_t causal_blocks = 0;
  reference::ProxyMap proxy;
  reference::Selection selection;
  double js_distance = 0;
  MassChart vertical, slash;
};

MassChart chart_of(const std::vector<double>& mass, const std::vector<bool>& kept,
                   int64_t first_tokens, int64_t last_tokens, const Crisp* policy) {
  const auto num_blocks = static_cast<int64_t>(mass.size());
  MassChart chart;
  chart.mass = mass;
  chart.kept = kept;
  chart.kept.resize(mass.size());
  chart.forced = reference::forced_blocks(num_blocks, first_tokens);
  if (policy != nullptr && policy->selection == Selection::kNoiseFloor) {
    chart.floor = reference::noise_floor(
        mass, reference::background_blocks(num_blocks, first_tokens, last_tokens),
        static_cast<reference::NoiseFloor>(policy->noise_floor));
    chart.threshold = static_cast<double>(policy->alpha) * chart.floor;
  }
  return chart;
}

Inspection inspect(const InspectOptions& options) {
  const Input input = load_input(options.files, options.input);
  const Attention attention = input.attention();
  Inspection result;
  result.input = input.file.name;
  result.head = options.head;
  result.num_heads = attention.q.num_heads;
  if (options.head < 0 || options.head >= result.num_heads) {
    throw UsageError(
        fmt::format("--head is {}, expected 0 to {}", options.head, result.num_heads - 1));
  }
  result.policy = options.policy.policy(options.policy.kind);
  // Selection alone, on the one head: no other head changes it.
  const Attention one = head_of(attention, options.head);
  Run run = make_run(one, result.policy);
  select_only(one, run, options.device.num_threads);
  result.report = run.report[0];
  const reference::Head head =
      reference_head(one, {0, one.q.num_tokens, 0, one.k.num_tokens, 0}, 0, false);
  result.mask = blocks_of(run.mask, head, 0, 0);
  result.causal_blocks = num_causal_blocks(one);
  const Crisp* crisp = std::get_if<Crisp>(&result.policy);
  const int64_t sink = crisp != nullptr ? crisp->sink_tokens : 128;
  const int64_t recency = crisp != nullptr ? crisp->recency_tokens : 128;
  result.proxy = reference::proxy_map(head, sink, recency);
  result.js_distance = reference::js_distance(reference::pooled_estimate(head), result.proxy.p_v);
  result.selection = reference_select(head, result.policy, 0, 0);
  result.vertical = chart_of(result.proxy.p_v, result.selection.vertical, sink, recency, crisp);
  result.slash = chart_of(result.proxy.p_s, result.selection.slash, recency, sink, crisp);
  return result;
}

std::string route_text(const Inspection& result) {
  const char* pattern = name(result.report.pattern);
  const double mass = result.proxy.structural_mass, distance = result.js_distance;
  if (const auto* crisp = std::get_if<Crisp>(&result.policy)) {
    if (result.report.pattern == Pattern::kDense) {
      return fmt::format("{}: fewer than {} keys, or masses that are not finite", pattern,
                         crisp->dense_below_tokens);
    }
    if (crisp->routing == Routing::kStructuralMass) {
      return fmt::format("{}: structural mass {:.4f} against tau_proxy {}", pattern, mass,
                         crisp->tau_proxy);
    }
    return fmt::format("{}: JS distance {:.4f} against tau_js {}", pattern, distance,
                       crisp->tau_js);
  }
  if (const auto* flex = std::get_if<FlexPrefill>(&result.policy)) {
    return fmt::format("{}: JS distance {:.4f} against tau {}", pattern, distance, flex->tau);
  }
  return pattern;
}

// What each paper's rule says at its default threshold, whatever the policy.
std::string rules_text(const Inspection& result) {
  const auto pattern = [](reference::Pattern route) { return name(static_cast<Pattern>(route)); };
  const double tau_proxy = reference::CrispOptions{}.tau_proxy;
  const double tau = reference::FlexPrefillOptions{}.tau;
  return fmt::format(
      "rules: structural mass {:.4f} against {}: {}; JS distance {:.4f} against {}: {}",
      result.proxy.structural_mass, tau_proxy,
      pattern(reference::route_by_structural_mass(result.proxy.structural_mass, tau_proxy)),
      result.js_distance, tau, pattern(reference::route_by_js_distance(result.js_distance, tau)));
}

std::string direction_text(const char* title, const MassChart& chart) {
  std::string text = fmt::format("\n{}", title);
  if (chart.threshold > 0) {
    text += fmt::format(" (┊: {:.6f} = alpha x noise floor {:.6f})", chart.threshold, chart.floor);
  }
  return text + "\n" + draw_masses(chart);
}

void print_text(const Inspection& result) {
  fmt::print("{}, head {} of {}\n", printable_name(result.input), result.head, result.num_heads);
  fmt::print("policy {}, route {}\n", name(kind_of(result.policy)), route_text(result));
  fmt::print("{}\n", rules_text(result));
  fmt::print("{}", direction_text("vertical: mass per key block", result.vertical));
  fmt::print("{}", direction_text("slash: mass per block diagonal, 0 = the query's own block",
                                  result.slash));
  fmt::print("\nkept {} vertical, {} slash; {} of {} causal blocks ({:.1f} %)\n",
             result.report.num_vertical, result.report.num_slash, result.report.num_blocks,
             result.causal_blocks,
             100.0 * static_cast<double>(result.report.num_blocks) /
                 static_cast<double>(result.causal_blocks));
  const MaskDrawing drawing = draw_mask(result.mask);
  fmt::print("mask, query blocks down, key blocks across");
  if (drawing.blocks_per_mark > 1) {
    fmt::print(", a mark: any kept block of {0} x {0}", drawing.blocks_per_mark);
  }
  fmt::print("\n");
  for (const std::string& line : drawing.lines) fmt::print("|{}|\n", line);
}

Json chart_json(const MassChart& chart, int64_t num_kept) {
  Json out;
  out["mass"] = chart.mass;
  out["noise_floor"] = chart.threshold > 0 ? Json(chart.floor) : Json();
  out["threshold"] = chart.threshold > 0 ? Json(chart.threshold) : Json();
  Json kept = Json::array();
  for (size_t i = 0; i < chart.kept.size(); ++i) {
    if (chart.kept[i]) kept.push_back(i);
  }
  out["kept"] = kept;
  out["num_kept"] = num_kept;
  return out;
}

Json as_json(const Inspection& result) {
  Json out;
  out["input"] = printable_name(result.input);
  out["head"] = result.head;
  out["policy"] = name(kind_of(result.policy));
  out["parameters"] = parameters_json(result.policy, "");
  out["pattern"] = name(result.report.pattern);
  out["structural_mass"] = result.proxy.structural_mass;
  out["js_distance"] = result.js_distance;
  out["vertical"] = chart_json(result.vertical, result.report.num_vertical);
  out["slash"] = chart_json(result.slash, result.report.num_slash);
  out["num_blocks"] = result.report.num_blocks;
  out["causal_blocks"] = result.causal_blocks;
  Json rows = Json::array();
  for (int64_t row = 0; row < result.mask.rows; ++row) {
    std::string line;
    for (int64_t col = 0; col < result.mask.cols; ++col)
      line += result.mask.at(row, col) ? '1' : '0';
    rows.push_back(line);
  }
  out["mask"] = rows;
  return out;
}

int run_inspect(InspectOptions& options) {
  options.device.check();
  options.device.require_cpu("inspect");
  options.policy.finish({options.policy.kind});
  const auto groups = files::group_inputs(options.files);
  if (groups.size() != 1) {
    throw UsageError(fmt::format("inspect takes one input, got {}", groups.size()));
  }
  const Inspection result = inspect(options);
  if (options.json) {
    print_json(as_json(result));
  } else {
    print_text(result);
  }
  return 0;
}

}  // namespace

void add_inspect_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Draw one head's route, block masses and mask");
  command->footer(kFooter);
  command->add_option("FILE", options->files, "One input: .safetensors, or q.npy k.npy v.npy")
      ->required();
  command->add_option("--head", options->head, "Query head, from 0")
      ->capture_default_str()
      ->type_name("H");
  options->policy.add_to(*command, false);
  options->device.add_to(*command);
  command->add_option("--scale", options->input.softmax_scale, "Softmax scale, finite and > 0")
      ->type_name("S");
  command->add_flag("--json", options->json,
                    "Print one JSON document; mask rows as strings of 0 and 1");
  command->callback([options, &exit_code] { exit_code = run_inspect(*options); });
}

}  // namespace crisp::cli
