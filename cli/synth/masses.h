// masses.h - how much attention each component of a head holds, measured on q and k as stored.
#pragma once

#include <cstdint>
#include <vector>

#include "synth/factors.h"
#include "synth/plan.h"

namespace crisp::synth {

struct Masses {
  std::vector<double> components;  // [component of the head], means over the queries
  double background = 0;           // the rest
};

// Attention of query head `head` from the given queries (count <= 128, ascending) over the keys of
// its kv head. `k` is the whole output k, of which the rows up to the last query are written.
Masses measure_masses(const Plan& plan, int64_t head, const Positions& queries, const void* k,
                      DType dtype);

}  // namespace crisp::synth
