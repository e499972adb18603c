// crisp_plus.h - crisp+, a rule of this project's own: every row of blocks chooses by itself, from
// the keys that its mean query sees and from a pooled map of finer grain. docs/crisp-plus.md has
// the measurements behind it.
#pragma once

#include <cstdint>

#include "reference/policy.h"
#include "reference/types.h"

namespace crisp::reference {

struct CrispPlusOptions {
  double alpha = 2;                   // map 1: keep above alpha x the row's mean background mass
  double gamma = 0.9;                 // map 2: share of the row that the kept blocks hold
  int64_t pool_groups = 8;            // groups per block of map 2, a divisor of 128
  int64_t sink_tokens = 128;          // their blocks are kept and left out of the floor
  int64_t dense_below_tokens = 1024;  // kv_len below which every causal block is kept
};

// Map 1. Row i, of the chunk's absolute blocks, is the softmax of scale * mean(Q in block i) . k_t
// over every key t up to the block's last query, summed per key block. Rows sum to 1.
Matrix mean_query_map(const Head& head);

// Map 2. Queries and keys are averaged in groups of 128 / pool_groups absolute positions, each over
// the tokens it holds; softmax of scale * mean . mean over the key groups that begin no later than
// the query group ends; summed per pair of blocks and divided by the query groups of the row. Rows
// sum to 1.
Matrix fine_pooled_map(const Head& head, int64_t pool_groups);

// What map 1 and map 2 keep, and both with sink and diagonal in Selection::blocks. A row one of
// whose maps is not finite keeps every causal block.
struct CrispPlusSelection {
  BlockSet mean_query, fine_pooled, blocks;
  bool is_dense = false;  // spared by the gate
};
CrispPlusSelection select_crisp_plus(const Head& head, const CrispPlusOptions& options);

}  // namespace crisp::reference
