#include "synth/convert.h"

#include "core/half.h"

namespace crisp::synth {

void store_elements(DType dtype, const float* from, void* data, int64_t first, int64_t count) {
  if (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(data) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(data) + first;
  if (dtype == DType::kBFloat16)
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_from_float(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = float16_from_float(from[i]);
}

void load_elements(DType dtype, const void* data, int64_t first, int64_t count, float* to) {
  if (dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(data) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(data) + first;
  if (dtype == DType::kBFloat16)
    for (int64_t i = 0; i < count; ++i) to[i] = float_from_bfloat16(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = float_from_float16(from[i]);
}

void round_elements(DType dtype, float* values, int64_t count) {
  if (dtype == DType::kFloat32) return;
  for (int64_t i = 0; i < count; ++i)
    values[i] = dtype == DType::kBFloat16 ? float_from_bfloat16(bfloat16_from_float(values[i]))
                                          : float_from_float16(float16_from_float(values[i]));
}

}  // namespace crisp::synth
