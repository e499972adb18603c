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

// Calls make(positions, rotations, rows) for every block of positions, and reports `share` of the
// whole work, on top of `done`, as it goes. `rows` is scratch for one block of one head.
template <class Make>
void for_each_block(const Plan& plan, double done, double share, const Progress& progress,
                    Make&& make) {
  const LayerSpec& spec = plan.spec;
  Rotations rotations;
  std::vector<float> rows(static_cast<size_t>(kBlock * spec.head_dim));
  for (int64_t block = 0; block < plan.num_blocks(); ++block) {
    const Positions positions{block * kBlock, std::min(kBlock, spec.num_tokens - block * kBlock)};
    fill_rotations(plan, positions, rotations);
    make(positions, rotations, rows.data());
    if (progress)
      progress(done +
               share * static_cast<double>(block + 1) / static_cast<double>(plan.num_blocks()));
  }
}

// Stores a block of rows of one head into a tensor [heads, num_tokens, head_dim].
void store_rows(const LayerSpec& spec, int64_t head, const Positions& positions, const float* rows,
                DType dtype, void* tensor) {
  store_elements(dtype, rows, tensor, (head * spec.num_tokens + positions.first) * spec.head_dim,
                 positions.count * spec.head_dim);
}

void write_keys_and_values(const Plan& plan, const Output& output, const Progress& progress) {
  const LayerSpec& spec = plan.spec;
  for_each_block(plan, 0, kKeyShare, progress,
                 [&](const Positions& positions, const Rotations& rotations, float* rows) {
                   for (int64_t g = 0; g < spec.num_kv_heads; ++g) {
                     make_key_rows(plan, g, positions, rotations, rows);
                     store_rows(spec, g, positions, rows, output.dtype, output.k);
                     make_value_rows(plan, g, positions, rows);
                     store_rows(spec, g, positions, rows, output.dtype, output.v);
                   }
                 });
}

void write_queries(const Plan& plan, const Output& output, const Progress& progress) {
  const LayerSpec& spec = plan.spec;
  for_each_block(plan, kKeyShare + kSolveShare, 1 - kKeyShare - kSolveShare, progress,
                 [&](const Positions& positions, const Rotations& rotations, float* rows) {
                   for (int64_t h = 0; h < spec.num_q_heads; ++h) {
                     make_query_rows(plan, h, positions, rotations, rows);
                     store_rows(spec, h, positions, rows, output.dtype, output.q);
                   }
                 });
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
