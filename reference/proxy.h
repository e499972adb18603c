// proxy.h - Q, K -> the proxy map and what the routes read from it.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/types.h"

namespace crisp::reference {

// Attention of the chunk's last b = min(128, q_len) queries, divided by their number. Vertical is
// by key column, slash by offset o = query position - key position. Each mass vector sums to 1.
struct ProxyMap {
  Matrix map;                    // A [b, kv_len]
  std::vector<double> a_v, a_s;  // [kv_len] tokens: a_v[j] of column j, a_s[o] of offset o
  std::vector<double> p_v, p_s;  // [num_kv_blocks]: p_v[j] of key block j, p_s[Delta]
  double structural_mass = 0;    // C_struct
};

// The whole proxy stage. A NaN or Inf in Q or K shows as NaN in the masses it reaches. bf16_logits
// is quirk Q7 of the published FlexPrefill code.
ProxyMap proxy_map(const Head& head, int64_t sink_tokens, int64_t recency_tokens,
                   bool bf16_logits = false);

// ---- Its parts.

// A = softmax(Qhat K^T * scale), causal, Qhat = the last min(128, q_len) queries of the chunk
// (CRISP Alg 2). With bf16_logits, q * scale and the logits are rounded to bfloat16 before the
// softmax (Q7).
Matrix proxy_rows(const Head& head, bool bf16_logits = false);

// a_v[j] = 1/b sum_i A[i, j]
std::vector<double> column_mass(const Matrix& map);

// a_s[o] = 1/b sum_i A[i, pos_i - o], pos_i = kv_len - b + i
std::vector<double> offset_mass(const Matrix& map);

// p[t] = sum of a over entries [128 t, 128 t + 128): the grid from token 0 for a_v, Delta = floor(o
// / 128) for a_s. The last block may be short.
std::vector<double> block_sums(const std::vector<double>& token_mass);

// Quirk Q5: slash buckets counted from the column t = kv_len - 1 - o that the diagonal meets in the
// last row; bucket t / 128 is Delta = N_b - 1 - t / 128. Equals block_sums when kv_len % 128 == 0.
std::vector<double> left_aligned_slash_sums(const std::vector<double>& a_s);

// C_struct = sum of a_v over S_anchor = [0, sink) U [kv_len - recency, kv_len) (CRISP Eq 2).
// Windows are clipped to the keys and a token in both is counted once.
double structural_mass(const std::vector<double>& a_v, int64_t sink_tokens, int64_t recency_tokens);

// abar = softmax over all blocks j of scale * mean(Qhat) . mean of K in block j, without causal
// mask (FlexPrefill Alg 2). A short last block divides by its true count.
std::vector<double> pooled_estimate(const Head& head);

// D = sqrt(JSD(p, q)), JSD = 1/2 sum p ln(p/m) + 1/2 sum q ln(q/m), m = (p + q) / 2; natural log,
// so 0 <= D <= sqrt(ln 2). 0 log 0 = 0. With nan_on_zero (Q6) the masses are rounded to float32, as
// in the published code, and a zero among them makes the distance NaN.
double js_distance(const std::vector<double>& p, const std::vector<double>& q,
                   bool nan_on_zero = false);

}  // namespace crisp::reference
