// random.h - counter-based random numbers: the n-th number of a stream is a function of the
// stream's key and n, so tiles may be made in any order.
#pragma once

#include <cstdint>

namespace crisp::synth {

enum class Stream : uint64_t {
  kKeyNoise = 1,
  kQueryNoise,
  kValue,
  kValueMean,
  kPhase,
  kDirection,
  kBlockOrder,
  kBlockCentre,
  kTopic,
  kMassive,
  kMix,
  kJitter,
};

// Finaliser of SplitMix64 (Steele, Lea, Flood 2014).
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// Key of stream `stream` of head `index`.
constexpr uint64_t stream_key(uint64_t seed, Stream stream, int64_t index) {
  const uint64_t key = mix_bits(seed + kGolden);
  return mix_bits(mix_bits(key + kGolden * static_cast<uint64_t>(stream)) +
                  kGolden * (static_cast<uint64_t>(index) + 1));
}

// The `counter`-th 64 bits of a stream: SplitMix64 with random access.
constexpr uint64_t random_bits(uint64_t key, int64_t counter) {
  return mix_bits(key + kGolden * (static_cast<uint64_t>(counter) + 1));
}

// Uniform in [0, 1).
constexpr double uniform(uint64_t key, int64_t counter) {
  return static_cast<double>(random_bits(key, counter) >> 11) * 0x1p-53;
}

// Standard normal numbers `first` .. `first + count` of a stream; `first` and `count` are even.
void fill_normals(uint64_t key, int64_t first, int64_t count, float* out);

}  // namespace crisp::synth
