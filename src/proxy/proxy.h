// proxy.h - Q, K -> ProxyMap: the attention of the last queries, summed up per block.
//
// The proxy map A is the causal softmax of the last min(128, q_len) queries of a head against all
// its keys. One pass over the keys gives its block sums in both directions, by the slash identity:
// for a query at 128 q_block + r and a key at 128 kv_block + c, the block diagonal of their offset
// is
//   floor((query - key) / 128) = q_block - kv_block      if c <= r
//                                q_block - kv_block - 1  if c >  r
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/head_batch.h"
#include "core/run.h"

namespace crisp {

inline constexpr int64_t kProxyRows = 128;

// Where the proxy rows lie. Kernels hold them in slots that start at a multiple of kSlotAlignment,
// so that a panel of queries never straddles a block; slots before the first row are unused.
struct ProxyRows {
  static constexpr int64_t kSlotAlignment = 64;  // a multiple of every target's panel
  int64_t num_rows = 0;                          // min(128, q_len)
  int64_t first_position = 0;                    // of the first row among the keys
  int64_t slots_position = 0;                    // of slot 0
  int64_t num_slots = 0;                         // <= 192
  int64_t first_slot() const { return first_position - slots_position; }
};

inline ProxyRows proxy_rows(const SegmentShape& segment) {
  constexpr int64_t align = ProxyRows::kSlotAlignment;
  ProxyRows rows;
  rows.num_rows = std::min(kProxyRows, segment.q_len);
  rows.first_position = segment.kv_len - rows.num_rows;
  rows.slots_position = rows.first_position / align * align;
  rows.num_slots = ceil_div(segment.kv_len, align) * align - rows.slots_position;
  return rows;
}

struct ProxyOptions {
  int64_t sink_tokens = 128, recency_tokens = 128;  // windows of the structural mass
  bool pooled_estimate = false;                     // wanted?
};

// Of one batch; num_blocks = segment.num_kv_blocks. A head whose q or k is not finite where the
// proxy looks has NaN in all its masses.
struct ProxyMap {
  int64_t num_blocks = 0;
  // [num_heads, num_blocks], each head summing to 1.
  float* vertical = nullptr;  // (1 / rows) sum of A over the rows and the 128 keys of a block
  float* slash = nullptr;     // the same over offsets query - key in [128 s, 128 s + 128)
  // [num_heads] C_struct: (1 / rows) sum of A over the first sink_tokens and last recency_tokens
  // keys.
  float* structural_mass = nullptr;
  // [num_heads, num_blocks] softmax of (mean proxy query . mean key of a block); null: not wanted.
  float* pooled_estimate = nullptr;
  float* row_lse = nullptr;    // [num_heads, num_slots] log2-sum-exp2 of each row's scaled scores
  float* key_means = nullptr;  // [batch.num_kv_heads(), num_blocks, head_dim], true counts
};

// Heads whose proxy maps fit the scratch budget together: bounded memory at every length.
int64_t proxy_heads_per_batch(const Attention& attention, const SegmentShape& segment,
                              Device device);

// Needs q_len >= 1 and kv_len >= q_len. The arrays stay in the run's workspace.
ProxyMap compute_proxy_map(const HeadBatch& batch, const ProxyOptions& options, Run& run);

// ---- between proxy.cc and its kernels

// Scratch of one batch. A row's normaliser is known only at the end, so each (row, kv_block) keeps
// its maximum m, and the sums of exp2(score - m) over the keys on either side of the slash split.
struct ProxyScratch {
  enum Part : int64_t { kMax, kLow, kHigh, kNumParts };
  float* partials = nullptr;  // [num_heads, num_blocks, kNumParts, num_slots]
  // [num_heads, 2, num_slots] sums over the keys in a window, of the blocks where the sink window
  // ends and where the recency window begins; used for blocks a window covers in part.
  float* edges = nullptr;
  float* queries = nullptr;       // [num_heads, num_slots * head_dim] packed panels
  float* mean_queries = nullptr;  // [num_heads, head_dim]
  double* block_sums = nullptr;   // [num_heads, num_blocks]
  float* keys = nullptr;          // [num_workers, 128 * head_dim]
  float* scores = nullptr;        // [num_workers, 128 * kSlotAlignment]
};

struct ProxyJob {
  const HeadBatch& batch;
  ProxyOptions options;
  ProxyRows rows;
  ProxyMap map;
  ProxyScratch scratch;
  int num_threads = 1;
};

void proxy_map_cpu(const ProxyJob& job);

// CUDA: takes its own scratch, enqueues. key_means are made only where the estimate is wanted.
void proxy_map_cuda(const HeadBatch& batch, const ProxyOptions& options, const ProxyMap& map,
                    Run& run);

}  // namespace crisp
