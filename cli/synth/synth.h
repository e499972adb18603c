// synth.h - synthetic attention heads whose signal is known.
//
// A logit is a sum of components plus noise,
//   softmax_scale * q_t . k_s = sum_c amplitude_c * S_c(t, s) + noise(t, s),
// every component in dimensions of its own, so that q and k are exact factors in head_dim
// dimensions and every kernel can run on them. What is set is not an amplitude but the attention
// mass that a component holds on the last 128 queries; the amplitudes are solved for it.
// docs/synth.md explains the components and their ranges.
//
// Results depend on the spec alone: the random numbers are counter-based, nothing calls libm, and
// no sum depends on the machine's vector width. Bad specs throw crisp::Error and write nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "crisp/crisp.h"

namespace crisp::synth {

// Rows [begin, end) of the queries; end < 0 means all the way to the last.
struct RowRange {
  int64_t begin = 0, end = -1;
};

// A band of keys `distance` tokens before the query (8 either side), holding `mass`.
struct Slash {
  int64_t distance = 0;
  double mass = 0;
};

// `width` keys from `position` on that the queries of `rows` look up. `mass` is the mean over the
// last 128 queries; if `rows` ends before them, over the last 128 queries of `rows`.
struct Needle {
  int64_t position = 0, width = 4;
  double mass = 0;
  RowRange rows;
};

// One query head. A mass of 0 leaves the component out; the masses must sum to less than 1, the
// rest is background.
struct HeadSpec {
  std::string kind = "custom";  // a label for reports
  double sink_mass = 0;         // on the first num_sink_tokens keys
  double local_mass = 0;        // on the `window` nearest keys
  int64_t window = 128;         // tokens, the query's own key included
  std::vector<Slash> slashes;
  std::vector<Needle> needles;
  double cluster_mass = 0;  // on the cluster_blocks key blocks that share the query block's topic
  double sigma = 0.5;       // content noise, nats
  double drift = 0;         // 0 to 1: how far needle queries turn away from the last segment's
};

// One layer. Tensors are q [num_q_heads, num_tokens, head_dim] and k, v [num_kv_heads, num_tokens,
// head_dim]; query head h reads kv head h / (num_q_heads / num_kv_heads), as everywhere in crisp.
struct LayerSpec {
  int64_t num_tokens = 0, num_q_heads = 4, num_kv_heads = 1;
  int64_t head_dim = 128;  // a multiple of 8
  uint64_t seed = 0;
  std::vector<HeadSpec> heads;  // num_q_heads of them

  // Of the keys and values, so shared by the heads of a group.
  int64_t num_sink_tokens = 4;
  double sink_value_scale = 0.05;  // of the sink tokens' values
  double value_mean = 0.5;       // size of the mean that all values of a kv head share, noise is 1
  int64_t cluster_blocks = 0;    // key blocks per topic; 0: one in 16, at least 4
  double cluster_spread = 0.15;  // scatter of the block centres, as a share of the topic's length
  double massive = 10;           // size of the outlier channels of q and k; 0: none
};

enum class ComponentKind : uint8_t { kSink, kNeedle, kCluster, kSlash, kLocal };
const char* name(ComponentKind kind);

// Truth about one component of one head. A key that two components claim counts for the kind listed
// first above, so that masses add up.
struct Component {
  ComponentKind kind = ComponentKind::kSink;
  int64_t position = 0;  // needle: first key; slash: distance
  int64_t width = 0;     // sink, needle, local: keys; slash: keys either side; cluster: blocks
  RowRange rows;         // queries that carry it, resolved
  RowRange measured;     // queries over which target and realised are means
  double target = 0, realised = 0, amplitude = 0;  // amplitude in nats
};

struct HeadTruth {
  std::string kind;
  double sigma = 0;
  std::vector<Component> components;
  double background_target = 0, background_realised = 0;  // over the last 128 queries
  std::vector<int32_t> topics;                            // [q_block], empty without clusters
};

struct Truth {
  LayerSpec spec;
  double softmax_scale = 0;  // 1 / sqrt(head_dim)
  std::vector<HeadTruth> heads;
  std::vector<std::vector<std::vector<int64_t>>> topic_blocks;  // [kv head][topic], ascending
};

// The caller's buffers, contiguous in the layout of LayerSpec, aligned to the element size.
struct Output {
  void* q = nullptr;
  void* k = nullptr;
  void* v = nullptr;
  DType dtype = DType::kFloat32;
};

using Progress = std::function<void(double fraction)>;  // called now and then, 0 to 1

// Fills `output`. Masses are solved and measured on the values as written, rounding included, to
// within 0.02; a target that cannot be reached is an Error naming the component.
Truth generate(const LayerSpec& spec, const Output& output, const Progress& progress = {});

// The same into vectors of float32.
struct Layer {
  Truth truth;
  std::vector<float> q, k, v;
};
Layer make_layer(const LayerSpec& spec);

// Throws Error if the spec is no good. generate() calls it.
void check_spec(const LayerSpec& spec);

// Key blocks of 128 that hold a component's keys for some query of `q_block`, ascending.
std::vector<int64_t> signal_blocks(const Truth& truth, int64_t head, int64_t q_block);

// One JSON document: spec, scale, and per head the components with targets and realised masses.
std::string to_json(const Truth& truth);

struct PresetInfo {
  std::string_view name, summary;
};
const std::vector<PresetInfo>& presets();

// Fills heads and the shared knobs of a spec whose shape and seed are set. Unknown name: Error.
void apply_preset(std::string_view preset, LayerSpec& spec);

}  // namespace crisp::synth
