#include "synth/layout.h"

#include <algorithm>
#include <numbers>

#include "synth/numeric.h"

namespace crisp::synth {

PairLayout pair_layout(int64_t head_dim) {
  PairLayout layout;
  layout.half = head_dim / 2;
  const auto scaled = [&](int64_t pair_of_64) { return pair_of_64 * layout.half / 64; };
  layout.sink_begin = std::min(scaled(63), layout.half - 1);
  layout.massive_begin = std::min(scaled(61), layout.sink_begin);
  layout.content_begin = std::min(scaled(54), layout.massive_begin - 1);
  layout.noise_begin = std::min(scaled(44), layout.content_begin - 1);
  return layout;
}

std::vector<double> rope_frequencies(int64_t head_dim) {
  constexpr double kBase = 500000, kFactor = 8, kOriginalTokens = 8192, kHighFrequency = 4;
  std::vector<double> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = -2 * static_cast<double>(i) / static_cast<double>(head_dim);
    const double plain = exp_double(exponent * log_double(kBase));
    const double turns = kOriginalTokens * plain / (2 * std::numbers::pi);
    const double blend = std::clamp((turns - 1) / (kHighFrequency - 1), 0.0, 1.0);
    frequencies[i] = (1 - blend) * plain / kFactor + blend * plain;
  }
  return frequencies;
}

void rotation_table(const std::vector<double>& frequencies, int64_t first, int64_t count,
                    float* cos, float* sin) {
  const int64_t half = static_cast<int64_t>(frequencies.size());
  for (int64_t t = 0; t < count; ++t)
    for (int64_t i = 0; i < half; ++i) {
      const SinCos turn =
          sin_cos(static_cast<double>(first + t) * frequencies[static_cast<size_t>(i)]);
      cos[t * half + i] = static_cast<float>(turn.cos);
      sin[t * half + i] = static_cast<float>(turn.sin);
    }
}

}  // namespace crisp::synth
