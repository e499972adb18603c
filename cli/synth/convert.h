// convert.h - runs of float32 to and from the storage types.
#pragma once

#include <cstdint>

#include "crisp/crisp.h"

namespace crisp::synth {

// `count` floats into elements [first, first + count) of `data`, and back.
void store_elements(DType dtype, const float* from, void* data, int64_t first, int64_t count);
void load_elements(DType dtype, const void* data, int64_t first, int64_t count, float* to);

// What `count` values become when stored.
void round_elements(DType dtype, float* values, int64_t count);

}  // namespace crisp::synth
