// doctor.cc - `crisp doctor`: what this build can do on this machine.
#include <fmt/format.h>
#include <hwy/highway.h>

#include <memory>

#include "commands/commands.h"
#include "commands/common_options.h"
#include "commands/machine.h"
#include "commands/terminal.h"
#include "core/parallel.h"
#include "crisp/crisp.h"
#include "device_memory.h"

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

Json describe_cuda() {
  const CudaMachine machine = cuda_machine();
  Json cuda;
  cuda["name"] = "cuda";
  cuda["available"] = machine.why_not.empty();
  cuda["why_not"] = machine.why_not.empty() ? Json() : Json(machine.why_not);
  cuda["driver"] = machine.driver.empty() ? Json() : Json(machine.driver);
  cuda["runtime"] = machine.runtime.empty() ? Json() : Json(machine.runtime);
  cuda["gpus"] = Json::array();
  for (const CudaDevice& device : machine.devices) {
    cuda["gpus"].push_back(
        {{"name", device.name},
         {"compute_capability", fmt::format("{}.{}", device.major, device.minor)},
         {"multiprocessors", device.multiprocessors},
         {"memory_bytes", device.memory_bytes},
         {"free_bytes", device.free_bytes}});
  }
  return cuda;
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
  Json out;
  out["version"] = version();
  out["devices"] = {cpu, describe_cuda()};
  return out;
}

std::string joined(const Json& names) {
  std::string text;
  for (const auto& one : names) text += (text.empty() ? "" : " ") + one.get<std::string>();
  return text;
}

void print_cuda(const Json& cuda) {
  fmt::print("cuda  {}\n",
             cuda["available"].get<bool>() ? "available" : cuda["why_not"].get<std::string>());
  for (const char* key : {"driver", "runtime"}) {
    if (!cuda[key].is_null())
      fmt::print("      {:<26} CUDA {}\n", key, cuda[key].get<std::string>());
  }
  constexpr double kGiB = 1 << 30;
  for (const Json& gpu : cuda["gpus"]) {
    fmt::print("      {:<26} compute capability {}, {} multiprocessors, {:.1f} GiB, {:.1f} free\n",
               printable_name(gpu["name"].get<std::string>()),
               gpu["compute_capability"].get<std::string>(), gpu["multiprocessors"].get<int>(),
               gpu["memory_bytes"].get<double>() / kGiB, gpu["free_bytes"].get<double>() / kGiB);
  }
}

int run_doctor(bool json) {
  const Json all = describe();
  if (json) {
    print_json(all);
    return 0;
  }
  const Json& cpu = all["devices"][0];
  fmt::print("crisp {}\n", all["version"].get<std::string>());
  fmt::print("cpu   {}\n", printable_name(cpu["model"].get<std::string>()));
  fmt::print("      cores (default threads)    {}\n", cpu["cores"].get<int>());
  fmt::print("      instruction set in use     {}\n", cpu["instruction_set"].get<std::string>());
  fmt::print("      sets of this machine       {}\n", joined(cpu["supported"]));
  fmt::print("      sets compiled in           {}\n", joined(cpu["compiled"]));
  print_cuda(all["devices"][1]);
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
