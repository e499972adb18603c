// attend_bench.cc - dense and sparse attend on the CPU against the peak of its multiply-add units,
// probed before every timed run: a shared machine is slow for both or for neither. One JSON line
// per case; of_peak is the ratio of the two medians.
//
//   attend_bench [--threads N] [--repeat R] [--heads H] [--lengths 4096,8192] [--dims 64,128]
//                [--dtypes float32,bfloat16] [--densities 1,0.5,0.05]
//
// Random masks keep the diagonal and `density` of the other causal blocks. GFLOP/s counts the
// multiply-adds of causal (dense) pairs, 4 * head_dim * n (n + 1) / 2 per head, times the density.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "crisp/crisp.h"
#include "peak_probe.h"

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

struct Options {
  int threads = 0, repeat = 5;
  int64_t heads = 8;
  std::vector<int64_t> lengths{4096, 8192}, dims{64, 128};
  std::vector<std::string> dtypes{"float32"};
  std::vector<double> densities{1.0};
};

// Memory of one [heads, n, head_dim] tensor of random normal values.
std::vector<std::byte> random_tensor(int64_t count, crisp::DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const size_t bytes = dtype == crisp::DType::kFloat32 ? 4 : 2;
  std::vector<std::byte> memory(static_cast<size_t>(count) * bytes);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (bytes == 2) bits >>= 16;  // bfloat16, truncated: only its distribution matters here
    std::memcpy(memory.data() + i * bytes, &bits, bytes);
  }
  return memory;
}

crisp::ConstTensor view(const std::vector<std::byte>& memory, crisp::DType dtype, int64_t n,
                        int64_t heads, int64_t head_dim) {
  return {memory.data(), dtype, n, heads, head_dim, head_dim, n * head_dim};
}

// The diagonal and `density` of the other causal blocks of every row; returns the density got.
double fill_random_mask(crisp::BlockMask& mask, double density, uint32_t seed) {
  std::mt19937 random(seed);
  std::bernoulli_distribution keep(density);
  std::fill_n(mask.words, mask.bytes() / 4, 0u);
  int64_t kept = 0, causal = 0;
  for (int64_t row = 0; row < mask.num_heads * mask.num_q_blocks; ++row) {
    const int64_t diagonal = row % mask.num_q_blocks;
    causal += diagonal + 1;
    for (int64_t block = 0; block <= diagonal; ++block) {
      if (block != diagonal && !(density >= 1.0 || keep(random))) continue;
      mask.words[row * mask.words_per_row() + block / 32] |= 1u << (block % 32);
      ++kept;
    }
  }
  return static_cast<double>(kept) / static_cast<double>(causal);
}

struct Sample {
  double median, min, max;
};

Sample sample_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

void run_case(const Options& options, int64_t n, int64_t head_dim, const std::string& dtype_name) {
  const crisp::DType dtype =
      dtype_name == "float32" ? crisp::DType::kFloat32 : crisp::DType::kBFloat16;
  const int64_t count = options.heads * n * head_dim;
  const auto q = random_tensor(count, dtype, 1), k = random_tensor(count, dtype, 2),
             v = random_tensor(count, dtype, 3);
  std::vector<std::byte> out(q.size());
  crisp::Attention attention;
  attention.q = view(q, dtype, n, options.heads, head_dim);
  attention.k = view(k, dtype, n, options.heads, head_dim);
  attention.v = view(v, dtype, n, options.heads, head_dim);
  attention.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));

  crisp::BlockMask mask = crisp::mask_for(attention);
  std::vector<uint64_t> words(static_cast<size_t>(mask.bytes() / 8));
  mask.words = reinterpret_cast<uint32_t*>(words.data());
  crisp::Context context;
  context.num_threads = options.threads;
  const size_t bytes = crisp::workspace_bytes(attention, crisp::Dense{}, mask, context);
  std::vector<std::byte> scratch(bytes + 256);
  const size_t skip = 256 - reinterpret_cast<uintptr_t>(scratch.data()) % 256;
  context.workspace = std::span(scratch).subspan(skip, bytes);
  const crisp::Tensor result{out.data(), dtype, n, options.heads, head_dim, head_dim, n * head_dim};

  double dense_ms = 0;
  for (const double wanted : options.densities) {
    const double density = fill_random_mask(mask, wanted, 7);
    std::vector<double> times, peaks;
    crisp::attend(attention, mask, result, {}, context);  // warm
    for (int r = 0; r < options.repeat; ++r) {
      peaks.push_back(crisp::bench::peak_gflops(options.threads));
      const auto start = Clock::now();
      crisp::attend(attention, mask, result, {}, context);
      times.push_back(milliseconds_since(start));
    }
    const Sample ms = sample_of(times), peak = sample_of(peaks);
    if (wanted >= 1.0) dense_ms = ms.median;
    const double pairs = 0.5 * static_cast<double>(n) * static_cast<double>(n + 1);
    const double flop = 4.0 * static_cast<double>(options.heads * head_dim) * pairs * density;
    const double gflops = flop / ms.median * 1e-6;
    nlohmann::ordered_json line{{"n", n},
                                {"heads", options.heads},
                                {"head_dim", head_dim},
                                {"dtype", dtype_name},
                                {"threads", options.threads},
                                {"density", density},
                                {"ms_median", ms.median},
                                {"ms_min", ms.min},
                                {"ms_max", ms.max},
                                {"repeat", options.repeat},
                                {"gflops", gflops},
                                {"peak_gflops", peak.median},
                                {"peak_gflops_max", peak.max},
                                {"of_peak", gflops / peak.median},
                                {"target", crisp::cpu_target()}};
    if (dense_ms > 0 && wanted < 1.0)
      line["over_density_x_dense"] = ms.median / (density * dense_ms);
    std::cout << line.dump() << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"attend on the CPU against its multiply-add peak, JSON lines"};
  app.add_option("--threads", options.threads, "threads, 0 = all cores");
  app.add_option("--repeat", options.repeat, "timed runs per case, after one warm run");
  app.add_option("--heads", options.heads, "query heads = kv heads");
  app.add_option("--lengths", options.lengths, "tokens")->delimiter(',');
  app.add_option("--dims", options.dims, "head_dim")->delimiter(',');
  app.add_option("--dtypes", options.dtypes, "float32, bfloat16")->delimiter(',');
  app.add_option("--densities", options.densities, "kept share of causal blocks, dense first")
      ->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  if (options.threads == 0) options.threads = static_cast<int>(std::thread::hardware_concurrency());
  for (const std::string& dtype : options.dtypes) {
    for (const int64_t head_dim : options.dims) {
      for (const int64_t n : options.lengths) run_case(options, n, head_dim, dtype);
    }
  }
  return 0;
}
