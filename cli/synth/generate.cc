#include <algorithm>

#include "synth/convert.h"
#include "synth/factors.h"
#include "synth/plan.h"
#include "synth/solve.h"
#include "synth/synth.h"

namespace crisp::synth {
namespace {

// Shares of the whole work, for the progress report; solving dominates.
constexpr double kKeyShare = 0.2, kSolveShare = 0.6;

struct Tiles {
  Rotations rotations;
  std::vector<float> rows;
};

void write_keys_and_values(const Plan& plan, const Output& output, const Progress& progress) {
  const LayerSpec& spec = plan.spec;
  Tiles tiles;
  tiles.rows.resize(static_cast<size_t>(kBlock * spec.head_dim));
  for (int64_t block = 0; block < plan.num_blocks(); ++block) {
    const Positions positions{block * kBlock, std::min(kBlock, spec.num_tokens - block * kBlock)};
    fill_rotations(plan, positions, tiles.rotations);
    for (int64_t g = 0; g < spec.num_kv_heads; ++g) {
      const int64_t first = (g * spec.num_tokens + positions.first) * spec.head_dim;
      const int64_t count = positions.count * spec.head_dim;
      make_key_rows(plan, g, positions, tiles.rotations, tiles.rows.data());
      store_elements(output.dtype, tiles.rows.data(), output.k, first, count);
      make_value_rows(plan, g, positions, tiles.rows.data());
      store_elements(output.dtype, tiles.rows.data(), output.v, first, count);
    }
    if (progress)
      progress(kKeyShare * static_cast<double>(block + 1) / static_cast<double>(plan.num_blocks()));
  }
}

void write_queries(const Plan& plan, const Output& output, const Progress& progress) {
  const LayerSpec& spec = plan.spec;
  Tiles tiles;
  tiles.rows.resize(static_cast<size_t>(kBlock * spec.head_dim));
  for (int64_t block = 0; block < plan.num_blocks(); ++block) {
    const Positions positions{block * kBlock, std::min(kBlock, spec.num_tokens - block * kBlock)};
    fill_rotations(plan, positions, tiles.rotations);
    for (int64_t h = 0; h < spec.num_q_heads; ++h) {
      make_query_rows(plan, h, positions, tiles.rotations, tiles.rows.data());
      store_elements(output.dtype, tiles.rows.data(), output.q,
                     (h * spec.num_tokens + positions.first) * spec.head_dim,
                     positions.count * spec.head_dim);
    }
    if (progress)
      progress(kKeyShare + kSolveShare +
               (1 - kKeyShare - kSolveShare) * static_cast<double>(block + 1) /
                   static_cast<double>(plan.num_blocks()));
  }
}

}  // namespace

Truth generate(const LayerSpec& spec, const Output& output, const Progress& progress) {
  check_spec(spec);
  if (output.q == nullptr || output.k == nullptr || output.v == nullptr)
    throw Error("output buffers must be set");
  Plan plan = make_plan(spec);
  write_keys_and_values(plan, output, progress);
  for (int64_t h = 0; h < spec.num_q_heads; ++h) {
    solve_amplitudes(plan, h, output.k, output.dtype);
    if (progress)
      progress(kKeyShare +
               kSolveShare * static_cast<double>(h + 1) / static_cast<double>(spec.num_q_heads));
  }
  write_queries(plan, output, progress);

  Truth truth;
  truth.spec = spec;
  truth.softmax_scale = plan.softmax_scale;
  for (HeadPlan& head : plan.heads) truth.heads.push_back(std::move(head.truth));
  for (GroupPlan& group : plan.groups) truth.topic_blocks.push_back(std::move(group.topic_blocks));
  return truth;
}

Layer make_layer(const LayerSpec& spec) {
  check_spec(spec);
  Layer layer;
  const int64_t head = spec.num_tokens * spec.head_dim;
  layer.q.resize(static_cast<size_t>(spec.num_q_heads * head));
  layer.k.resize(static_cast<size_t>(spec.num_kv_heads * head));
  layer.v.resize(static_cast<size_t>(spec.num_kv_heads * head));
  layer.truth = generate(spec, {layer.q.data(), layer.k.data(), layer.v.data(), DType::kFloat32});
  return layer;
}

}  // namespace crisp::synth
