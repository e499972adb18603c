// explain.cc - `crisp explain`: cost and memory of a shape, without running it.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <optional>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/engine.h"
#include "commands/policy_options.h"
#include "commands/terminal.h"
#include "core/dtype.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Costs count a multiply-add as 2 FLOP, per layer:
  dense attend    4 x head_dim x q_heads x (query, key) pairs, pairs = q_len x (kv_len - q_len) +
                  q_len x (q_len + 1) / 2
  sparse attend   density x dense attend
  proxy           2 x head_dim x q_heads x min(128, q_len) x kv_len
  pooled map      2 x head_dim x q_heads x causal blocks, at most (pooled heads only)

Examples:
  crisp explain --q-heads 32 --kv-heads 8 --head-dim 128 --n 131072
  crisp explain --q-heads 32 --kv-heads 8 --head-dim 128 --n 131072 --q-len 8192 --json)";

struct ExplainOptions {
  int64_t q_heads = 32, kv_heads = 8, head_dim = 128, kv_len = 0;
  std::optional<int64_t> q_len;
  std::string dtype = "bfloat16";
  PolicyOptions policy;
  DeviceOptions device;
  bool json = false;
};

Attention shape_of(const ExplainOptions& options, int64_t q_len, int64_t kv_len, DType dtype) {
  Attention attention;
  const auto tensor = [&](int64_t heads, int64_t tokens) {
    return as_const(head_major(nullptr, dtype, heads, tokens, options.head_dim));
  };
  attention.q = tensor(options.q_heads, q_len);
  attention.k = attention.v = tensor(options.kv_heads, kv_len);
  attention.softmax_scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(options.head_dim)));
  return attention;
}

const char* refusal(const Attention& attention, const Policy& policy, const Context& context) {
  // mask_for throws on what why_unsupported would name; any mask of the right block size serves
  // to ask, since the shape of attention is checked first.
  const char* why = why_unsupported(attention, policy, BlockMask{}, context);
  if (why != nullptr && std::string_view(why).starts_with("mask.")) {
    why = why_unsupported(attention, policy, mask_for(attention), context);
  }
  return why;
}

// Largest n (q_len = kv_len) that is accepted, by doubling and bisection.
int64_t largest_length(const ExplainOptions& options, const Policy& policy, const Context& context,
                       DType dtype) {
  const auto accepted = [&](int64_t n) {
    return refusal(shape_of(options, n, n, dtype), policy, context) == nullptr;
  };
  int64_t low = 0, high = 1;
  while (high < (int64_t{1} << 40) && accepted(high)) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (accepted(middle) ? low : high) = middle;
  }
  return low;
}

Json explain(const ExplainOptions& options) {
  const DType dtype = dtype_from(options.dtype);
  const Policy policy = options.policy.policy(options.policy.kind);
  const int64_t q_len = options.q_len.value_or(options.kv_len);
  const Attention attention = shape_of(options, q_len, options.kv_len, dtype);
  const Context context = options.device.context();
  Json out;
  out["shape"] = {{"num_q_heads", options.q_heads},
                  {"num_kv_heads", options.kv_heads},
                  {"q_len", q_len},
                  {"kv_len", options.kv_len},
                  {"head_dim", options.head_dim},
                  {"dtype", options.dtype}};
  out["policy"] = name(options.policy.kind);
  out["threads"] = options.device.is_cuda() ? Json() : Json(options.device.resolved_threads());
  const char* why = refusal(attention, policy, context);
  out["supported"] = why == nullptr;
  out["why_unsupported"] = why == nullptr ? Json() : Json(why);
  if (why != nullptr) return out;
  const BlockMask mask = mask_for(attention);
  const auto width = static_cast<double>(options.q_heads * options.head_dim);
  const auto rows = static_cast<double>(q_len), keys = static_cast<double>(options.kv_len);
  // No keys is an accepted shape: an empty state.
  const double pairs = keys == 0 ? 0 : rows * (keys - rows) + rows * (rows + 1) / 2;
  const bool selects = options.policy.kind != PolicyKind::kDense;
  const int64_t causal_blocks = num_causal_blocks(attention);
  out["causal_blocks_per_head"] = causal_blocks;
  out["flop"] = {{"dense_attend", 4 * width * pairs},
                 {"proxy", selects ? Json(2 * width * std::min(128.0, rows) * keys) : Json()},
                 {"pooled_map_at_most",
                  selects ? Json(2 * width * static_cast<double>(causal_blocks)) : Json()}};
  const int64_t inputs = tensor_bytes(attention.q) + 2 * tensor_bytes(attention.k);
  const auto workspace = static_cast<int64_t>(workspace_bytes(attention, policy, mask, context));
  const int64_t output = tensor_bytes(attention.q);
  out["bytes"] = {{"q_k_v", inputs},
                  {"output", output},
                  {"mask", mask.bytes()},
                  {"workspace", workspace},
                  {"total", inputs + output + mask.bytes() + workspace}};
  out["largest_n"] = largest_length(options, policy, context, dtype);
  return out;
}

std::string amount(double value, const char* unit, double step) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  constexpr const char* kBinary[] = {"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"};
  size_t power = 0;
  for (; value >= step && power < 6; ++power) value /= step;
  return fmt::format("{:.{}f} {}{}", value, power == 0 ? 0 : 2,
                     step == 1024 ? kBinary[power] : kPrefixes[power], unit);
}

std::string cost_text(const Json& value) {
  return value.is_null() ? "-" : amount(value.get<double>(), "FLOP", 1000);
}

void print_text(const Json& all) {
  const Json& shape = all["shape"];
  fmt::print("{} query heads, {} kv heads, head_dim {}, {} queries, {} keys, {}; policy {}\n\n",
             shape["num_q_heads"].get<int64_t>(), shape["num_kv_heads"].get<int64_t>(),
             shape["head_dim"].get<int64_t>(), shape["q_len"].get<int64_t>(),
             shape["kv_len"].get<int64_t>(), shape["dtype"].get<std::string>(),
             all["policy"].get<std::string>());
  const Json &flop = all["flop"], &bytes = all["bytes"];
  const auto size = [&](const char* key) { return amount(bytes[key].get<double>(), "B", 1024); };
  fmt::print("{}", table({{"compute per layer", ""},
                          {"  dense attend", cost_text(flop["dense_attend"])},
                          {"  sparse attend", "density x dense attend"},
                          {"  proxy map", cost_text(flop["proxy"])},
                          {"  pooled maps, at most", cost_text(flop["pooled_map_at_most"])},
                          {"  causal blocks per head",
                           fmt::format("{}", all["causal_blocks_per_head"].get<int64_t>())},
                          {"memory", ""},
                          {"  q, k, v", size("q_k_v")},
                          {"  output", size("output")},
                          {"  block mask", size("mask")},
                          {all["threads"].is_null()
                               ? std::string("  workspace")
                               : fmt::format("  workspace, {} threads", all["threads"].get<int>()),
                           size("workspace")},
                          {"  total", size("total")},
                          {"largest n", fmt::format("{}", all["largest_n"].get<int64_t>())}}));
}

int run_explain(ExplainOptions& options) {
  options.device.check();
  options.policy.finish({options.policy.kind});
  const Json all = explain(options);
  if (options.json) print_json(all);
  if (!all["supported"].get<bool>()) throw UsageError(all["why_unsupported"].get<std::string>());
  if (!options.json) print_text(all);
  return 0;
}

}  // namespace

void add_explain_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command =
      app.add_subcommand("explain", "Show cost, memory and limits of a shape without running it");
  command->footer(kFooter);
  const auto add_count = [&](const char* flag, int64_t& value, const char* help) {
    return command->add_option(flag, value, help)->capture_default_str()->type_name("N");
  };
  add_count("--q-heads", options->q_heads, "Query heads");
  add_count("--kv-heads", options->kv_heads, "Key and value heads; divides --q-heads");
  add_count("--head-dim", options->head_dim, "Elements per head, a multiple of 8");
  command->add_option("--n", options->kv_len, "Keys in all")->type_name("TOKENS")->required();
  command->add_option("--q-len", options->q_len, "Queries, the last of the n tokens; default: n")
      ->type_name("TOKENS");
  add_dtype_option(*command, options->dtype);
  options->policy.add_to(*command, false);
  options->device.add_to(*command);
  command->add_flag("--json", options->json, "Print one JSON document");
  command->callback([options, &exit_code] { exit_code = run_explain(*options); });
}

}  // namespace crisp::cli
