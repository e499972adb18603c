#include "synth/masses.h"

#include <algorithm>
#include <cstring>

#include "synth/convert.h"
#include "synth/numeric.h"

namespace crisp::synth {
namespace {

constexpr int64_t kRowsPerPass = 4, kKeysPerPass = 8;

using Lane4 = float __attribute__((vector_size(16)));

inline Lane4 load4(const float* from) {
  Lane4 lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// logits[r][s] = sum_a q[r][a] * keys[a][s] for 4 rows and 128 keys, a ascending.
void multiply_tile(const float* q, int64_t dims, const float* keys, float* logits) {
  for (int64_t s = 0; s < kBlock; s += kKeysPerPass) {
    Lane4 sums[kRowsPerPass][2] = {};
    for (int64_t a = 0; a < dims; ++a) {
      const Lane4 low = load4(keys + a * kBlock + s), high = load4(keys + a * kBlock + s + 4);
      for (int64_t r = 0; r < kRowsPerPass; ++r) {
        const float x = q[r * dims + a];
        const Lane4 broadcast = {x, x, x, x};
        sums[r][0] += broadcast * low;
        sums[r][1] += broadcast * high;
      }
    }
    for (int64_t r = 0; r < kRowsPerPass; ++r)
      std::memcpy(logits + r * kBlock + s, sums[r], sizeof sums[r]);
  }
}

// Queries as stored, scaled, without the dimensions in which all of them are 0:
// [padded][dims.size()].
struct PackedQueries {
  std::vector<int64_t> dims;
  int64_t padded = 0;  // rows, a multiple of kRowsPerPass; the extra ones are 0
  std::vector<float> values;
};

PackedQueries pack_queries(const Plan& plan, int64_t head, const Positions& queries, DType dtype) {
  const int64_t dim = plan.spec.head_dim;
  Rotations rotations;
  fill_rotations(plan, queries, rotations);
  std::vector<float> rows(static_cast<size_t>(queries.count * dim));
  make_query_rows(plan, head, queries, rotations, rows.data());
  round_elements(dtype, rows.data(), queries.count * dim);
  PackedQueries packed;
  for (int64_t i = 0; i < dim; ++i)
    for (int64_t r = 0; r < queries.count; ++r)
      if (rows[static_cast<size_t>(r * dim + i)] != 0.f) {
        packed.dims.push_back(i);
        break;
      }
  packed.padded = (queries.count + kRowsPerPass - 1) / kRowsPerPass * kRowsPerPass;
  const size_t width = packed.dims.size();
  packed.values.assign(static_cast<size_t>(packed.padded) * width, 0.f);
  for (int64_t r = 0; r < queries.count; ++r)
    for (size_t a = 0; a < width; ++a)
      packed.values[static_cast<size_t>(r) * width + a] =
          static_cast<float>(plan.softmax_scale) *
          rows[static_cast<size_t>(r * dim + packed.dims[a])];
  return packed;
}

// Softmax of one query taken tile by tile: sums of exp(logit - peak) per component.
struct RowSums {
  float peak = -1e30f;
  double total = 0;
  std::vector<double> components;
};

double ordered_sum(const float* values, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(values[i]);
  return sum;
}

// Adds the exponentials of one tile to the components that claim them, first claim wins. `weights`
// is used up.
void claim_tile(const HeadTruth& head, const std::vector<std::vector<int64_t>>& topic_blocks,
                int64_t token, int64_t block, float* weights, std::vector<double>& sums) {
  const int64_t first = block * kBlock;
  for (size_t c = 0; c < head.components.size(); ++c) {
    const Component& component = head.components[c];
    Interval keys = keys_of(component, token);
    if (component.kind == ComponentKind::kCluster) {
      const int32_t topic = head.topics[static_cast<size_t>(token / kBlock)];
      const std::vector<int64_t>& blocks = topic_blocks[static_cast<size_t>(topic)];
      if (std::binary_search(blocks.begin(), blocks.end(), block)) keys = {first, first + kBlock};
    }
    const int64_t begin = std::max(keys.begin - first, int64_t{0});
    const int64_t end = std::min(keys.end - first, kBlock);
    if (begin >= end) continue;
    sums[c] += ordered_sum(weights, begin, end);
    std::fill(weights + begin, weights + end, 0.f);
  }
}

// One query against one tile of keys. `logits` become weights.
void add_tile(const HeadTruth& head, const std::vector<std::vector<int64_t>>& topic_blocks,
              int64_t token, int64_t block, float* logits, RowSums& row) {
  const int64_t visible = std::min(token + 1 - block * kBlock, kBlock);
  if (visible <= 0) return;
  for (int64_t i = visible; i < kBlock; ++i) logits[i] = -1e30f;
  float peaks[8];
  std::copy(logits, logits + 8, peaks);
  for (int64_t i = 8; i < kBlock; i += 8)
    for (int64_t j = 0; j < 8; ++j) peaks[j] = std::max(peaks[j], logits[i + j]);
  const float peak = std::max(row.peak, *std::max_element(peaks, peaks + 8));
  if (peak > row.peak) {
    const double shrink = static_cast<double>(exp_float(row.peak - peak));
    row.total *= shrink;
    for (double& sum : row.components) sum *= shrink;
    row.peak = peak;
  }
  for (int64_t i = 0; i < kBlock; ++i) logits[i] = exp_float(logits[i] - peak);
  float sums[8] = {};
  for (int64_t i = 0; i < kBlock; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += logits[i + j];
  row.total += ordered_sum(sums, 0, 8);
  claim_tile(head, topic_blocks, token, block, logits, row.components);
}

// Keys of a block, transposed: tile[a][s] = k[s][dims[a]], 0 beyond the last key.
void load_key_tile(const Plan& plan, int64_t kv_head, int64_t block,
                   const std::vector<int64_t>& dims, const void* k, DType dtype, float* rows,
                   float* tile) {
  const int64_t dim = plan.spec.head_dim, first = block * kBlock;
  const int64_t count = std::min(kBlock, plan.spec.num_tokens - first);
  load_elements(dtype, k, (kv_head * plan.spec.num_tokens + first) * dim, count * dim, rows);
  std::fill(tile, tile + static_cast<int64_t>(dims.size()) * kBlock, 0.f);
  for (size_t a = 0; a < dims.size(); ++a)
    for (int64_t s = 0; s < count; ++s)
      tile[static_cast<int64_t>(a) * kBlock + s] = rows[s * dim + dims[a]];
}

}  // namespace

Masses measure_masses(const Plan& plan, int64_t head, const Positions& queries, const void* k,
                      DType dtype) {
  const HeadTruth& truth = plan.heads[static_cast<size_t>(head)].truth;
  const int64_t kv_head = plan.group_of(head);
  const auto& topic_blocks = plan.groups[static_cast<size_t>(kv_head)].topic_blocks;
  const PackedQueries packed = pack_queries(plan, head, queries, dtype);
  const int64_t width = static_cast<int64_t>(packed.dims.size());

  std::vector<RowSums> rows(static_cast<size_t>(queries.count));
  for (RowSums& row : rows) row.components.assign(truth.components.size(), 0.0);
  std::vector<float> key_rows(static_cast<size_t>(kBlock * plan.spec.head_dim));
  std::vector<float> tile(static_cast<size_t>(width * kBlock));
  float logits[kRowsPerPass * kBlock];
  const int64_t last_block = queries.at(queries.count - 1) / kBlock;
  for (int64_t block = 0; block <= last_block; ++block) {
    load_key_tile(plan, kv_head, block, packed.dims, k, dtype, key_rows.data(), tile.data());
    for (int64_t r0 = 0; r0 < packed.padded; r0 += kRowsPerPass) {
      multiply_tile(packed.values.data() + r0 * width, width, tile.data(), logits);
      for (int64_t r = r0; r < std::min(r0 + kRowsPerPass, queries.count); ++r)
        add_tile(truth, topic_blocks, queries.at(r), block, logits + (r - r0) * kBlock,
                 rows[static_cast<size_t>(r)]);
    }
  }

  Masses masses{std::vector<double>(truth.components.size(), 0.0), 1};
  for (const RowSums& row : rows)
    for (size_t c = 0; c < masses.components.size(); ++c)
      masses.components[c] += row.components[c] / row.total / static_cast<double>(queries.count);
  for (double mass : masses.components) masses.background -= mass;
  return masses;
}

}  // namespace crisp::synth
