#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "synth/plan.h"
#include "synth/synth.h"

namespace crisp::synth {
namespace {

using Json = nlohmann::ordered_json;

Json rows_json(const RowRange& rows) { return Json::array({rows.begin, rows.end}); }

Json component_json(const Component& component, const std::vector<int32_t>& topics) {
  Json json;
  json["kind"] = name(component.kind);
  switch (component.kind) {
    case ComponentKind::kSink:
    case ComponentKind::kLocal:
      json["num_keys"] = component.width;
      break;
    case ComponentKind::kNeedle:
      json["position"] = component.position;
      json["num_keys"] = component.width;
      break;
    case ComponentKind::kSlash:
      json["distance"] = component.position;
      json["half_width"] = component.width;
      break;
    case ComponentKind::kCluster:
      json["blocks_per_topic"] = component.width;
      json["topic_of_q_block"] = topics;
      break;
  }
  json["rows"] = rows_json(component.rows);
  json["measured_rows"] = rows_json(component.measured);
  json["target"] = component.target;
  json["realised"] = component.realised;
  json["amplitude"] = component.amplitude;
  return json;
}

Json head_json(const Truth& truth, size_t index) {
  const HeadTruth& head = truth.heads[index];
  const HeadSpec& spec = truth.spec.heads[index];
  Json json;
  json["head"] = index;
  json["kind"] = head.kind;
  json["sigma"] = head.sigma;
  json["drift"] = spec.drift;
  json["components"] = Json::array();
  for (const Component& component : head.components)
    json["components"].push_back(component_json(component, head.topics));
  json["background"] = {{"target", head.background_target}, {"realised", head.background_realised}};
  return json;
}

}  // namespace

const char* name(ComponentKind kind) {
  switch (kind) {
    case ComponentKind::kSink:
      return "sink";
    case ComponentKind::kNeedle:
      return "needle";
    case ComponentKind::kCluster:
      return "cluster";
    case ComponentKind::kSlash:
      return "slash";
    case ComponentKind::kLocal:
      return "local";
  }
  return "unknown";
}

std::vector<int64_t> signal_blocks(const Truth& truth, int64_t head, int64_t q_block) {
  const int64_t num_tokens = truth.spec.num_tokens;
  const HeadTruth& from = truth.heads.at(static_cast<size_t>(head));
  const int64_t first = q_block * kBlock, end = std::min(first + kBlock, num_tokens);
  if (first < 0 || first >= num_tokens)
    throw Error("q_block is " + std::to_string(q_block) + ", outside the " +
                std::to_string(num_tokens) + " tokens");
  std::set<int64_t> blocks;
  for (const Component& component : from.components) {
    if (component.kind == ComponentKind::kCluster) {
      const int64_t group_size = truth.spec.num_q_heads / truth.spec.num_kv_heads;
      const int32_t topic = from.topics[static_cast<size_t>(q_block)];
      for (int64_t b :
           truth.topic_blocks[static_cast<size_t>(head / group_size)][static_cast<size_t>(topic)])
        if (b <= q_block) blocks.insert(b);
      continue;
    }
    for (int64_t token = first; token < end; ++token) {
      const Interval keys = keys_of(component, token);
      if (keys.begin == keys.end) continue;
      for (int64_t b = keys.begin / kBlock; b <= (keys.end - 1) / kBlock; ++b) blocks.insert(b);
    }
  }
  return {blocks.begin(), blocks.end()};
}

std::string to_json(const Truth& truth) {
  const LayerSpec& spec = truth.spec;
  Json json;
  json["generator"] = "crisp synth";
  json["block_size"] = kBlock;
  json["num_tokens"] = spec.num_tokens;
  json["num_q_heads"] = spec.num_q_heads;
  json["num_kv_heads"] = spec.num_kv_heads;
  json["head_dim"] = spec.head_dim;
  json["softmax_scale"] = truth.softmax_scale;
  json["seed"] = spec.seed;
  json["num_sink_tokens"] = spec.num_sink_tokens;
  json["sink_value_scale"] = spec.sink_value_scale;
  json["value_mean"] = spec.value_mean;
  json["cluster_spread"] = spec.cluster_spread;
  json["massive"] = spec.massive;
  json["topic_blocks"] = truth.topic_blocks;  // [kv head][topic]
  json["heads"] = Json::array();
  for (size_t h = 0; h < truth.heads.size(); ++h) json["heads"].push_back(head_json(truth, h));
  return json.dump();
}

}  // namespace crisp::synth
