// oracle.h - binds reference/, the papers in double precision, one head at a time.
#pragma once

namespace nanobind {
class module_;  // so that this file compiles without nanobind, which only pip has
}

namespace crisp::python {

void add_oracle(nanobind::module_& module);

}  // namespace crisp::python
