#include "synth/factors.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "synth/numeric.h"
#include "synth/random.h"

namespace crisp::synth {
namespace {

// Turns pairs [begin, end) of one row by the row's angles.
void rotate_pairs(int64_t begin, int64_t end, int64_t half, const float* cos, const float* sin,
                  float* row) {
  for (int64_t i = begin; i < end; ++i) {
    const float x = row[i], y = row[i + half];
    row[i] = x * cos[i] - y * sin[i];
    row[i + half] = x * sin[i] + y * cos[i];
  }
}

// Adds weight * a vector of the content dimensions to a row, before rotation.
void add_content(const PairLayout& layout, const float* direction, float weight, float* row) {
  const int64_t pairs = layout.content_pairs();
  for (int64_t i = 0; i < pairs; ++i) {
    row[layout.content_begin + i] += weight * direction[i];
    row[layout.content_begin + i + layout.half] += weight * direction[pairs + i];
  }
}

// Noise needs no rotation: turning independent normal numbers gives independent normal numbers.
void add_noise(const PairLayout& layout, uint64_t key, int64_t token, float scale, float* scratch,
               float* row) {
  const int64_t pairs = layout.noise_pairs();
  fill_normals(key, token * 2 * pairs, 2 * pairs, scratch);
  for (int64_t i = 0; i < pairs; ++i) {
    row[layout.noise_begin + i] = scale * scratch[2 * i];
    row[layout.noise_begin + i + layout.half] = scale * scratch[2 * i + 1];
  }
}

// Outlier channels: every other massive pair holds one in the keys, the rest in the queries, so
// that they never meet in a logit.
void add_outliers(const PairLayout& layout, bool of_keys, float size, float* row) {
  for (int64_t i = layout.massive_begin + (of_keys ? 0 : 1); i < layout.sink_begin; i += 2)
    row[i] = size;
}

// Centre of a key block in the content dimensions: its topic, if any, and scatter over all topics.
std::vector<float> block_centre(const Plan& plan, int64_t kv_head, int64_t block) {
  const GroupPlan& group = plan.groups[static_cast<size_t>(kv_head)];
  const size_t dims = static_cast<size_t>(2 * plan.layout.content_pairs());
  const int64_t padded = (group.num_topics + 1) / 2 * 2;
  std::vector<float> scatter(static_cast<size_t>(padded)), centre(dims, 0.f);
  fill_normals(stream_key(plan.spec.seed, Stream::kBlockCentre, kv_head), block * padded, padded,
               scatter.data());
  const float norm = static_cast<float>(plan.key_norm);
  const float spread = static_cast<float>(plan.spec.cluster_spread);
  for (int64_t topic = 0; topic < group.num_topics; ++topic) {
    const bool own = group.block_topic[static_cast<size_t>(block)] == topic;
    const float weight = norm * ((own ? 1.f : 0.f) + spread * scatter[static_cast<size_t>(topic)]);
    const auto& direction =
        group.directions[static_cast<size_t>(group.first_topic_direction + topic)];
    for (size_t i = 0; i < dims; ++i) centre[i] += weight * direction[i];
  }
  return centre;
}

// Adds the sink's vector, of the given length, to a row. It points along a random angle of
// each pair, so that 16-bit queries, whose sink part is the same for all rows, can take more values
// than one coordinate has.
void add_sink(const PairLayout& layout, const GroupPlan& group, float length, float* row) {
  const int64_t pairs = layout.half - layout.sink_begin;
  const float size = length / std::sqrt(static_cast<float>(pairs));
  for (int64_t i = 0; i < pairs; ++i) {
    row[layout.sink_begin + i] = size * group.sink_cos[static_cast<size_t>(i)];
    row[layout.sink_begin + i + layout.half] = size * group.sink_sin[static_cast<size_t>(i)];
  }
}

// What a head's amplitudes become as query coefficients: a logit of a nats needs a query part of
// length a / (softmax_scale * key_norm).
struct QueryCoefficients {
  std::vector<float> position_x, position_y;  // [position pair], before rotation
  float sink = 0, noise = 0, to_query = 0;
};

QueryCoefficients coefficients(const Plan& plan, const GroupPlan& group, const HeadPlan& head) {
  const PairLayout& layout = plan.layout;
  const size_t pairs = static_cast<size_t>(layout.position_pairs());
  const double to_query = 1 / (plan.softmax_scale * plan.key_norm);
  QueryCoefficients out;
  out.to_query = static_cast<float>(to_query);
  std::vector<double> x(pairs, 0.0), y(pairs, 0.0);
  for (const Component& component : head.truth.components) {
    if (component.kind == ComponentKind::kSink)
      out.sink = static_cast<float>(component.amplitude * to_query);
    if (component.kind != ComponentKind::kSlash && component.kind != ComponentKind::kLocal)
      continue;
    // All pairs aligned with the key `position` tokens back: sum_i cos((t - s - position) theta_i).
    const double size =
        component.amplitude * to_query / std::sqrt(static_cast<double>(layout.position_pairs()));
    for (size_t i = 0; i < pairs; ++i) {
      const SinCos turn =
          sin_cos(group.phases[i] - static_cast<double>(component.position) * plan.frequencies[i]);
      x[i] += size * turn.cos;
      y[i] += size * turn.sin;
    }
  }
  out.position_x.assign(x.begin(), x.end());
  out.position_y.assign(y.begin(), y.end());
  out.noise = static_cast<float>(head.truth.sigma / plan.softmax_scale /
                                 std::sqrt(2 * static_cast<double>(layout.noise_pairs())));
  return out;
}

// Needles and topics that query `token` asks for.
void add_query_content(const Plan& plan, const GroupPlan& group, const HeadPlan& head,
                       int64_t token, float to_query, float* row) {
  const int64_t segment = token * kDriftSegments / plan.spec.num_tokens;
  const double angle = head.drift * std::numbers::pi / 2 *
                       static_cast<double>(kDriftSegments - 1 - segment) / (kDriftSegments - 1);
  const SinCos turn = sin_cos(angle);
  for (size_t c = 0; c < head.truth.components.size(); ++c) {
    const Component& component = head.truth.components[c];
    const float size = static_cast<float>(component.amplitude) * to_query;
    if (component.kind == ComponentKind::kCluster) {
      const int64_t topic = head.truth.topics[static_cast<size_t>(token / kBlock)];
      const size_t direction = static_cast<size_t>(group.first_topic_direction + topic);
      add_content(plan.layout, group.directions[direction].data(), size, row);
    }
    if (component.kind != ComponentKind::kNeedle) continue;
    if (token < component.rows.begin || token >= component.rows.end) continue;
    add_content(plan.layout, group.directions[static_cast<size_t>(head.directions[c])].data(),
                size * static_cast<float>(turn.cos), row);
    if (head.drift > 0)
      add_content(plan.layout, group.directions[static_cast<size_t>(group.blank_direction)].data(),
                  size * static_cast<float>(turn.sin), row);
  }
}

}  // namespace

void fill_rotations(const Plan& plan, const Positions& positions, Rotations& rotations) {
  const int64_t half = plan.layout.half;
  rotations.cos.resize(static_cast<size_t>(positions.count * half));
  rotations.sin.resize(rotations.cos.size());
  for (int64_t r = 0; r < positions.count; ++r)
    rotation_table(plan.frequencies, positions.at(r), 1, rotations.cos.data() + r * half,
                   rotations.sin.data() + r * half);
}

void make_key_rows(const Plan& plan, int64_t kv_head, const Positions& positions,
                   const Rotations& rotations, float* rows) {
  const PairLayout& layout = plan.layout;
  const GroupPlan& group = plan.groups[static_cast<size_t>(kv_head)];
  const int64_t dim = plan.spec.head_dim;
  std::fill(rows, rows + positions.count * dim, 0.f);
  std::vector<float> scratch(static_cast<size_t>(2 * layout.noise_pairs()));
  std::vector<float> centre;
  if (group.num_topics > 0) centre = block_centre(plan, kv_head, positions.first / kBlock);
  const uint64_t noise_key = stream_key(plan.spec.seed, Stream::kKeyNoise, kv_head);
  const float norm = static_cast<float>(plan.key_norm);
  const float radius =
      static_cast<float>(plan.key_norm / std::sqrt(static_cast<double>(layout.position_pairs())));
  for (int64_t r = 0; r < positions.count; ++r) {
    float* row = rows + r * dim;
    const int64_t token = positions.at(r);
    for (int64_t i = 0; i < layout.position_pairs(); ++i) {
      row[i] = radius * group.phase_cos[static_cast<size_t>(i)];
      row[i + layout.half] = radius * group.phase_sin[static_cast<size_t>(i)];
    }
    for (size_t j = 0; j < group.needles.size(); ++j)
      if (token >= group.needles[j].position &&
          token < group.needles[j].position + group.needles[j].width)
        add_content(layout, group.directions[j].data(), norm, row);
    if (!centre.empty()) add_content(layout, centre.data(), 1.f, row);
    add_outliers(layout, true, group.key_outlier, row);
    if (token < plan.spec.num_sink_tokens) add_sink(layout, group, norm, row);
    rotate_pairs(0, layout.half, layout.half, rotations.cos.data() + r * layout.half,
                 rotations.sin.data() + r * layout.half, row);
    add_noise(layout, noise_key, token, 1.f, scratch.data(), row);
  }
}

void make_value_rows(const Plan& plan, int64_t kv_head, const Positions& positions, float* rows) {
  const int64_t dim = plan.spec.head_dim;
  std::vector<float> mean(static_cast<size_t>(dim));
  fill_normals(stream_key(plan.spec.seed, Stream::kValueMean, kv_head), 0, dim, mean.data());
  for (float& x : mean) x *= static_cast<float>(plan.spec.value_mean);
  const uint64_t key = stream_key(plan.spec.seed, Stream::kValue, kv_head);
  for (int64_t r = 0; r < positions.count; ++r) {
    float* row = rows + r * dim;
    const int64_t token = positions.at(r);
    fill_normals(key, token * dim, dim, row);
    const float scale =
        token < plan.spec.num_sink_tokens ? static_cast<float>(plan.spec.sink_value_scale) : 1.f;
    for (int64_t i = 0; i < dim; ++i) row[i] = scale * (row[i] + mean[static_cast<size_t>(i)]);
  }
}

void make_query_rows(const Plan& plan, int64_t head_index, const Positions& positions,
                     const Rotations& rotations, float* rows) {
  const PairLayout& layout = plan.layout;
  const GroupPlan& group = plan.groups[static_cast<size_t>(plan.group_of(head_index))];
  const HeadPlan& head = plan.heads[static_cast<size_t>(head_index)];
  const QueryCoefficients q = coefficients(plan, group, head);
  const int64_t dim = plan.spec.head_dim;
  std::fill(rows, rows + positions.count * dim, 0.f);
  std::vector<float> scratch(static_cast<size_t>(2 * layout.noise_pairs()));
  const uint64_t noise_key = stream_key(plan.spec.seed, Stream::kQueryNoise, head_index);
  for (int64_t r = 0; r < positions.count; ++r) {
    float* row = rows + r * dim;
    const int64_t token = positions.at(r);
    for (int64_t i = 0; i < layout.position_pairs(); ++i) {
      row[i] = q.position_x[static_cast<size_t>(i)];
      row[i + layout.half] = q.position_y[static_cast<size_t>(i)];
    }
    add_query_content(plan, group, head, token, q.to_query, row);
    add_outliers(layout, false, group.query_outlier, row);
    add_sink(layout, group, q.sink, row);
    rotate_pairs(0, layout.half, layout.half, rotations.cos.data() + r * layout.half,
                 rotations.sin.data() + r * layout.half, row);
    add_noise(layout, noise_key, token, q.noise, scratch.data(), row);
  }
}

}  // namespace crisp::synth
