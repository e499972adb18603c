// pooled.h - the pooled map of diffuse heads and the prefix that is kept of it.
#pragma once

#include <cstdint>

#include "reference/types.h"

namespace crisp::reference {

// Means over groups of `size` positions of the absolute grid, when row 0 of x sits at
// first_position: row r of the result is absolute group first_position / size + r. Short groups
// divide by their true count.
Matrix group_means(const Matrix& x, int64_t first_position, int64_t size);
inline Matrix block_means(const Matrix& x, int64_t first_position) {
  return group_means(x, first_position, kBlockSize);
}

// Abar[i, j] = softmax over key blocks j <= i of scale * mean(Q in row block i) . mean(K in block
// j) (FlexPrefill Alg 4, causal as in its code). One row per row block of the chunk; each sums
// to 1.
Matrix pooled_map(const Head& head);

// Sorts the causal entries of the map (row r is absolute block first_q_block + r) by descending
// mass, equal masses by ascending (row, col), and keeps a prefix; total = the mass of all rows.
//   inclusive  the smallest prefix with cumulative >= gamma * total
//   exclusive  the entries whose cumulative is <= gamma * total (quirk Q9); may be none
BlockSet pooled_prefix(const Matrix& map, int64_t first_q_block, double gamma, bool exclusive);

}  // namespace crisp::reference
