// gate.h - the measured gates by name of a device.
#pragma once

#include <cstdint>
#include <string_view>

#include "crisp/crisp.h"

namespace crisp {

// measured_gate() on a device of that name; -1: not measured.
int32_t gate_on(std::string_view device, const Policy& policy);

}  // namespace crisp
