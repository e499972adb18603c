// select.h - block masses of one direction of one head -> the blocks it keeps.
//
// Vertical vectors are indexed by key block, slash vectors by Delta = q_block - kv_block. The
// blocks that hold the sink come first in the vertical direction and last in the slash direction,
// those that hold the recency window the other way round.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/types.h"

namespace crisp::reference {

enum class NoiseFloor : uint8_t { kMean, kMedian };

// The first ceil(tokens / 128) of num_blocks blocks: what is kept whatever its mass. Vertical
// forces the sink window, slash the recency window.
std::vector<bool> forced_blocks(int64_t num_blocks, int64_t tokens);

// All but the first ceil(first_tokens / 128) and the last ceil(last_tokens / 128) blocks: what the
// noise floor is taken over. Vertical: (sink, recency). Slash: (recency, sink).
std::vector<bool> background_blocks(int64_t num_blocks, int64_t first_tokens, int64_t last_tokens);

// mu_d = mean of p_d over the background blocks (CRISP Eq 3), or their median (mean of the two
// middle values for an even count). 0 when there are none.
double noise_floor(const std::vector<double>& mass, const std::vector<bool>& background,
                   NoiseFloor kind = NoiseFloor::kMean);

// forced U { j : p_d[j] > alpha * mu_d } (CRISP Eq 4), strict. A floor of 0 keeps the forced blocks
// only: nothing is there, while the literal rule would keep every block above 0.
std::vector<bool> select_above_noise_floor(const std::vector<double>& mass,
                                           const std::vector<bool>& background,
                                           const std::vector<bool>& forced, double alpha,
                                           NoiseFloor kind = NoiseFloor::kMean);

// Adds the heaviest remaining blocks until min(k_min, all) are kept; equal masses: lower index
// first.
std::vector<bool> top_up(const std::vector<double>& mass, std::vector<bool> keep, int64_t k_min);

// forced U the smallest prefix, by descending mass, with cumulative >= gamma * total (FlexPrefill
// Alg 3 at block level). Equal masses: lower index first.
std::vector<bool> select_coverage(const std::vector<double>& mass, const std::vector<bool>& forced,
                                  double gamma);

// Quirk Q1, the published code's budget: num = (tokens whose descending cumulative <= gamma) + 1,
// then num / 128 + 1 *blocks*, clamped to [min_blocks, num_blocks].
int64_t token_count_budget(const std::vector<double>& token_mass, double gamma, int64_t min_blocks);

}  // namespace crisp::reference
