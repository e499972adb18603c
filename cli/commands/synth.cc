// synth.cc - `crisp synth`: writes one layer of synthetic attention heads and the truth about them.
#include "synth/synth.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <list>
#include <memory>
#include <optional>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/engine.h"
#include "commands/terminal.h"
#include "files/atomic_file.h"
#include "files/safetensors.h"

namespace crisp::cli {

namespace {

constexpr const char* kFooter = R"(
Random q and k have no sinks, no slashes and nothing to find. This writes q, k and v whose attention
does: per head, components (a sink, the nearest keys, slashes, needles, clusters) each hold a set
share of the attention of the last 128 queries; the rest is background. Targets that cannot be
reached are refused. The file is what `crisp prefill` reads; its metadata holds the softmax scale
and, as `truth`, the same JSON document that --truth writes: components, targets, realised masses.
A seed names the same bits on every machine.

Options that set a mass, --window, --slash, --needle, --sigma and --drift replace that of every head
of the preset; a mass of 0 takes the component away.

Examples:
  crisp synth --out layer.safetensors                        4 heads of different kinds, 32k tokens
  crisp synth --preset retrieval --tokens 131072 --out r.safetensors --truth r.json
  crisp synth --preset pooled-diffuse --sink .6 --needle 5000:4:.05 --out n.safetensors
  crisp synth --list)";

struct SynthOptions {
  std::string preset = "llama-like", dtype = "bfloat16", out, truth;
  bool list = false, json = false;
  synth::LayerSpec spec;
  // What replaces the preset's, if given.
  std::optional<double> sink, local, cluster, sigma, drift;
  std::optional<int64_t> window, sink_tokens, cluster_blocks;
  std::optional<double> sink_value, value_mean, cluster_spread, massive;
  std::vector<std::string> slashes, needles;
};

// The whole of `text` as a number, or nothing.
template <class Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

synth::Slash parse_slash(const std::string& text) {
  const std::vector<std::string> parts = split(text);
  if (parts.size() == 2) {
    const auto distance = number<int64_t>(parts[0]);
    const auto mass = number<double>(parts[1]);
    if (distance && mass) return {*distance, *mass};
  }
  throw UsageError(
      fmt::format("--slash is '{}', expected DISTANCE:MASS, for example 700:.4", text));
}

synth::Needle parse_needle(const std::string& text) {
  const std::vector<std::string> parts = split(text);
  if (parts.size() == 3 || parts.size() == 5) {
    const auto position = number<int64_t>(parts[0]), width = number<int64_t>(parts[1]);
    const auto mass = number<double>(parts[2]);
    const auto begin = parts.size() == 5 ? number<int64_t>(parts[3]) : 0;
    const auto end = parts.size() == 5 ? number<int64_t>(parts[4]) : -1;
    if (position && width && mass && begin && end)
      return {*position, *width, *mass, {*begin, *end}};
  }
  throw UsageError(fmt::format(
      "--needle is '{}', expected POSITION:WIDTH:MASS or POSITION:WIDTH:MASS:ROW_BEGIN:ROW_END, "
      "for example 5000:4:.05",
      text));
}

DType parse_dtype(const std::string& text) {
  if (text == "float32") return DType::kFloat32;
  if (text == "float16") return DType::kFloat16;
  if (text == "bfloat16") return DType::kBFloat16;
  throw UsageError(
      fmt::format("--dtype is '{}', expected float32, float16 or bfloat16", printable_name(text)));
}

template <class Value>
bool replace(const std::optional<Value>& from, Value& to) {
  if (from) to = *from;
  return from.has_value();
}

synth::LayerSpec make_spec(const SynthOptions& options) {
  synth::LayerSpec spec = options.spec;
  synth::apply_preset(options.preset, spec);
  replace(options.sink_tokens, spec.num_sink_tokens);
  replace(options.sink_value, spec.sink_value_scale);
  replace(options.value_mean, spec.value_mean);
  replace(options.cluster_blocks, spec.cluster_blocks);
  replace(options.cluster_spread, spec.cluster_spread);
  replace(options.massive, spec.massive);
  std::vector<synth::Slash> slashes;
  for (const std::string& text : options.slashes) slashes.push_back(parse_slash(text));
  std::vector<synth::Needle> needles;
  for (const std::string& text : options.needles) needles.push_back(parse_needle(text));
  for (synth::HeadSpec& head : spec.heads) {
    bool changed = replace(options.sink, head.sink_mass);
    changed |= replace(options.local, head.local_mass);
    changed |= replace(options.cluster, head.cluster_mass);
    changed |= replace(options.sigma, head.sigma);
    changed |= replace(options.drift, head.drift);
    changed |= replace(options.window, head.window);
    if (!slashes.empty()) head.slashes = slashes;
    if (!needles.empty()) head.needles = needles;
    if (changed || !slashes.empty() || !needles.empty()) head.kind += " (changed)";
  }
  synth::check_spec(spec);
  return spec;
}

void print_presets() {
  std::vector<std::vector<std::string>> rows;
  for (const synth::PresetInfo& info : synth::presets()) {
    fmt::print("{:<18}{}\n", info.name, info.summary);
  }
}

// "0.600 (0.598)": target and realised mass of all components of a kind.
std::string mass_cell(double target, double realised) {
  return target > 0 ? fmt::format("{:.3f} ({:.3f})", target, realised) : "-";
}

std::string masses_text(const synth::Truth& truth) {
  using synth::ComponentKind;
  constexpr std::array kKinds = {ComponentKind::kSink, ComponentKind::kLocal, ComponentKind::kSlash,
                                 ComponentKind::kNeedle, ComponentKind::kCluster};
  std::vector<std::vector<std::string>> rows = {
      {"head", "kind", "sink", "local", "slashes", "needles", "clusters", "background"}};
  for (size_t h = 0; h < truth.heads.size(); ++h) {
    const synth::HeadTruth& head = truth.heads[h];
    std::vector<std::string> row = {fmt::format("{}", h), head.kind};
    for (const ComponentKind kind : kKinds) {
      double target = 0, realised = 0;
      for (const synth::Component& component : head.components) {
        if (component.kind != kind) continue;
        target += component.target;
        realised += component.realised;
      }
      row.push_back(mass_cell(target, realised));
    }
    row.push_back(mass_cell(head.background_target, head.background_realised));
    rows.push_back(std::move(row));
  }
  return table(rows);
}

void check_outputs(const SynthOptions& options) {
  if (options.out.empty()) throw UsageError("--out FILE is required (or --list)");
  if (options.out == options.truth) throw UsageError("--out and --truth name the same file");
  files::check_writable(options.out);
  if (!options.truth.empty()) files::check_writable(options.truth);
}

int run_synth(const SynthOptions& options) {
  if (options.list) {
    print_presets();
    return 0;
  }
  check_outputs(options);
  const DType dtype = parse_dtype(options.dtype);
  const synth::LayerSpec spec = make_spec(options);

  const int64_t element_bytes = dtype == DType::kFloat32 ? 4 : 2;
  const int64_t head_bytes = spec.num_tokens * spec.head_dim * element_bytes;
  const Buffer q(spec.num_q_heads * head_bytes, "q");
  const Buffer k(spec.num_kv_heads * head_bytes, "k"), v(spec.num_kv_heads * head_bytes, "v");
  std::optional<Progress> progress(std::in_place);
  const synth::Truth truth = synth::generate(
      spec, {q.data(), k.data(), v.data(), dtype},
      [&](double fraction) { progress->show(fmt::format("synth: {:.0f} %", 100 * fraction)); });
  progress->show("synth: writing");

  constexpr files::ElementType kTypes[] = {files::ElementType::kF32, files::ElementType::kF16,
                                           files::ElementType::kBF16};
  const files::ElementType type = kTypes[static_cast<size_t>(dtype)];
  const std::vector<int64_t> q_shape = {spec.num_q_heads, spec.num_tokens, spec.head_dim};
  const std::vector<int64_t> kv_shape = {spec.num_kv_heads, spec.num_tokens, spec.head_dim};
  const std::string json = synth::to_json(truth);
  const files::NamedTensor tensors[] = {{"q", {type, q_shape, q.bytes()}},
                                        {"k", {type, kv_shape, k.bytes()}},
                                        {"v", {type, kv_shape, v.bytes()}}};
  std::list<files::AtomicFile> outputs;
  if (!options.truth.empty()) {
    const std::string text = json + "\n";
    outputs.emplace_back(options.truth).write(std::as_bytes(std::span(text)));
  }
  files::write_safetensors(outputs.emplace_back(options.out), tensors,
                           {{"scale", fmt::format("{:.9g}", truth.softmax_scale)},
                            {"preset", options.preset},
                            {"truth", json}});
  files::AtomicFile::commit_all(outputs);
  progress.reset();
  if (options.json) {
    print_json(nlohmann::ordered_json::parse(json));
    return 0;
  }
  fmt::print("{}: q {}, k and v {}, {}, preset {}, seed {}\n\n{}", printable_name(options.out),
             files::shape_text(q_shape), files::shape_text(kv_shape), options.dtype, options.preset,
             spec.seed, masses_text(truth));
  fmt::print("\nMasses: target (realised) of the last 128 queries' attention.\n");
  return 0;
}

void add_layer_options(CLI::App& command, SynthOptions& options) {
  command.add_option("--preset", options.preset, "Kinds of heads; --list names them")
      ->capture_default_str();
  options.spec.num_tokens = 32768;
  command.add_option("--tokens", options.spec.num_tokens, "Queries and keys, any number")
      ->capture_default_str();
  command.add_option("--q-heads", options.spec.num_q_heads, "Query heads")->capture_default_str();
  command.add_option("--kv-heads", options.spec.num_kv_heads, "Key and value heads")
      ->capture_default_str();
  command.add_option("--head-dim", options.spec.head_dim, "A multiple of 8")->capture_default_str();
  command.add_option("--dtype", options.dtype, "float32, float16 or bfloat16")
      ->capture_default_str();
  command.add_option("--seed", options.spec.seed, "Of everything random")->capture_default_str();
  command.add_option("--sink-tokens", options.sink_tokens, "Keys of the sink (4)");
  command.add_option("--sink-value", options.sink_value, "Scale of the sink's values (0.05)");
  command.add_option("--value-mean", options.value_mean,
                     "Size of the mean all values of a kv head share (0.5)");
  command.add_option("--cluster-blocks", options.cluster_blocks,
                     "Key blocks per topic (one in 16, at least 4)");
  command.add_option("--cluster-spread", options.cluster_spread,
                     "Scatter of the block centres (0.15)");
  command.add_option("--massive", options.massive, "Size of the outlier channels (10); 0: none");
}

void add_head_options(CLI::App& command, SynthOptions& options) {
  command.add_option("--sink", options.sink, "Mass on the sink")->type_name("MASS");
  command.add_option("--local", options.local, "Mass on the nearest keys")->type_name("MASS");
  command.add_option("--window", options.window, "How many keys are near")->type_name("TOKENS");
  command
      .add_option("--slash", options.slashes,
                  "A band of keys at a fixed distance before the query; may be repeated")
      ->type_name("DISTANCE:MASS")
      ->allow_extra_args(false);
  command
      .add_option("--needle", options.needles,
                  "Keys that all queries, or those of rows BEGIN..END, look up; may be repeated")
      ->type_name("POSITION:WIDTH:MASS[:BEGIN:END]")
      ->allow_extra_args(false);
  command.add_option("--cluster", options.cluster, "Mass on the blocks of the query block's topic")
      ->type_name("MASS");
  command.add_option("--sigma", options.sigma, "Content noise, standard deviation of the logits")
      ->type_name("NATS");
  command
      .add_option("--drift", options.drift,
                  "How far earlier queries turn away from the needles, 0 to 1")
      ->type_name("X");
}

}  // namespace

void add_synth_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SynthOptions>();
  CLI::App* command =
      app.add_subcommand("synth", "Write synthetic q, k, v whose attention structure is known");
  command->footer(kFooter);
  command->add_flag("--list", options->list, "List the presets and stop");
  command->add_option("--out", options->out, "The .safetensors to write")->type_name("FILE");
  command->add_option("--truth", options->truth, "Also write the truth as JSON")->type_name("FILE");
  command->add_flag("--json", options->json, "Print the truth as JSON in place of the table");
  add_layer_options(*command, *options);
  add_head_options(*command, *options);
  command->callback([options, &exit_code] { exit_code = run_synth(*options); });
}

}  // namespace crisp::cli
