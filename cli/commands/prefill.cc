// prefill.cc - `crisp prefill`: the main job. Runs a policy on files of q, k, v.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <list>
#include <memory>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/engine.h"
#include "commands/engine_cuda.h"
#include "commands/metrics.h"
#include "commands/oracle.h"
#include "commands/policy_options.h"
#include "commands/report.h"
#include "commands/terminal.h"
#include "files/atomic_file.h"
#include "files/safetensors.h"

namespace crisp::cli {

namespace {

constexpr const char* kFooter = R"(
Inputs are post-RoPE tensors of one layer, F32, F16 or BF16: a .safetensors file with
`q` [num_q_heads, q_len, head_dim] and `k`, `v` [num_kv_heads, kv_len, head_dim], or three
.npy files in the order q k v. Query head h reads kv head h / (num_q_heads / num_kv_heads);
attention is causal, the last query sees every key. A string `scale` in the metadata sets the
softmax scale. NaN and infinities are refused.

Chunks: with --chunk N, the policy runs on queries [0, N), then [N, 2N), ..., each against all keys
up to its own last query, as a server that prefills in chunks would. Each chunk routes and selects
by its own last 128 queries, so a head may change its pattern from chunk to chunk, and the
selection differs from that of one shot; the attention over a fixed mask does not.

Examples:
  crisp prefill layer07.safetensors                       run crisp, report each head
  crisp prefill layer07.safetensors --compare             against dense and flexprefill
  crisp prefill q.npy k.npy v.npy --alpha 1.25 --out o.safetensors
  crisp prefill a.safetensors --mask-out m.safetensors    keep the selection ...
  crisp prefill a.safetensors --policy mask --mask m.safetensors --out o.safetensors)";

struct PrefillOptions {
  std::vector<std::string> files;
  PolicyOptions policy;
  DeviceOptions device;
  InputOptions input;
  int repeats = 1;
  int64_t device_memory_mib = 0;
  bool compare = false, by_reference = false, json = false;
  std::string out, mask_out;
};

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return a == b || std::filesystem::equivalent(a, b, error);
}

// What the command runs, the compared dense first.
std::vector<PolicyKind> policies_to_run(const PrefillOptions& options) {
  if (!options.compare) return {options.policy.kind};
  std::vector<PolicyKind> kinds = {PolicyKind::kDense, PolicyKind::kCrisp,
                                   PolicyKind::kFlexPrefill};
  if (!options.policy.mask_file.empty()) kinds.push_back(PolicyKind::kMask);
  return kinds;
}

void check_outputs(const PrefillOptions& options, const std::vector<std::string>& inputs) {
  for (const std::string& path : {options.out, options.mask_out}) {
    if (path.empty()) continue;
    for (const std::string& input : inputs) {
      if (same_file(path, input)) {
        throw UsageError(fmt::format("{} would replace the input of the same name", path));
      }
    }
    files::check_writable(path);
  }
  if (!options.out.empty() && same_file(options.out, options.mask_out)) {
    throw UsageError("--out and --mask-out name the same file");
  }
}

void check_options(PrefillOptions& options, size_t num_inputs) {
  options.device.check();
  options.device.require_device();
  if (options.by_reference) options.device.require_cpu("--reference");
  const bool wants_mask = options.policy.kind == PolicyKind::kMask;
  if (wants_mask && options.policy.mask_file.empty()) {
    throw UsageError("--policy mask needs --mask FILE");
  }
  options.policy.finish(policies_to_run(options));
  if (num_inputs > 1 && (!options.out.empty() || !options.mask_out.empty())) {
    throw UsageError(fmt::format("--out and --mask-out take one input, got {}", num_inputs));
  }
  if (num_inputs > 1 && !options.policy.mask_file.empty()) {
    throw UsageError(fmt::format("--mask takes one input, got {}", num_inputs));
  }
  if (options.input.chunk_tokens < 0) {
    throw UsageError(fmt::format("--chunk is {}, expected at least 1", options.input.chunk_tokens));
  }
  if (options.repeats < 1) {
    throw UsageError(fmt::format("--repeat is {}, expected at least 1", options.repeats));
  }
  constexpr int64_t kMostMib = int64_t{1} << 40;
  if (options.device_memory_mib < 0 || options.device_memory_mib > kMostMib) {
    throw UsageError(fmt::format("--device-memory is {}, expected 0 to {} MiB",
                                 options.device_memory_mib, kMostMib));
  }
  if (options.device_memory_mib > 0 && !options.device.is_cuda()) {
    throw UsageError("--device-memory is of a CUDA device, expected --device cuda with it");
  }
}

// One input and the policies to run on it, all checked, nothing computed.
struct Job {
  Input input;
  std::optional<files::MaskFile> mask;
  std::vector<Policy> policies;
};

Job make_job(const PrefillOptions& options, const std::vector<std::string>& paths) {
  Job job;
  job.input = load_input(paths, options.input);
  const Attention attention = job.input.attention();
  const BlockMask mask = mask_for(attention);
  if (!options.policy.mask_file.empty()) {
    job.mask = files::load_mask(options.policy.mask_file, mask);
  }
  const Context context = options.device.context();
  for (const PolicyKind kind : policies_to_run(options)) {
    job.policies.push_back(kind == PolicyKind::kMask ? Policy(UserMask{job.mask->mask})
                                                     : options.policy.policy(kind, context));
    if (const char* why = why_unsupported(attention, job.policies.back(), mask, context)) {
      throw UsageError(fmt::format("{}: {}", printable_name(job.input.file.name), why));
    }
  }
  return job;
}

PolicyResult run_policy_on(const PrefillOptions& options, const Attention& attention,
                           const Policy& policy, const std::string& what, Progress& progress) {
  const char* policy_name = name(kind_of(policy));
  const bool with_lse = options.compare || options.by_reference || !options.out.empty();
  PolicyResult result{policy_name,
                      parameters_json(policy, options.policy.mask_file),
                      make_run(attention, policy, with_lse),
                      {},
                      gate_of(policy),
                      options.policy.gate_source(kind_of(policy), options.device.context())};
  if (options.by_reference) {
    execute_reference(attention, result.run, [&](int64_t head, int64_t segment) {
      progress.show(fmt::format("{}: reference, {}, head {} of {}, chunk {} of {}", what,
                                policy_name, head + 1, attention.q.num_heads, segment + 1,
                                std::max<size_t>(attention.segments.size(), 1)));
    });
  } else if (options.device.is_cuda()) {
    progress.show(fmt::format("{}: {}", what, policy_name));
    // The first run loads the kernels: it is not what is asked for.
    execute_from_host(attention, result.run,
                      {.warm_up = 1, .least = options.repeats, .most = options.repeats},
                      options.device_memory_mib << 20);
  } else {
    progress.show(fmt::format("{}: {}", what, policy_name));
    execute(attention, result.run, options.device.num_threads, options.repeats);
  }
  return result;
}

// js_distance of crisp's heads is what flexprefill computed for the same heads.
void share_js_distance(std::vector<PolicyResult>& policies) {
  const Run* flex = nullptr;
  Run* crisp = nullptr;
  for (PolicyResult& policy : policies) {
    if (policy.name == name(PolicyKind::kFlexPrefill)) flex = &policy.run;
    if (policy.name == name(PolicyKind::kCrisp)) crisp = &policy.run;
  }
  if (flex == nullptr || crisp == nullptr) return;
  for (size_t i = 0; i < crisp->report.size(); ++i) {
    crisp->report[i].js_distance = flex->report[i].js_distance;
  }
}

void write_outputs(const PrefillOptions& options, const Run& run) {
  std::list<files::AtomicFile> outputs;
  if (!options.mask_out.empty()) {
    files::save_mask(outputs.emplace_back(options.mask_out), run.mask);
  }
  if (!options.out.empty()) {
    constexpr files::ElementType kTypes[] = {files::ElementType::kF32, files::ElementType::kF16,
                                             files::ElementType::kBF16};
    const std::vector<int64_t> shape = {run.out.num_heads, run.out.num_tokens, run.out.head_dim};
    const files::NamedTensor tensors[] = {
        {"out", {kTypes[static_cast<size_t>(run.out.dtype)], shape, run.out_values.bytes()}},
        {"lse",
         {files::ElementType::kF32, {shape[0], shape[1]}, std::as_bytes(std::span(run.lse))}}};
    files::write_safetensors(outputs.emplace_back(options.out), tensors);
  }
  files::AtomicFile::commit_all(outputs);
}

// Outputs of policies that are neither dense nor chosen are dropped as soon as they are measured.
PrefillResult run_job(const PrefillOptions& options, Job& job, Progress& progress) {
  const Attention attention = job.input.attention();
  PrefillResult result;
  result.input = job.input.file.name;
  result.attention = attention;
  result.chunk_tokens = options.input.chunk_tokens;
  result.num_threads = options.device.resolved_threads();
  if (options.device.is_cuda()) result.gpu = cuda_machine().devices[0].name;
  result.repeats = options.repeats;
  result.by_reference = options.by_reference;
  result.compared = options.compare;
  result.policies.reserve(job.policies.size());
  for (const Policy& policy : job.policies) {
    result.policies.push_back(
        run_policy_on(options, attention, policy, printable_name(result.input), progress));
    PolicyResult& last = result.policies.back();
    const Run* dense = options.compare ? &result.policies[0].run : nullptr;
    last.heads = measure(attention, last.run, dense);
    if (kind_of(policy) == options.policy.kind) {
      write_outputs(options, last.run);
    }
    if (&last.run != dense) last.run.out_values = Buffer();
  }
  share_js_distance(result.policies);
  return result;
}

int run_prefill(PrefillOptions& options) {
  const auto groups = files::group_inputs(options.files);
  check_options(options, groups.size());
  check_outputs(options, options.files);
  std::vector<Job> jobs;
  jobs.reserve(groups.size());
  for (const auto& paths : groups) jobs.push_back(make_job(options, paths));
  nlohmann::ordered_json documents = nlohmann::ordered_json::array();
  for (Job& job : jobs) {
    std::optional<Progress> progress(std::in_place);
    PrefillResult result = run_job(options, job, *progress);
    progress.reset();
    if (options.json) {
      documents.push_back(as_json(result));
    } else {
      fmt::print("{}{}", &job == jobs.data() ? "" : "\n", as_text(result));
      std::fflush(stdout);
    }
    job = Job();
  }
  if (options.json) print_json(jobs.size() == 1 ? documents[0] : documents);
  return 0;
}

}  // namespace

void add_prefill_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PrefillOptions>();
  CLI::App* command =
      app.add_subcommand("prefill", "Run block-sparse attention on q, k, v from files");
  command->footer(kFooter);
  command->add_option("FILE", options->files, "Inputs: .safetensors, or .npy in threes (q k v)")
      ->required();
  options->policy.add_to(*command, true);
  options->device.add_to(*command);
  command
      ->add_option("--device-memory", options->device_memory_mib,
                   "CUDA memory to use; what does not fit runs some kv heads at a time, with the "
                   "same results. 0: nine tenths of what is free")
      ->capture_default_str()
      ->type_name("MIB");
  command
      ->add_option("--chunk", options->input.chunk_tokens,
                   "Prefill in chunks of this many queries; 0: one shot")
      ->capture_default_str()
      ->type_name("TOKENS");
  command
      ->add_option("--scale", options->input.softmax_scale,
                   "Softmax scale, finite and > 0; default: the file's, else 1 / sqrt(head_dim)")
      ->type_name("S");
  command->add_flag(
      "--float32", options->input.as_float32,
      "Convert 16-bit inputs to float32 first: metrics free of the output's rounding");
  command->add_flag("--compare", options->compare,
                    "Also run dense and the other policies on the same input; adds coverage, "
                    "errors and speed-up");
  command->add_option("--repeat", options->repeats, "Timed runs per policy; the median is reported")
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--reference", options->by_reference,
                    "Run the double-precision reference instead of the kernels: slow, one thread");
  command->add_flag("--json", options->json, "Print one JSON document (several inputs: a list)");
  command
      ->add_option("--out", options->out,
                   "Write the chosen policy's `out` [num_q_heads, q_len, head_dim] and `lse` "
                   "[num_q_heads, q_len]; one input only")
      ->type_name("FILE");
  command
      ->add_option("--mask-out", options->mask_out,
                   "Write the chosen policy's mask; one input only")
      ->type_name("FILE");
  command->callback([options, &exit_code] { exit_code = run_prefill(*options); });
}

}  // namespace crisp::cli
