// gate.cc - from how many tokens on choosing blocks pays, as measured per device.
#include "policy/gate.h"

#include <string>
#include <string_view>

#include "core/device.h"
#include "core/validate.h"
#include "crisp/crisp.h"

namespace crisp {
namespace {

// One row per device: the longest gate over the shapes measured there.
// bench/results/gpu_gates.jsonl holds the runs, gate_test compares the two.
struct Gate {
  std::string_view device;
  int32_t crisp, flex_prefill;
};
constexpr Gate kGates[] = {
    {"NVIDIA H200", 6144, 8192},
};
constexpr int32_t kNotMeasured = -1;

std::string name_of(const Context& context) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda) return device_name(current_device());
  }
  return {};
}

}  // namespace

int32_t gate_on(std::string_view device, const Policy& policy) {
  for (const Gate& gate : kGates) {
    if (gate.device != device) continue;
    if (std::holds_alternative<Crisp>(policy)) return gate.crisp;
    if (std::holds_alternative<FlexPrefill>(policy)) return gate.flex_prefill;
  }
  return kNotMeasured;
}

int32_t measured_gate(const Policy& policy, const Context& context) {
  check_context(context);
  return gate_on(name_of(context), policy);
}

}  // namespace crisp
