// layout.h - which RoPE pairs carry which component. Pair i is the dimensions i and i + head_dim /
// 2 (NeoX order), turning by rope_frequencies()[i] per token.
#pragma once

#include <cstdint>
#include <vector>

namespace crisp::synth {

// Pairs in order of falling frequency. At head_dim 128: [0, 44) position, [44, 54) noise, [54, 61)
// content, [61, 63) massive, 63 sink; other sizes keep the proportions, and the kinds they need
// keep at least one pair each (massive may be left with none).
struct PairLayout {
  int64_t half = 0;         // pairs in all
  int64_t noise_begin = 0;  // position pairs: [0, noise_begin)
  int64_t content_begin = 0;
  int64_t massive_begin = 0;
  int64_t sink_begin = 0;

  int64_t position_pairs() const { return noise_begin; }
  int64_t noise_pairs() const { return content_begin - noise_begin; }
  int64_t content_pairs() const { return massive_begin - content_begin; }
};

// head_dim: a multiple of 8, at least 8.
PairLayout pair_layout(int64_t head_dim);

// Radians per token: base^(-2i / head_dim), base 500000, slowed for long contexts like Llama 3.1
// (factor 8 for wavelengths above 8192 tokens, none below 2048, blended between). Without that the
// slowest pair turns so far over 512k tokens that a sink would fade.
std::vector<double> rope_frequencies(int64_t head_dim);

// Cosines and sines of position * frequency, rows of `half` floats, for tokens [first, first +
// count).
void rotation_table(const std::vector<double>& frequencies, int64_t first, int64_t count,
                    float* cos, float* sin);

}  // namespace crisp::synth
