// policy.h - the papers' algorithm boxes: one head's Q and K -> the blocks it keeps.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "reference/select.h"
#include "reference/types.h"

namespace crisp::reference {

enum class Pattern : uint8_t { kDense, kVerticalSlash, kPooled };
enum class Routing : uint8_t { kStructuralMass, kJsDistance };
enum class SelectionRule : uint8_t { kNoiseFloor, kCoverage };

// CRISP (arXiv 2609.01925), and its ablations: other routing or other selection.
struct CrispOptions {
  double tau_proxy = 0.2;
  double alpha = 1.0;
  double gamma = 0.95;
  int64_t sink_tokens = 128, recency_tokens = 128;
  int64_t min_budget_tokens = 1024;   // per direction, rounded up to blocks
  int64_t dense_below_tokens = 1024;  // kv_len below which every causal block is kept
  NoiseFloor noise_floor = NoiseFloor::kMean;
  bool pooled_keeps_budget =
      true;  // reading 10: pooled heads keep min_budget of both directions too
  Routing routing = Routing::kStructuralMass;
  SelectionRule selection = SelectionRule::kNoiseFloor;
  double tau_js = 0.1;
};

// FlexPrefill (arXiv 2502.20766). All switches off is the paper's form; each one reproduces a
// behaviour of the published code that differs from it.
struct FlexPrefillOptions {
  double tau = 0.1;
  double gamma = 0.95;
  int64_t min_budget_tokens = 1024;
  int64_t dense_below_tokens = 1024;
  bool token_count_budget = false;  // Q1: a token count // 128 as block budget
  bool left_aligned_slash = false;  // Q5: slash buckets counted from the first column
  bool nan_routes_vertical_slash =
      false;                             // Q6: a block of mass 0 makes D NaN, hence Vertical-Slash
  bool bf16_logits = false;              // Q7: q * scale and the proxy logits rounded to bfloat16
  bool pooled_keeps_budget = false;      // Q8: pooled heads keep min_budget of both directions too
  bool exclusive_pooled_prefix = false;  // Q9: the block that crosses gamma is left out

  static FlexPrefillOptions paper() { return {}; }
  // The published code where it changes the mask (Q1, Q5, Q8, Q9), with 0 log 0 = 0 and exact
  // logits.
  static FlexPrefillOptions official();
};

// What one head keeps, and why. Statistics are NaN where the gate spared them. Of a dense head,
// vertical and slash are all false and `pooled` is empty.
struct Selection {
  Pattern pattern = Pattern::kDense;
  double structural_mass = std::numeric_limits<double>::quiet_NaN();  // C_struct
  double js_distance = std::numeric_limits<double>::quiet_NaN();      // D
  std::vector<bool> vertical, slash;  // [num_kv_blocks]: V by key block, S by Delta
  BlockSet pooled;                    // the prefix of the pooled map; nothing kept if not pooled
  BlockSet blocks;                    // all that is attended to

  int64_t num_vertical() const { return count(vertical); }
  int64_t num_slash() const { return count(slash); }
};

// The policies. `head` must be causal with q_len <= kv_len, else std::invalid_argument; a head is a
// chunk of its sequence when q_len < kv_len. A head whose routing statistic is not finite, or a
// pooled head whose pooled map is not, is kept dense: every causal block.
Selection select_crisp(const Head& head, const CrispOptions& options);
Selection select_flex_prefill(const Head& head, const FlexPrefillOptions& options);
Selection select_dense(const Head& head);  // also non-causal

// ---- Their parts, for tests of one stage.

// CRISP Alg 2: Vertical-Slash when C_struct >= tau_proxy, else pooled; dense when not finite.
Pattern route_by_structural_mass(double structural_mass, double tau_proxy);

// FlexPrefill Alg 2: pooled when D < tau, else Vertical-Slash. A distance that is not finite is
// dense, or, with nan_routes_vertical_slash (Q6), Vertical-Slash.
Pattern route_by_js_distance(double js_distance, double tau,
                             bool nan_routes_vertical_slash = false);

// V or S of a Vertical-Slash head under CRISP, from the masses of one direction. The two windows
// are (sink, recency) for vertical and (recency, sink) for slash; the first is forced.
std::vector<bool> crisp_direction(const std::vector<double>& mass, int64_t first_tokens,
                                  int64_t last_tokens, const CrispOptions& options);

// Row block i attends key block j <= i iff V[j] or S[i - j] or M[i, j], i absolute. `pooled` gives
// the grid and M.
BlockSet unite(const std::vector<bool>& vertical, const std::vector<bool>& slash,
               const BlockSet& pooled);

}  // namespace crisp::reference
