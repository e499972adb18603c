// doctor.cc - `crisp doctor`: what this build can do on this machine.
#include <fmt/format.h>
#include <hwy/highway.h>

#include <memory>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/machine.h"
#include "commands/terminal.h"
#include "core/device.h"
#include "core/parallel.h"
#include "crisp/crisp.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> target_names(int64_t targets) {
  std::vector<std::string> names;
  for (int64_t bit = 1; bit > 0 && bit <= HWY_SCALAR; bit <<= 1) {
    if ((targets & bit) != 0) names.emplace_back(hwy::TargetName(bit));
  }
  return names;
}

// Asked of the library itself, on a call that nothing else could refuse.
std::string why_not_cuda() {
  Attention attention;
  attention.q = {nullptr, DType::kBFloat16, 1, 1, 64, 64, 64, 0};
  attention.k = attention.v = attention.q;
  attention.softmax_scale = 0.125f;
  Context context;
  context.device = Device::kCuda;
  const char* why = why_unsupported(attention, Dense{}, mask_for(attention), context);
  if (why != nullptr) return why;
#ifdef CRISP_WITH_CUDA
  try {
    require_cuda();
    require_capability(current_device());
  } catch (const std::exception& error) {
    return error.what();
  }
#endif
  return "";
}

Json describe() {
  Json cpu;
  cpu["name"] = "cpu";
  cpu["available"] = true;
  cpu["model"] = cpu_model();
  cpu["cores"] = resolve_num_threads(0);
  cpu["default_threads"] = resolve_num_threads(0);
  cpu["instruction_set"] = cpu_target();
  cpu["supported"] = target_names(hwy::SupportedTargets());
  cpu["compiled"] = target_names(HWY_TARGETS);
  const std::string why = why_not_cuda();
  Json cuda;
  cuda["name"] = "cuda";
  cuda["available"] = why.empty();
  cuda["why_not"] = why.empty() ? Json() : Json(why);
  Json out;
  out["version"] = version();
  out["devices"] = {cpu, cuda};
  return out;
}

std::string joined(const Json& names) {
  std::string text;
  for (const auto& one : names) text += (text.empty() ? "" : " ") + one.get<std::string>();
  return text;
}

int run_doctor(bool json) {
  const Json all = describe();
  if (json) {
    print_json(all);
    return 0;
  }
  const Json& cpu = all["devices"][0];
  const Json& cuda = all["devices"][1];
  fmt::print("crisp {}\n", all["version"].get<std::string>());
  fmt::print("cpu   {}\n", printable_name(cpu["model"].get<std::string>()));
  fmt::print("      cores (default threads)    {}\n", cpu["cores"].get<int>());
  fmt::print("      instruction set in use     {}\n", cpu["instruction_set"].get<std::string>());
  fmt::print("      sets of this machine       {}\n", joined(cpu["supported"]));
  fmt::print("      sets compiled in           {}\n", joined(cpu["compiled"]));
  fmt::print("cuda  {}\n",
             cuda["available"].get<bool>() ? "available" : cuda["why_not"].get<std::string>());
  fmt::print("\n`crisp check` tests this build on this machine against the reference.\n");
  return 0;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& exit_code) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("doctor", "Show version, devices, instruction sets and threads");
  command->add_flag("--json", *json, "Print one JSON document");
  command->callback([json, &exit_code] { exit_code = run_doctor(*json); });
}

}  // namespace crisp::cli
