#include "commands/policy_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "commands/commands.h"

namespace crisp::cli {

namespace {

const std::vector<PolicyKind> kBoth = {PolicyKind::kCrisp, PolicyKind::kFlexPrefill};
const std::vector<PolicyKind> kCrispOnly = {PolicyKind::kCrisp};

template <class Enum>
using Words = std::vector<std::pair<const char*, Enum>>;

// An enum option that lists its words in --help and refuses every other. The first is the default.
template <class Enum>
CLI::Option* add_words(CLI::App& command, const std::string& flag, Enum& value, Words<Enum> words,
                       const std::string& help) {
  std::string list;
  for (const auto& [word, unused] : words) list += (list.empty() ? "" : "|") + std::string(word);
  const std::string first = words.front().first;
  return command
      .add_option_function<std::string>(
          flag,
          [flag, list, words = std::move(words), &value](const std::string& text) {
            for (const auto& [word, meaning] : words) {
              if (text == word) {
                value = meaning;
                return;
              }
            }
            throw CLI::ValidationError(flag, fmt::format("is '{}', expected {}", text, list));
          },
          help)
      ->type_name(list)
      ->default_str(first);
}

void add_budget_flags(CLI::App& command, Crisp& crisp, CLI::Option*& min_budget,
                      CLI::Option*& dense_below) {
  min_budget = command.add_option("--min-budget-tokens", crisp.min_budget_tokens,
                                  "Least kept per direction, in tokens, rounded up to blocks of "
                                  "128; >= 0. crisp and flexprefill");
  dense_below =
      command.add_option("--dense-below-tokens", crisp.dense_below_tokens,
                         "Shorter inputs keep every block; tokens, >= 0. crisp and "
                         "flexprefill. On a CUDA device on which `crisp bench --gate` was "
                         "run, the default is what it found");
}

}  // namespace

const char* name(PolicyKind kind) {
  constexpr const char* kNames[] = {"dense", "crisp", "flexprefill", "mask"};
  return kNames[static_cast<size_t>(kind)];
}

PolicyKind kind_of(const Policy& policy) { return static_cast<PolicyKind>(policy.index()); }
static_assert(std::is_same_v<std::variant_alternative_t<2, Policy>, FlexPrefill>);

void PolicyOptions::add(CLI::Option* option, std::vector<PolicyKind> readers) {
  if (option->get_default_str().empty() && option->get_items_expected() > 0) {
    option->capture_default_str();
  }
  option->group("Policy");
  flags_.push_back({option, std::move(readers)});
}

void PolicyOptions::add_to(CLI::App& command, bool with_mask) {
  Words<PolicyKind> kinds = {{"crisp", PolicyKind::kCrisp},
                             {"flexprefill", PolicyKind::kFlexPrefill},
                             {"dense", PolicyKind::kDense}};
  if (with_mask) kinds.emplace_back("mask", PolicyKind::kMask);
  add_words(command, "--policy", kind, std::move(kinds), "How a head chooses its blocks")
      ->group("Policy");
  if (with_mask) {
    add(command
            .add_option("--mask", mask_file,
                        "The user's mask: safetensors with `mask`, U32 [heads, q_blocks, "
                        "words_per_row]")
            ->type_name("FILE"),
        {PolicyKind::kMask});
  }
  add(command.add_option("--tau-proxy", crisp.tau_proxy,
                         "Structural mass (share of attention on the sink and recency windows) "
                         "from which a head is Vertical-Slash; >= 0, above 1 pools every head"),
      kCrispOnly);
  add(command.add_option("--alpha", crisp.alpha,
                         "Vertical-Slash keeps blocks above alpha x noise floor; > 0, larger is "
                         "sparser"),
      kCrispOnly);
  add(command.add_option("--gamma", crisp.gamma,
                         "Coverage target of pooled heads (flexprefill: of every head); in (0, 1]"),
      kBoth);
  add(command.add_option("--sink-tokens", crisp.sink_tokens, "Sink window, tokens >= 1"),
      kCrispOnly);
  add(command.add_option("--recency-tokens", crisp.recency_tokens, "Recency window, tokens >= 1"),
      kCrispOnly);
  CLI::Option *min_budget = nullptr, *dense_below = nullptr;
  add_budget_flags(command, crisp, min_budget, dense_below);
  add(min_budget, kBoth);
  add(dense_below, kBoth);
  dense_below_ = dense_below;
  add_variants(command);
}

// What else a paper or its ablations leave open.
void PolicyOptions::add_variants(CLI::App& command) {
  add(add_words<NoiseFloor>(command, "--noise-floor", crisp.noise_floor,
                            {{"mean", NoiseFloor::kMean}, {"median", NoiseFloor::kMedian}},
                            "The floor: mean or median mass of the background blocks"),
      kCrispOnly);
  add(command.add_flag("--no-pooled-budget", no_pooled_budget_,
                       "Pooled heads do not also keep min-budget vertical and slash blocks"),
      kCrispOnly);
  add(add_words<Routing>(
          command, "--routing", crisp.routing,
          {{"structural", Routing::kStructuralMass}, {"js", Routing::kJsDistance}},
          "Ablation: route by structural mass, or by Jensen-Shannon distance as flexprefill does"),
      kCrispOnly);
  add(add_words<Selection>(
          command, "--selection", crisp.selection,
          {{"floor", Selection::kNoiseFloor}, {"coverage", Selection::kCoverage}},
          "Ablation: keep blocks above the noise floor, or the smallest set that holds gamma"),
      kCrispOnly);
  add(command.add_option("--tau-js", crisp.tau_js,
                         "JS distance below which a head is pooled; >= 0. flexprefill, and crisp "
                         "with --routing js"),
      kBoth);
  add(add_words<FlexPrefill::Variant>(
          command, "--variant", flex_prefill.variant,
          {{"official", FlexPrefill::Variant::kOfficial}, {"paper", FlexPrefill::Variant::kPaper}},
          "flexprefill as its published code does it, or as its paper says"),
      {PolicyKind::kFlexPrefill});
}

void PolicyOptions::finish(const std::vector<PolicyKind>& used) {
  const auto uses = [&](PolicyKind wanted) {
    return std::find(used.begin(), used.end(), wanted) != used.end();
  };
  for (const Flag& flag : flags_) {
    if (flag.option->count() == 0) continue;
    const bool read = std::any_of(flag.readers.begin(), flag.readers.end(), uses);
    const bool idle = flag.option->check_name("--tau-js") && !uses(PolicyKind::kFlexPrefill) &&
                      crisp.routing != Routing::kJsDistance;
    if (read && !idle) continue;
    throw UsageError(fmt::format("{} has no effect here: --policy {} does not read it",
                                 flag.option->get_name(), name(kind)));
  }
  crisp.pooled_keeps_budget = !no_pooled_budget_;
  flex_prefill.gamma = crisp.gamma;
  flex_prefill.tau = crisp.tau_js;
  flex_prefill.min_budget_tokens = crisp.min_budget_tokens;
  flex_prefill.dense_below_tokens = crisp.dense_below_tokens;
}

Policy PolicyOptions::policy(PolicyKind wanted, const Context& context) const {
  const auto gated = [&](auto policy) -> Policy {
    if (dense_below_->count() > 0) return policy;
    const int32_t measured = measured_gate(policy, context);
    if (measured >= 0) policy.dense_below_tokens = measured;
    return policy;
  };
  if (wanted == PolicyKind::kCrisp) return gated(crisp);
  if (wanted == PolicyKind::kFlexPrefill) return gated(flex_prefill);
  if (wanted == PolicyKind::kDense) return Dense{};
  throw std::logic_error("a user mask is made from its file");
}

const char* PolicyOptions::gate_source(PolicyKind wanted, const Context& context) const {
  if (wanted == PolicyKind::kDense || wanted == PolicyKind::kMask) return nullptr;
  if (dense_below_->count() > 0) return "typed";
  const Policy policy = wanted == PolicyKind::kCrisp ? Policy(crisp) : Policy(flex_prefill);
  return measured_gate(policy, context) >= 0 ? "measured" : "default";
}

int32_t gate_of(const Policy& policy) {
  if (const auto* crisp = std::get_if<Crisp>(&policy)) return crisp->dense_below_tokens;
  if (const auto* flex = std::get_if<FlexPrefill>(&policy)) return flex->dense_below_tokens;
  return 0;
}

nlohmann::ordered_json json_number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

nlohmann::ordered_json json_number(float value) {
  return json_number(std::isfinite(value) ? std::stod(fmt::format("{}", value)) : std::nan(""));
}

nlohmann::ordered_json parameters_json(const Policy& policy, const std::string& mask_file) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  if (const auto* crisp = std::get_if<Crisp>(&policy)) {
    out["tau_proxy"] = json_number(crisp->tau_proxy);
    out["alpha"] = json_number(crisp->alpha);
    out["gamma"] = json_number(crisp->gamma);
    out["sink_tokens"] = crisp->sink_tokens;
    out["recency_tokens"] = crisp->recency_tokens;
    out["min_budget_tokens"] = crisp->min_budget_tokens;
    out["dense_below_tokens"] = crisp->dense_below_tokens;
    out["noise_floor"] = crisp->noise_floor == NoiseFloor::kMean ? "mean" : "median";
    out["pooled_keeps_budget"] = crisp->pooled_keeps_budget;
    out["routing"] = crisp->routing == Routing::kStructuralMass ? "structural" : "js";
    out["selection"] = crisp->selection == Selection::kNoiseFloor ? "floor" : "coverage";
    out["tau_js"] = json_number(crisp->tau_js);
  } else if (const auto* flex = std::get_if<FlexPrefill>(&policy)) {
    out["tau"] = json_number(flex->tau);
    out["gamma"] = json_number(flex->gamma);
    out["min_budget_tokens"] = flex->min_budget_tokens;
    out["dense_below_tokens"] = flex->dense_below_tokens;
    out["variant"] = flex->variant == FlexPrefill::Variant::kOfficial ? "official" : "paper";
  } else if (std::holds_alternative<UserMask>(policy)) {
    out["file"] = mask_file;
  }
  return out;
}

void add_dtype_option(CLI::App& command, std::string& dtype) {
  command.add_option("--dtype", dtype, "Storage type of q, k, v and the output")
      ->capture_default_str()
      ->type_name("float32|float16|bfloat16");
}

DType dtype_from(const std::string& text) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (text == name(dtype)) return dtype;
  }
  throw UsageError(fmt::format("--dtype is '{}', expected float32, float16 or bfloat16", text));
}

const char* name(Pattern pattern) {
  constexpr const char* kNames[] = {"dense", "vertical_slash", "pooled", "user_mask"};
  return kNames[static_cast<size_t>(pattern)];
}

}  // namespace crisp::cli
