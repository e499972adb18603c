#include "commands/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "commands/policy_options.h"
#include "commands/terminal.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

std::string number(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "-";
}

bool has_counts(Pattern pattern) {
  return pattern == Pattern::kVerticalSlash || pattern == Pattern::kPooled;
}

double speed_up(const PrefillResult& result, const PolicyResult& policy) {
  return dense_ms(result) / total_ms(policy.run.ms);
}

std::string header_text(const PrefillResult& result) {
  const Attention& a = result.attention;
  std::string text = fmt::format("{}\n{} query heads, {} kv heads, head_dim {}, {} tokens",
                                 printable_name(result.input), a.q.num_heads, a.k.num_heads,
                                 a.q.head_dim, a.q.num_tokens);
  if (a.k.num_tokens != a.q.num_tokens) text += fmt::format(" against {} keys", a.k.num_tokens);
  text += fmt::format(", {}, scale {}", name(a.q.dtype), a.softmax_scale);
  if (result.chunk_tokens > 0) {
    text += fmt::format(", in {} chunks of {}", a.segments.size(), result.chunk_tokens);
  }
  if (result.by_reference) return text + "\ndouble-precision reference, not timed\n\n";
  const std::string where =
      result.gpu.empty() ? fmt::format("cpu ({}), {} threads", cpu_target(), result.num_threads)
                         : fmt::format("cuda ({})", result.gpu);
  return text + fmt::format("\n{}; {}\n\n", where,
                            result.repeats == 1
                                ? "ms of one run"
                                : fmt::format("ms are medians of {} runs", result.repeats));
}

std::string patterns_text(const Summary& summary) {
  std::string text;
  const auto add = [&](int64_t count, const char* what) {
    if (count > 0) text += fmt::format("{}{} {}", text.empty() ? "" : " ", count, what);
  };
  add(summary.vertical_slash, "VS");
  add(summary.pooled, "pooled");
  add(summary.dense, "dense");
  add(summary.user_mask, "mask");
  return text;
}

std::vector<std::string> policy_row(const PrefillResult& result, const PolicyResult& policy) {
  const Summary summary = summarise(policy.run, policy.heads);
  const StageTimes& ms = policy.run.ms;
  std::vector<std::string> row = {policy.name, patterns_text(summary),
                                  fmt::format("{:.1f} %", 100 * summary.density)};
  if (result.compared) {
    for (const double value : {summary.coverage, summary.coverage_worst, summary.relative_error,
                               summary.relative_error_worst}) {
      row.push_back(number(value, "{:.4f}"));
    }
  }
  if (!result.by_reference) {
    row.push_back(number(selection_ms(ms), "{:.1f}"));
    row.push_back(number(ms[kNumStages - 1], "{:.1f}"));
    if (result.compared) row.push_back(number(speed_up(result, policy), "{:.2f}x"));
  }
  return row;
}

// Whether a segment was shorter than the policy's dense_below_tokens, so that nothing was selected.
bool is_gated(const PrefillResult& result, const PolicyResult& policy) {
  const std::span<const Segment> segments = result.attention.segments;
  if (segments.empty()) return result.attention.k.num_tokens < policy.gate_tokens;
  return std::any_of(segments.begin(), segments.end(),
                     [&](const Segment& s) { return s.kv_len < policy.gate_tokens; });
}

std::string gates_text(const PrefillResult& result) {
  std::string text;
  for (const PolicyResult& policy : result.policies) {
    if (!is_gated(result, policy)) continue;
    text += fmt::format(
        "{}: {} below {} tokens every block is kept (--dense-below-tokens, {}).\n", policy.name,
        result.attention.segments.empty() ? "the input is short:" : "in some chunks:",
        policy.gate_tokens, policy.gate_source);
  }
  return text.empty() ? text : "\n" + text;
}

std::string policies_text(const PrefillResult& result) {
  std::vector<std::string> head = {"policy", "heads", "density"};
  if (result.compared) {
    for (const char* column : {"coverage", "worst", "rel. error", "worst"}) head.push_back(column);
  }
  if (!result.by_reference) {
    for (const char* column : {"select ms", "attend ms"}) head.push_back(column);
    if (result.compared) head.push_back("speed-up");
  }
  std::vector<std::vector<std::string>> rows = {head};
  for (const PolicyResult& policy : result.policies) rows.push_back(policy_row(result, policy));
  std::string text = table(rows) + gates_text(result);
  if (!result.compared) return text;
  text +=
      "\nVS: Vertical-Slash. density: kept / causal blocks. coverage: attention mass kept, mean "
      "over rows and heads.\nrel. error: |out - dense| / |dense| per head, mean over heads. worst: "
      "over the heads.\n";
  if (!result.by_reference) text += "speed-up: dense attend ms / (select ms + attend ms).\n";
  return text;
}

std::string heads_text(const PrefillResult& result, const PolicyResult& policy) {
  std::vector<std::vector<std::string>> rows = {
      {"head", "pattern", "structural mass", "vertical", "slash", "blocks", "density"}};
  const int64_t num_heads = result.attention.q.num_heads;
  for (int64_t head = 0; head < num_heads; ++head) {
    const HeadSummary summary = head_summary(policy.run, num_heads, head);
    const HeadReport& report = summary.report;
    const bool counts = !summary.mixed && has_counts(report.pattern);
    rows.push_back(
        {fmt::format("{}", head), summary.mixed ? "mixed" : name(report.pattern),
         number(static_cast<double>(report.structural_mass), "{:.4f}"),
         counts ? fmt::format("{}", report.num_vertical) : "-",
         counts ? fmt::format("{}", report.num_slash) : "-", fmt::format("{}", report.num_blocks),
         fmt::format("{:.1f} %", 100 * policy.heads[static_cast<size_t>(head)].density)});
  }
  return "\n" + table(rows);
}

Json report_json(int64_t head, const HeadReport& report, bool mixed, bool one_segment) {
  Json out;
  out["head"] = head;
  out["pattern"] = mixed ? "mixed" : name(report.pattern);
  out["structural_mass"] = json_number(report.structural_mass);
  out["js_distance"] = json_number(report.js_distance);
  const bool counts = one_segment && has_counts(report.pattern);
  out["num_vertical"] = counts ? Json(report.num_vertical) : Json();
  out["num_slash"] = counts ? Json(report.num_slash) : Json();
  out["num_blocks"] = report.num_blocks;
  return out;
}

Json heads_json(const PrefillResult& result, const PolicyResult& policy) {
  const int64_t num_heads = result.attention.q.num_heads;
  Json out = Json::array();
  for (int64_t head = 0; head < num_heads; ++head) {
    const HeadSummary summary = head_summary(policy.run, num_heads, head);
    const HeadMetrics& metrics = policy.heads[static_cast<size_t>(head)];
    Json one =
        report_json(head, summary.report, summary.mixed, result.attention.segments.size() <= 1);
    one["density"] = metrics.density;
    one["coverage"] = json_number(metrics.coverage);
    one["relative_error"] = json_number(metrics.relative_error);
    out.push_back(std::move(one));
  }
  return out;
}

Json chunks_json(const PrefillResult& result, const PolicyResult& policy) {
  if (result.attention.segments.size() <= 1) return nullptr;
  const int64_t num_heads = result.attention.q.num_heads;
  Json out = Json::array();
  for (size_t index = 0; index < result.attention.segments.size(); ++index) {
    const Segment& segment = result.attention.segments[index];
    Json heads = Json::array();
    for (int64_t head = 0; head < num_heads; ++head) {
      const size_t at = index * static_cast<size_t>(num_heads) + static_cast<size_t>(head);
      heads.push_back(report_json(head, policy.run.report[at], false, true));
    }
    out.push_back({{"q_start", segment.q_start},
                   {"q_len", segment.q_len},
                   {"kv_len", segment.kv_len},
                   {"heads", std::move(heads)}});
  }
  return out;
}

Json policy_json(const PrefillResult& result, const PolicyResult& policy) {
  const Summary summary = summarise(policy.run, policy.heads);
  Json out;
  out["name"] = policy.name;
  out["parameters"] = policy.parameters;
  if (policy.gate_source != nullptr) {
    out["gate"] = {{"tokens", policy.gate_tokens},
                   {"source", policy.gate_source},
                   {"used", is_gated(result, policy)}};
  } else {
    out["gate"] = nullptr;
  }
  out["density"] = summary.density;
  out["coverage"] = json_number(summary.coverage);
  out["coverage_worst"] = json_number(summary.coverage_worst);
  out["relative_error"] = json_number(summary.relative_error);
  out["relative_error_worst"] = json_number(summary.relative_error_worst);
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    out["ms"][kStageNames[stage]] = json_number(policy.run.ms[stage]);
  }
  out["speed_up"] = json_number(speed_up(result, policy));
  out["patterns"] = {{"vertical_slash", summary.vertical_slash},
                     {"pooled", summary.pooled},
                     {"dense", summary.dense},
                     {"user_mask", summary.user_mask}};
  out["heads"] = heads_json(result, policy);
  out["chunks"] = chunks_json(result, policy);
  return out;
}

}  // namespace

double dense_ms(const PrefillResult& result) {
  for (const PolicyResult& policy : result.policies) {
    if (policy.name == name(PolicyKind::kDense)) return policy.run.ms[kNumStages - 1];
  }
  return std::numeric_limits<double>::quiet_NaN();
}

std::string as_text(const PrefillResult& result) {
  std::string text = header_text(result) + policies_text(result);
  if (!result.compared) text += heads_text(result, result.policies[0]);
  return text;
}

Json as_json(const PrefillResult& result) {
  const Attention& a = result.attention;
  Json out;
  out["input"] = printable_name(result.input);
  out["shape"] = {{"num_q_heads", a.q.num_heads}, {"num_kv_heads", a.k.num_heads},
                  {"q_len", a.q.num_tokens},      {"kv_len", a.k.num_tokens},
                  {"head_dim", a.q.head_dim},     {"dtype", name(a.q.dtype)}};
  out["softmax_scale"] = json_number(a.softmax_scale);
  out["block_size"] = result.policies[0].run.mask.block_size;
  out["causal_blocks"] = num_causal_blocks(a);
  out["chunk_tokens"] = result.chunk_tokens > 0 ? Json(result.chunk_tokens) : Json();
  const bool on_cuda = !result.gpu.empty();
  out["device"] = on_cuda ? "cuda" : "cpu";
  out["executor"] = result.by_reference ? "reference" : on_cuda ? result.gpu : cpu_target();
  out["threads"] = on_cuda ? Json() : Json(result.by_reference ? 1 : result.num_threads);
  out["repeat"] = result.by_reference ? 1 : result.repeats;
  out["dense_ms"] = json_number(dense_ms(result));
  out["policies"] = Json::array();
  for (const PolicyResult& policy : result.policies) {
    out["policies"].push_back(policy_json(result, policy));
  }
  return out;
}

}  // namespace crisp::cli
