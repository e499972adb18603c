// plan.h - a spec turned into what the row makers need: phases, directions, topics, components.
#pragma once

#include <cstdint>
#include <vector>

#include "synth/layout.h"
#include "synth/synth.h"

namespace crisp::synth {

inline constexpr int64_t kBlock = 128;         // tokens
inline constexpr int64_t kSlashHalfWidth = 8;  // keys either side that count as the slash
inline constexpr int64_t kDriftSegments = 8;   // of the queries
inline constexpr int64_t kMaxTopics = 16;

// Keys of one kv head. Directions are orthonormal vectors of the content dimensions (x parts of the
// content pairs, then y parts): one per needle, one blank if queries drift, then one per topic.
struct GroupPlan {
  struct KeyNeedle {
    int64_t position = 0, width = 0;
  };
  std::vector<float> phase_cos, phase_sin;     // [position pair]: the rank-one position vector
  std::vector<float> sink_cos, sink_sin;       // [sink pair]: the angle of the sink's vector
  std::vector<double> phases;                  // [position pair], radians
  std::vector<std::vector<float>> directions;  // [direction][content dimension]
  std::vector<KeyNeedle> needles;              // direction = index, ascending positions
  int64_t blank_direction = -1, first_topic_direction = 0, num_topics = 0;
  std::vector<int32_t> block_topic;                // [kv_block], -1: none; empty without clusters
  std::vector<std::vector<int64_t>> topic_blocks;  // [topic], ascending
  float key_outlier = 0, query_outlier = 0;        // massive entries, signed
};

// One query head. truth.components carry the amplitudes; the solver writes them.
struct HeadPlan {
  HeadTruth truth;
  std::vector<int64_t> directions;  // [component]: of a needle, else -1
  double drift = 0;
};

struct Plan {
  LayerSpec spec;
  PairLayout layout;
  std::vector<double> frequencies;
  double softmax_scale = 0;
  double key_norm = 0;  // length of every key component; amplitudes go into the queries
  std::vector<GroupPlan> groups;
  std::vector<HeadPlan> heads;

  int64_t group_of(int64_t head) const { return head / (spec.num_q_heads / spec.num_kv_heads); }
  int64_t num_blocks() const { return (spec.num_tokens + kBlock - 1) / kBlock; }
};

// The spec must have passed check_spec.
Plan make_plan(const LayerSpec& spec);

// Key blocks each topic gets: cluster_blocks or its default.
int64_t blocks_per_topic(const LayerSpec& spec);

// Needles of a kv head: the distinct ones of its query heads, ascending.
std::vector<GroupPlan::KeyNeedle> group_needles(const LayerSpec& spec, int64_t kv_head);

// Directions of the content dimensions left for topics on a kv head, at most kMaxTopics.
int64_t topics_of_group(const LayerSpec& spec, int64_t kv_head);

// Keys [begin, end) of one component for query `token`, clipped to what is causal; empty for
// clusters and for queries that do not carry the component.
struct Interval {
  int64_t begin = 0, end = 0;
};
Interval keys_of(const Component& component, int64_t token);

}  // namespace crisp::synth
