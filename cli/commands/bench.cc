// bench.cc - `crisp bench`: time per stage over lengths and policies, one JSON line per case.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "commands/bench_case.h"
#include "commands/bench_gate.h"
#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/engine_cuda.h"
#include "commands/machine.h"
#include "commands/policy_options.h"
#include "commands/terminal.h"
#include "core/dtype.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Per length, dense attention is timed first; every later line of that length carries its time, so a
ratio never mixes two runs. `attend` lines time attention alone over masks of set density. gflops
counts the visited (query, key) pairs, 4 x head_dim FLOP each, over the time of the attend stage.
cost_ratio is attend time / (share of pairs visited x dense attend time): 1 is a perfect executor.
A case repeats until --repeat runs or --seconds, whichever comes first.

With --device cuda stages are timed by the device's events after a warm-up of half a second, and a
case runs 20 times, above 128k 5 times; --input random is made there, quickly.

--gate prints one line per policy instead: the shortest of the lengths from which on selection and
attention together are never slower than dense attention. What it says for a GPU is committed under
bench/results/ and becomes the default of --dense-below-tokens there.

Examples:
  crisp bench                                            1k to 128k, minutes
  crisp bench --lengths 8k,16k --q-heads 8 --kv-heads 8 --dtype float32
  crisp bench --lengths 16k --policies none --densities 0.05,0.1,0.25,0.5
  crisp bench --device cuda --lengths 8k,128k,512k --q-heads 32 --kv-heads 8 --policies none \
              --densities 0.1,0.3 --input random
  crisp bench --device cuda --gate --q-heads 32 --kv-heads 8)";

struct BenchOptions {
  std::string lengths = "1k,2k,4k,8k,16k,32k,64k,128k";
  std::string gate_lengths = "1k,1536,2k,3k,4k,6k,8k,12k,16k";
  std::string policies = "crisp,flexprefill";
  std::string densities = "0.1";
  std::string dtype = "bfloat16", input = "llama-like", commit;
  BenchShape shape{0, 4, 1, 128, DType::kBFloat16};
  int repeats = 5;
  double max_seconds = 2;
  uint64_t seed = 1;
  DeviceOptions device;
  bool gate = false;
  // Whether they were typed; else CUDA and --gate have defaults of their own.
  const CLI::Option *lengths_option = nullptr, *repeat_option = nullptr, *seconds_option = nullptr;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  if (text == "none") return parts;
  size_t begin = 0;
  for (size_t comma = 0; comma != std::string::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
  }
  return parts;
}

int64_t parse_length(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  auto [at, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && at != end && *at == 'k' && value < (int64_t{1} << 40)) {
    value *= 1024;
    ++at;
  }
  if (error != std::errc() || at != end || value < 1) {
    throw UsageError(
        fmt::format("--lengths holds '{}', expected tokens >= 1, e.g. 8k or 1000", text));
  }
  return value;
}

double parse_density(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || !(value > 0 && value <= 1)) {
    throw UsageError(fmt::format("--densities holds '{}', expected a number in (0, 1]", text));
  }
  return value;
}

Policy parse_policy(const std::string& text) {
  if (text == "crisp") return Crisp{};
  if (text == "flexprefill") return FlexPrefill{};
  if (text == "dense") return Dense{};
  throw UsageError(
      fmt::format("--policies holds '{}', expected crisp, flexprefill, dense or none", text));
}

// What every line of one length shares, and the dense run it is compared with.
struct Series {
  const BenchOptions& options;
  const Attention& attention;
  std::string command;
  std::string gpu;  // empty: the CPU
  double dense_ms = std::numeric_limits<double>::quiet_NaN(), dense_pairs = 0;
};

// Where and by what a line was measured.
void add_origin(Json& out, const BenchOptions& options, const std::string& command,
                const std::string& gpu) {
  const bool on_cuda = !gpu.empty();
  out["input"] = options.input;
  out["seed"] = options.seed;
  out["device"] = on_cuda ? "cuda" : "cpu";
  if (on_cuda) out["gpu"] = gpu;
  out["cpu"] = cpu_model();
  out["instruction_set"] = on_cuda ? Json() : Json(cpu_target());
  out["threads"] = on_cuda ? Json() : Json(options.device.resolved_threads());
  out["version"] = version();
  out["commit"] = options.commit.empty() ? Json() : Json(options.commit);
  out["command"] = command;
}

double density_of(const Run& run, const Attention& attention) {
  double blocks = 0;
  for (const HeadReport& head : run.report) blocks += static_cast<double>(head.num_blocks);
  return blocks / static_cast<double>(num_causal_blocks(attention) * attention.q.num_heads);
}

Json line_of(const Series& series, const std::string& name, const Json& parameters,
             const Run& run) {
  const BenchOptions& options = series.options;
  const Attention& attention = series.attention;
  const double pairs = visible_pairs(attention, run.mask);
  const double attend_ms = run.ms[kNumStages - 1];
  Json out;
  out["policy"] = name;
  out["parameters"] = parameters;
  out["shape"] = {
      {"num_q_heads", options.shape.num_q_heads}, {"num_kv_heads", options.shape.num_kv_heads},
      {"q_len", attention.q.num_tokens},          {"kv_len", attention.k.num_tokens},
      {"head_dim", options.shape.head_dim},       {"dtype", options.dtype}};
  out["density"] = density_of(run, attention);
  out["ms"] = times_json(run);
  out["repeat"] = run.repeats.size();
  out["gflops"] = 4 * static_cast<double>(options.shape.head_dim) * pairs / attend_ms / 1e6;
  out["dense_ms"] = json_number(series.dense_ms);
  out["speed_up"] = json_number(series.dense_ms / total_ms(run.ms));
  out["cost_ratio"] = json_number(attend_ms / (pairs / series.dense_pairs * series.dense_ms));
  if (!series.gpu.empty()) out["tflops"] = out["gflops"].get<double>() / 1e3;
  add_origin(out, options, series.command, series.gpu);
  return out;
}

// CUDA: at least 20 runs up to 128k tokens and 5 above, whatever time they take, unless told.
Repeats cuda_repeats(const BenchOptions& options, int64_t length, double first_ms) {
  constexpr double kWarmUpMs = 500;
  Repeats repeats;
  repeats.most = options.repeat_option->count() > 0 ? options.repeats
                 : length <= int64_t{128} << 10     ? 20
                                                    : 5;
  repeats.least = options.seconds_option->count() > 0 ? 1 : repeats.most;
  repeats.max_seconds = options.max_seconds;
  repeats.warm_up = static_cast<int>(std::clamp(kWarmUpMs / std::max(first_ms, 0.01), 1.0, 200.0));
  return repeats;
}

Run measure_on_cuda(const BenchOptions& options, const Attention& attention, int64_t length,
                    const Policy& policy) {
  // Loads the kernels and says how long a run takes.
  Run first = make_run(attention, policy, true, /*with_out=*/false);
  execute_on_cuda(attention, first, {.warm_up = 1});
  Run run = make_run(attention, policy, true, /*with_out=*/false);
  execute_on_cuda(attention, run, cuda_repeats(options, length, total_ms(first.ms)));
  return run;
}

// The data of one length where it is to run.
class Bench {
 public:
  Bench(const BenchOptions& options, int64_t length, bool on_cuda)
      : options_(options), length_(length), on_cuda_(on_cuda) {
    BenchShape shape = options.shape;
    shape.length = length;
    if (on_cuda && options.input == "random") {
      data_ = make_bench_data_on_cuda(shape, options.seed);
      return;
    }
    data_ = make_bench_data(shape, options.input, options.seed);
    if (on_cuda) copy_.emplace(data_.attention);
  }

  const Attention& attention() const { return copy_ ? copy_->attention() : data_.attention; }
  Run measure(const Policy& policy) const {
    if (on_cuda_) return measure_on_cuda(options_, attention(), length_, policy);
    Run run = make_run(attention(), policy);
    execute(attention(), run, options_.device.num_threads, options_.repeats, options_.max_seconds);
    return run;
  }

 private:
  const BenchOptions& options_;
  int64_t length_;
  bool on_cuda_;
  BenchData data_;
  std::optional<DeviceInput> copy_;
};

void run_length(const BenchOptions& options, int64_t length, const std::string& command,
                const std::string& gpu, Progress& progress) {
  progress.show(fmt::format("{} tokens: input", length));
  const Bench bench(options, length, !gpu.empty());
  const Attention& attention = bench.attention();
  Series series{options, attention, command, gpu};
  const auto measure = [&](const std::string& name, const Json& parameters, const Policy& policy) {
    progress.show(fmt::format("{} tokens: {}", length, name));
    const Run run = bench.measure(policy);
    if (std::holds_alternative<Dense>(policy)) {
      series.dense_ms = run.ms[kNumStages - 1];
      series.dense_pairs = visible_pairs(attention, run.mask);
    }
    progress.show("");
    print_json(line_of(series, name, parameters, run), -1);
    std::fflush(stdout);
  };
  measure("dense", Json::object(), Dense{});
  for (const std::string& text : split(options.policies)) {
    const Policy policy = parse_policy(text);
    if (!std::holds_alternative<Dense>(policy)) measure(text, parameters_json(policy, ""), policy);
  }
  for (const std::string& text : split(options.densities)) {
    BlockMask mask = mask_for(attention);
    const Buffer words(mask.bytes(), "a random mask");
    mask.words = reinterpret_cast<uint32_t*>(words.data());
    random_mask(mask, parse_density(text), options.seed);
    measure("attend", {{"density", parse_density(text)}}, UserMask{mask});
  }
}

// The policy with its gate open, so that it selects at every length.
Policy ungated(Policy policy) {
  if (auto* crisp = std::get_if<Crisp>(&policy)) crisp->dense_below_tokens = 0;
  if (auto* flex = std::get_if<FlexPrefill>(&policy)) flex->dense_below_tokens = 0;
  return policy;
}

void run_gate(const BenchOptions& options, const std::vector<int64_t>& lengths,
              const std::string& command, const std::string& gpu, Progress& progress) {
  std::vector<std::string> names = split(options.policies);
  std::erase(names, "dense");
  std::vector<std::vector<GatePoint>> points(names.size());
  for (const int64_t length : lengths) {
    progress.show(fmt::format("gate: {} tokens", length));
    const Bench bench(options, length, !gpu.empty());
    const double dense_ms = total_ms(bench.measure(Dense{}).ms);
    for (size_t i = 0; i < names.size(); ++i) {
      const Run run = bench.measure(ungated(parse_policy(names[i])));
      points[i].push_back({length, density_of(run, bench.attention()), total_ms(run.ms), dense_ms});
    }
  }
  progress.show("");
  for (size_t i = 0; i < names.size(); ++i) {
    const int64_t gate = gate_of(points[i]);
    Json out;
    out["bench"] = "gate";
    out["policy"] = names[i];
    out["gate_tokens"] = gate < 0 ? Json() : Json(gate);
    out["points"] = points_json(points[i]);
    out["shape"] = {{"num_q_heads", options.shape.num_q_heads},
                    {"num_kv_heads", options.shape.num_kv_heads},
                    {"head_dim", options.shape.head_dim},
                    {"dtype", options.dtype}};
    add_origin(out, options, command, gpu);
    print_json(out, -1);
  }
}

// The sentence of the library for whatever it would refuse later.
void check_policies(const BenchOptions& options, const std::vector<int64_t>& lengths) {
  std::vector<Policy> policies = {Dense{}};
  for (const std::string& text : split(options.policies)) policies.push_back(parse_policy(text));
  for (const int64_t length : lengths) {
    const BenchShape& shape = options.shape;
    Attention attention;
    attention.q =
        as_const(head_major(nullptr, shape.dtype, shape.num_q_heads, length, shape.head_dim));
    attention.k = attention.v =
        as_const(head_major(nullptr, shape.dtype, shape.num_kv_heads, length, shape.head_dim));
    attention.softmax_scale = 1;
    for (const Policy& policy : policies) {
      if (const char* why =
              why_unsupported(attention, policy, mask_for(attention), options.device.context()))
        throw UsageError(why);
    }
  }
}

int run_bench(BenchOptions& options, const std::string& command) {
  options.device.check();
  options.device.require_device();
  if (options.gate && options.lengths_option->count() == 0) options.lengths = options.gate_lengths;
  options.shape.dtype = dtype_from(options.dtype);
  if (options.repeats < 1) {
    throw UsageError(fmt::format("--repeat is {}, expected at least 1", options.repeats));
  }
  std::vector<int64_t> lengths;
  for (const std::string& text : split(options.lengths)) lengths.push_back(parse_length(text));
  // Everything that could be refused is refused before the first line.
  for (const std::string& text : split(options.densities)) parse_density(text);
  check_policies(options, lengths);
  const std::string gpu = options.device.is_cuda() ? cuda_machine().devices[0].name : "";
  Progress progress;
  if (options.gate) {
    std::sort(lengths.begin(), lengths.end());
    run_gate(options, lengths, command, gpu, progress);
    return 0;
  }
  for (const int64_t length : lengths) run_length(options, length, command, gpu, progress);
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Time every stage; one JSON line per case");
  command->footer(kFooter);
  const auto add = [&](const char* flag, auto& value, const char* help, const char* type) {
    return command->add_option(flag, value, help)->capture_default_str()->type_name(type);
  };
  options->lengths_option =
      add("--lengths", options->lengths, "Tokens, comma-separated; k is 1024", "LIST");
  add("--policies", options->policies, "crisp, flexprefill, or none; dense always runs", "LIST");
  command->add_flag("--gate", options->gate,
                    "Find the length from which the policies pay on this device");
  add("--densities", options->densities, "Random masks to attend over, or none; in (0, 1]", "LIST");
  add("--q-heads", options->shape.num_q_heads, "Query heads", "N");
  add("--kv-heads", options->shape.num_kv_heads, "Key and value heads; divides --q-heads", "N");
  add("--head-dim", options->shape.head_dim, "Elements per head, a multiple of 8", "N");
  add_dtype_option(*command, options->dtype);
  add("--input", options->input, "A preset of `crisp synth`, or random (noise, any head count)",
      "NAME");
  add("--seed", options->seed, "Of the input and the random masks", "N");
  options->repeat_option = add("--repeat", options->repeats, "Most runs per case", "N");
  options->seconds_option =
      add("--seconds", options->max_seconds, "No further repeat of a case after this long", "S");
  add("--commit", options->commit, "Recorded in every line", "HASH");
  options->device.add_to(*command);
  command->callback([options, &exit_code] { exit_code = run_bench(*options, command_line()); });
}

}  // namespace crisp::cli
