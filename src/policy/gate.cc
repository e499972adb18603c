// gate.cc - from how many tokens on choosing blocks pays, as measured per device.
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/validate.h"
#include "crisp/crisp.h"

namespace crisp {
namespace {

// One row per device; bench/results/gates.jsonl holds the runs they come from, gate_test compares
// the two.
struct Gate {
  std::string_view device;
  int32_t crisp, flex_prefill;
};
constexpr Gate kGates[] = {
    {"NVIDIA H200", 4096, 8192},
};
constexpr int32_t kNotMeasured = -1;

std::string name_of(const Context& context) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda) return device_name(current_device());
  }
  return {};
}

}  // namespace

int32_t measured_gate(const Policy& policy, const Context& context) {
  check_context(context);
  const std::string device = name_of(context);
  for (const Gate& gate : kGates) {
    if (gate.device != device) continue;
    if (std::holds_alternative<Crisp>(policy)) return gate.crisp;
    if (std::holds_alternative<FlexPrefill>(policy)) return gate.flex_prefill;
  }
  return kNotMeasured;
}

}  // namespace crisp
