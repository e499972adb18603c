#include "commands/bench_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "commands/policy_options.h"
#include "core/device.h"
#include "core/half.h"
#include "core/problem.h"
#include "core/random_fill.h"
#include "synth/synth.h"

namespace crisp::cli {

namespace {

using Json = nlohmann::ordered_json;

void fill_random(Buffer& buffer, DType dtype, std::mt19937_64& random) {
  const auto count = static_cast<int64_t>(buffer.bytes().size()) / element_bytes(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = random();
    float sum = -2.f;
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<float>(bits >> (16 * part) & 0xffff) / 65536.f;
    }
    store_float(buffer.data(), dtype, i, sum * 1.7320508f);
  }
}

bool get_bit(const uint32_t* words, int64_t bit) {
  return (words[bit / 32] >> (bit % 32) & 1u) != 0;
}

}  // namespace

BenchData make_bench_data(const BenchShape& shape, const std::string& input, uint64_t seed) {
  BenchData data;
  const auto make = [&](Buffer& buffer, int64_t heads) {
    const int64_t bytes = heads * shape.length * shape.head_dim * element_bytes(shape.dtype);
    buffer = Buffer(bytes, "a synthetic tensor");
    return as_const(head_major(buffer.data(), shape.dtype, heads, shape.length, shape.head_dim));
  };
  data.attention.q = make(data.q, shape.num_q_heads);
  data.attention.k = make(data.k, shape.num_kv_heads);
  data.attention.v = make(data.v, shape.num_kv_heads);
  data.attention.softmax_scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  if (input == "random") {
    std::mt19937_64 random(seed);
    for (Buffer* buffer : {&data.q, &data.k, &data.v}) fill_random(*buffer, shape.dtype, random);
    return data;
  }
  synth::LayerSpec spec;
  spec.num_tokens = shape.length;
  spec.num_q_heads = shape.num_q_heads;
  spec.num_kv_heads = shape.num_kv_heads;
  spec.head_dim = shape.head_dim;
  spec.seed = seed;
  synth::apply_preset(input, spec);
  synth::generate(spec, {data.q.data(), data.k.data(), data.v.data(), shape.dtype});
  return data;
}

BenchData make_bench_data_on_cuda(const BenchShape& shape, uint64_t seed) {
  BenchData data;
  const auto make = [&](DeviceBuffer& buffer, int64_t heads, [[maybe_unused]] uint64_t part) {
    const int64_t bytes = heads * shape.length * shape.head_dim * element_bytes(shape.dtype);
    buffer = DeviceBuffer(bytes, "a random tensor");
    const Tensor tensor =
        head_major(buffer.data(), shape.dtype, heads, shape.length, shape.head_dim);
    if constexpr (kWithCuda) fill_random_cuda(tensor, 3 * seed + part, nullptr);
    return as_const(tensor);
  };
  data.attention.q = make(data.device_q, shape.num_q_heads, 0);
  data.attention.k = make(data.device_k, shape.num_kv_heads, 1);
  data.attention.v = make(data.device_v, shape.num_kv_heads, 2);
  data.attention.softmax_scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  return data;
}

void random_mask(const BlockMask& mask, double density, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::memset(mask.words, 0, static_cast<size_t>(mask.bytes()));
  const int64_t first_row = mask.num_kv_blocks - mask.num_q_blocks;
  // The forced blocks are part of the density asked for.
  double causal = 0, forced = 0;
  for (int64_t row = first_row; row < mask.num_kv_blocks; ++row) {
    causal += static_cast<double>(row + 1);
    forced += row == 0 ? 1 : 2;
  }
  const double share =
      std::clamp((density * causal - forced) / std::max(1.0, causal - forced), 0.0, 1.0);
  const auto limit = static_cast<uint64_t>(share * 0x1p53);
  for (int64_t head = 0; head < mask.num_heads; ++head) {
    for (int64_t row = 0; row < mask.num_q_blocks; ++row) {
      uint32_t* words = mask.words + (head * mask.num_q_blocks + row) * mask.words_per_row();
      const int64_t diagonal = first_row + row;
      for (int64_t col = 0; col <= diagonal; ++col) {
        const bool keep = col == 0 || col == diagonal || random() >> 11 < limit;
        if (keep) words[col / 32] |= uint32_t{1} << (col % 32);
      }
    }
  }
}

double visible_pairs(const Attention& attention, const BlockMask& mask) {
  const SegmentShape shape = segment_shape(segment_at(attention, 0), mask.block_size);
  double pairs = 0;
  for (int64_t head = 0; head < mask.num_heads; ++head) {
    for (int64_t row = 0; row < mask.num_q_blocks; ++row) {
      const uint32_t* words = mask.words + (head * mask.num_q_blocks + row) * mask.words_per_row();
      const int64_t block = shape.first_q_block + row;
      const int64_t begin = std::max(block * mask.block_size, shape.q_offset);
      const int64_t end = std::min((block + 1) * mask.block_size, shape.kv_len);
      for (int64_t col = 0; col < block; ++col) {
        if (get_bit(words, col)) pairs += static_cast<double>((end - begin) * mask.block_size);
      }
      if (!get_bit(words, block)) continue;
      for (int64_t q = begin; q < end; ++q) {
        pairs += static_cast<double>(q - block * mask.block_size + 1);
      }
    }
  }
  return pairs;
}

Json times_json(const Run& run) {
  const auto spread = [](const std::vector<double>& values) -> Json {
    const double middle = median(values);
    if (std::isnan(middle)) return nullptr;
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return {{"median", middle}, {"min", *low}, {"max", *high}};
  };
  Json out;
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    std::vector<double> values;
    for (const StageTimes& ms : run.repeats) values.push_back(ms[stage]);
    out[kStageNames[stage]] = spread(values);
  }
  std::vector<double> totals;
  for (const StageTimes& ms : run.repeats) totals.push_back(total_ms(ms));
  out["total"] = spread(totals);
  return out;
}

}  // namespace crisp::cli
