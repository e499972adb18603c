// bench_case.h - one measured case of `crisp bench`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/engine.h"
#include "crisp/crisp.h"
#include "device_memory.h"

namespace crisp::cli {

struct BenchShape {
  int64_t length = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBFloat16;
};

// Tensors of a shape, filled by a preset of `crisp synth`, or with "random": bell-shaped noise.
struct BenchData {
  Buffer q, k, v;
  DeviceBuffer device_q, device_k, device_v;
  Attention attention;
};
BenchData make_bench_data(const BenchShape& shape, const std::string& input, uint64_t seed);
// The noise of "random", made on the CUDA device, where it stays.
BenchData make_bench_data_on_cuda(const BenchShape& shape, uint64_t seed);

// A mask that keeps the diagonal, the sink column and, at random, about `density` of the causal
// blocks in all. Words are written to `words`.
void random_mask(const BlockMask& mask, double density, uint64_t seed);

// (query, key) pairs that a mask of one causal segment lets through: 4 x head_dim FLOP each.
double visible_pairs(const Attention& attention, const BlockMask& mask);

// median, min, max per stage and in all; null for a stage that did not run.
nlohmann::ordered_json times_json(const Run& run);

}  // namespace crisp::cli
