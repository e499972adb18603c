#include "synth/plan.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "synth/numeric.h"
#include "synth/random.h"

namespace crisp::synth {
namespace {

bool uses_clusters(const LayerSpec& spec, int64_t kv_head) {
  const int64_t group_size = spec.num_q_heads / spec.num_kv_heads;
  for (int64_t h = kv_head * group_size; h < (kv_head + 1) * group_size; ++h)
    if (spec.heads[static_cast<size_t>(h)].cluster_mass > 0) return true;
  return false;
}

bool uses_drift(const LayerSpec& spec, int64_t kv_head) {
  const int64_t group_size = spec.num_q_heads / spec.num_kv_heads;
  for (int64_t h = kv_head * group_size; h < (kv_head + 1) * group_size; ++h)
    if (spec.heads[static_cast<size_t>(h)].drift > 0) return true;
  return false;
}

// Gram and Schmidt, twice for accuracy, on random vectors.
std::vector<std::vector<float>> orthonormal_directions(int64_t dims, uint64_t key) {
  std::vector<std::vector<double>> basis;
  std::vector<float> normals(static_cast<size_t>(dims));
  for (int64_t j = 0; j < dims; ++j) {
    fill_normals(key, j * dims, dims, normals.data());
    std::vector<double> vector(normals.begin(), normals.end());
    for (int pass = 0; pass < 2; ++pass)
      for (const auto& other : basis) {
        double dot = 0;
        for (size_t i = 0; i < vector.size(); ++i) dot += vector[i] * other[i];
        for (size_t i = 0; i < vector.size(); ++i) vector[i] -= dot * other[i];
      }
    double norm = 0;
    for (double x : vector) norm += x * x;
    norm = std::sqrt(norm);
    for (double& x : vector) x /= norm;
    basis.push_back(std::move(vector));
  }
  std::vector<std::vector<float>> directions;
  for (const auto& vector : basis) {
    std::vector<float>& direction = directions.emplace_back();
    for (double x : vector) direction.push_back(static_cast<float>(x));
  }
  return directions;
}

// Blocks 1 .. N-3 in random order, dealt to the topics in turn of blocks_per_topic. The first and
// the last two blocks stay out: they belong to sinks and to the nearest keys.
void deal_topics(const LayerSpec& spec, int64_t kv_head, int64_t num_blocks, GroupPlan& group) {
  std::vector<int64_t> order;
  for (int64_t b = 1; b + 2 < num_blocks; ++b) order.push_back(b);
  const uint64_t key = stream_key(spec.seed, Stream::kBlockOrder, kv_head);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1],
              order[static_cast<size_t>(random_bits(key, static_cast<int64_t>(i)) % i)]);
  group.block_topic.assign(static_cast<size_t>(num_blocks), -1);
  group.topic_blocks.resize(static_cast<size_t>(group.num_topics));
  const int64_t each = blocks_per_topic(spec);
  for (int64_t topic = 0; topic < group.num_topics; ++topic) {
    std::vector<int64_t>& blocks = group.topic_blocks[static_cast<size_t>(topic)];
    blocks.assign(order.begin() + topic * each, order.begin() + (topic + 1) * each);
    std::sort(blocks.begin(), blocks.end());
    for (int64_t b : blocks)
      group.block_topic[static_cast<size_t>(b)] = static_cast<int32_t>(topic);
  }
}

GroupPlan make_group(const Plan& plan, int64_t kv_head) {
  const LayerSpec& spec = plan.spec;
  GroupPlan group;
  const uint64_t phase_key = stream_key(spec.seed, Stream::kPhase, kv_head);
  for (int64_t i = 0; i < plan.layout.position_pairs(); ++i) {
    const double phase = 2 * std::numbers::pi * uniform(phase_key, i);
    const SinCos turn = sin_cos(phase);
    group.phases.push_back(phase);
    group.phase_cos.push_back(static_cast<float>(turn.cos));
    group.phase_sin.push_back(static_cast<float>(turn.sin));
  }
  for (int64_t i = plan.layout.sink_begin; i < plan.layout.half; ++i) {
    const SinCos turn = sin_cos(2 * std::numbers::pi * uniform(phase_key, i));
    group.sink_cos.push_back(static_cast<float>(turn.cos));
    group.sink_sin.push_back(static_cast<float>(turn.sin));
  }
  group.directions = orthonormal_directions(2 * plan.layout.content_pairs(),
                                            stream_key(spec.seed, Stream::kDirection, kv_head));
  group.needles = group_needles(spec, kv_head);
  group.first_topic_direction = static_cast<int64_t>(group.needles.size());
  if (uses_drift(spec, kv_head)) group.blank_direction = group.first_topic_direction++;
  if (uses_clusters(spec, kv_head)) {
    group.num_topics = topics_of_group(spec, kv_head);
    deal_topics(spec, kv_head, plan.num_blocks(), group);
  }
  const uint64_t massive_key = stream_key(spec.seed, Stream::kMassive, kv_head);
  const float massive = static_cast<float>(spec.massive);
  group.key_outlier = (random_bits(massive_key, 0) & 1u) != 0 ? massive : -massive;
  group.query_outlier = (random_bits(massive_key, 1) & 1u) != 0 ? massive : -massive;
  return group;
}

Component make_component(ComponentKind kind, int64_t position, int64_t width, double target,
                         RowRange rows, int64_t num_tokens) {
  Component component{kind, position, width, rows, {}, target};
  if (component.rows.end < 0) component.rows.end = num_tokens;
  // The last 128 queries, or of the component's own rows if it is gone by then.
  const int64_t last_block = std::max<int64_t>(num_tokens - kBlock, 0);
  component.measured = component.rows.end > last_block
                           ? RowRange{last_block, num_tokens}
                           : RowRange{std::max(component.rows.begin, component.rows.end - kBlock),
                                      component.rows.end};
  return component;
}

HeadPlan make_head(const Plan& plan, const GroupPlan& group, int64_t head) {
  const LayerSpec& spec = plan.spec;
  const HeadSpec& from = spec.heads[static_cast<size_t>(head)];
  HeadPlan to;
  to.drift = from.drift;
  to.truth.kind = from.kind;
  to.truth.sigma = from.sigma;
  double background = 1;
  const auto add = [&](ComponentKind kind, int64_t position, int64_t width, double mass,
                       RowRange rows, int64_t direction) {
    if (!(mass > 0)) return;
    to.truth.components.push_back(
        make_component(kind, position, width, mass, rows, spec.num_tokens));
    to.directions.push_back(direction);
    if (to.truth.components.back().measured.end == spec.num_tokens) background -= mass;
  };
  add(ComponentKind::kSink, 0, spec.num_sink_tokens, from.sink_mass, {}, -1);
  for (const Needle& needle : from.needles) {
    const auto at = std::find_if(group.needles.begin(), group.needles.end(),
                                 [&](const auto& key) { return key.position == needle.position; });
    add(ComponentKind::kNeedle, needle.position, needle.width, needle.mass, needle.rows,
        at - group.needles.begin());
  }
  add(ComponentKind::kCluster, 0, blocks_per_topic(spec), from.cluster_mass, {}, -1);
  for (const Slash& slash : from.slashes)
    add(ComponentKind::kSlash, slash.distance, kSlashHalfWidth, slash.mass, {}, -1);
  add(ComponentKind::kLocal, 0, from.window, from.local_mass, {}, -1);
  to.truth.background_target = background;
  if (from.cluster_mass > 0) {
    // The last query block of every head of a group asks for a topic of its own.
    const uint64_t key = stream_key(spec.seed, Stream::kTopic, head);
    const uint64_t topics = static_cast<uint64_t>(group.num_topics);
    for (int64_t b = 0; b < plan.num_blocks(); ++b)
      to.truth.topics.push_back(static_cast<int32_t>(random_bits(key, b) % topics));
    to.truth.topics.back() = static_cast<int32_t>(static_cast<uint64_t>(head) % topics);
  }
  return to;
}

}  // namespace

int64_t blocks_per_topic(const LayerSpec& spec) {
  const int64_t num_blocks = (spec.num_tokens + kBlock - 1) / kBlock;
  return spec.cluster_blocks > 0 ? spec.cluster_blocks : std::max<int64_t>(num_blocks / 16, 4);
}

std::vector<GroupPlan::KeyNeedle> group_needles(const LayerSpec& spec, int64_t kv_head) {
  const int64_t group_size = spec.num_q_heads / spec.num_kv_heads;
  std::vector<GroupPlan::KeyNeedle> needles;
  for (int64_t h = kv_head * group_size; h < (kv_head + 1) * group_size; ++h)
    for (const Needle& needle : spec.heads[static_cast<size_t>(h)].needles) {
      const bool known = std::any_of(needles.begin(), needles.end(), [&](const auto& other) {
        return other.position == needle.position && other.width == needle.width;
      });
      if (!known) needles.push_back({needle.position, needle.width});
    }
  std::sort(needles.begin(), needles.end(),
            [](const auto& a, const auto& b) { return a.position < b.position; });
  return needles;
}

int64_t topics_of_group(const LayerSpec& spec, int64_t kv_head) {
  const int64_t directions = 2 * pair_layout(spec.head_dim).content_pairs();
  const int64_t taken = static_cast<int64_t>(group_needles(spec, kv_head).size()) +
                        (uses_drift(spec, kv_head) ? 1 : 0);
  const int64_t num_blocks = (spec.num_tokens + kBlock - 1) / kBlock;
  const int64_t dealt = std::max<int64_t>(num_blocks - 3, 0) / blocks_per_topic(spec);
  return std::max<int64_t>(std::min({directions - taken, kMaxTopics, dealt}), 0);
}

Plan make_plan(const LayerSpec& spec) {
  Plan plan;
  plan.spec = spec;
  plan.layout = pair_layout(spec.head_dim);
  plan.frequencies = rope_frequencies(spec.head_dim);
  const double root_dim = std::sqrt(static_cast<double>(spec.head_dim));
  plan.softmax_scale = 1 / root_dim;
  plan.key_norm = std::sqrt(8 * root_dim);  // 8 nats split evenly between q and k
  for (int64_t g = 0; g < spec.num_kv_heads; ++g) plan.groups.push_back(make_group(plan, g));
  for (int64_t h = 0; h < spec.num_q_heads; ++h)
    plan.heads.push_back(make_head(plan, plan.groups[static_cast<size_t>(plan.group_of(h))], h));
  return plan;
}

Interval keys_of(const Component& component, int64_t token) {
  if (token < component.rows.begin || token >= component.rows.end) return {};
  Interval keys;
  switch (component.kind) {
    case ComponentKind::kSink:
      keys = {0, component.width};
      break;
    case ComponentKind::kNeedle:
      keys = {component.position, component.position + component.width};
      break;
    case ComponentKind::kSlash:
      keys = {token - component.position - component.width,
              token - component.position + component.width + 1};
      break;
    case ComponentKind::kLocal:
      keys = {token - component.width + 1, token + 1};
      break;
    case ComponentKind::kCluster:
      return {};
  }
  keys.begin = std::max<int64_t>(keys.begin, 0);
  keys.end = std::max(std::min(keys.end, token + 1), keys.begin);
  return keys;
}

}  // namespace crisp::synth
