// pooled.cc - the pooled prefix and the token budgets on CUDA against those of the CPU,
// from the same 16-bit numbers. Scores and means of the pooled map are the CPU's bit by bit; its
// softmax and the token masses are not, so entries near the cut may go either way: few.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "pooled_cuda.h"
#include "reference/reference.h"
#include "structured.h"

namespace crisp::test {
namespace {

struct Compared {
  int64_t entries = 0, differing = 0, counts = 0, counts_differing = 0;
};

// Blocks of pooled heads, but for entries whose mass is within the float error of the cut. A mass
// is exp2(score - max) / sum: the exponentials err by 4e-7, the CPU's sum by one rounding per
// column, and the double map here by the rounding of its scores, of head_dim terms of a few units.
void compare_pooled(const Inputs& inputs, const Result& cpu, const Result& gpu, bool exactly,
                    Compared& compared) {
  OwnedMask shape(Call(inputs).attention, 128);
  const BlockMask& mask = shape.mask;
  const MaskRows rows = mask_rows(inputs, 128)[0];
  const double bound =
      2 * (1e-6 + static_cast<double>(rows.num_kv_blocks + 8 * inputs.q.dim) * 0x1p-24);
  for (int64_t h = 0; h < inputs.q.heads; ++h) {
    if (cpu.pattern[static_cast<size_t>(h)] == Pattern::kDense) continue;
    const auto first = static_cast<size_t>(h * mask.num_q_blocks * mask.words_per_row());
    const auto count = static_cast<size_t>(mask.num_q_blocks * mask.words_per_row());
    if (std::equal(cpu.words.begin() + first, cpu.words.begin() + first + count,
                   gpu.words.begin() + first)) {
      compared.entries += static_cast<int64_t>(32 * count);
      continue;
    }
    EXPECT_FALSE(exactly) << "head " << h << " of " << inputs.config;
    const auto kept = [&](const Result& result, int64_t row, int64_t col) {
      const auto word = static_cast<size_t>(row * mask.words_per_row() + col / 32);
      return (result.words[first + word] >> (col % 32) & 1) != 0;
    };
    const reference::Matrix map =
        reference::pooled_map(reference_head(inputs, inputs.segments[0], h));
    double cut = 2;
    for (int64_t row = 0; row < map.rows; ++row) {
      for (int64_t col = 0; col < rows.limit(row, true); ++col) {
        if (kept(cpu, row, col)) cut = std::min(cut, map(row, col));
      }
    }
    for (int64_t row = 0; row < mask.num_q_blocks; ++row) {
      for (int64_t col = 0; col < 32 * mask.words_per_row(); ++col, ++compared.entries) {
        if (kept(cpu, row, col) == kept(gpu, row, col)) continue;
        ++compared.differing;
        ASSERT_LT(col, rows.limit(row, true)) << "head " << h << " of " << inputs.config;
        EXPECT_LT(std::fabs(map(row, col) - cut), bound * cut)
            << "row " << row << " col " << col << " head " << h << " of " << inputs.config;
      }
    }
  }
}

void compare_budget(const Inputs& inputs, const std::vector<Pattern>& pattern, const Result& cpu,
                    const Result& gpu, Compared& compared) {
  const auto num_blocks = cpu.left_aligned.size() / pattern.size();
  for (size_t h = 0; h < pattern.size(); ++h) {
    if (pattern[h] == Pattern::kDense) continue;
    for (size_t b = h * num_blocks; b < (h + 1) * num_blocks; ++b) {
      EXPECT_NEAR(gpu.left_aligned[b], cpu.left_aligned[b], 1e-4 * cpu.left_aligned[b] + 1e-9)
          << "bucket " << b - h * num_blocks << " head " << h << " of " << inputs.config;
    }
    if (pattern[h] != Pattern::kVerticalSlash) continue;
    // A few tokens around the cut may go either way, which shows where the count changes a block.
    for (const auto& [want, got] : {std::pair(cpu.num_vertical[h], gpu.num_vertical[h]),
                                    std::pair(cpu.num_slash[h], gpu.num_slash[h])}) {
      EXPECT_NEAR(static_cast<double>(got), static_cast<double>(want), 1)
          << "head " << h << " of " << inputs.config;
      ++compared.counts;
      compared.counts_differing += want != got;
    }
  }
}

std::vector<Pattern> patterns_of(int64_t heads, std::vector<Pattern> cycle) {
  std::vector<Pattern> patterns;
  for (int64_t h = 0; h < heads; ++h)
    patterns.push_back(cycle[static_cast<size_t>(h) % cycle.size()]);
  return patterns;
}

const std::vector<Pattern> kMixed = {Pattern::kPooled, Pattern::kVerticalSlash, Pattern::kPooled,
                                     Pattern::kDense};

class PooledCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
  }

  void expect_like_cpu(const Inputs& inputs, const Rules& rules, bool exactly = false,
                       const std::vector<Pattern>& cycle = kMixed) {
    const std::vector<Pattern> patterns = patterns_of(inputs.q.heads, cycle);
    std::vector<float> row_lse;
    const Inputs wide = for_cpu(inputs);
    const Result cpu = run_cpu(wide, patterns, rules, row_lse);
    DeviceRun run(inputs, patterns, row_lse, rules);
    run();
    const Result gpu = run.result();
    EXPECT_EQ(gpu.pattern, cpu.pattern) << inputs.config;
    // Rows of other heads are not touched on either side, so all words compare.
    compare_pooled(wide, cpu, gpu, exactly, compared_);
    compare_budget(inputs, patterns, cpu, gpu, compared_);
  }
  void TearDown() override {
    EXPECT_LE(compared_.differing, 2 + compared_.entries / 1000) << compared_.entries;
    EXPECT_LE(compared_.counts_differing, 1 + compared_.counts / 20) << compared_.counts;
  }
  Compared compared_;
};

Case cuda_case(int64_t q_len, int64_t kv_len, int64_t q_heads = 4, int64_t kv_heads = 2,
               int64_t head_dim = 16, DType dtype = DType::kBFloat16) {
  Case c;
  c.segments = {{q_len, kv_len}};
  c.num_q_heads = q_heads;
  c.num_kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.dtype = dtype;
  return c;
}

TEST_F(PooledCuda, EveryNumberOfBlocks) {
  for (int64_t blocks = 1; blocks <= 40; ++blocks) {
    const DType dtype = blocks % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    const bool is_inclusive = blocks % 3 != 0;
    const int64_t n = blocks * 128 - (blocks % 4 == 0 ? 0 : blocks * 31 % 128);
    expect_like_cpu(structured_inputs(cuda_case(n, n, 4, 2, 8 * (1 + blocks % 5), dtype)),
                    {{0.93f, is_inclusive}, 0.9f, 1 + blocks % 3});
  }
}

TEST_F(PooledCuda, LongMaps) {
  for (const int64_t blocks : {129, 512}) {
    const int64_t n = blocks * 128 - 50;
    expect_like_cpu(structured_inputs(cuda_case(n, n, 4, 2, 16)), {{0.9f, true}, 0.95f, 8});
    expect_like_cpu(structured_inputs(cuda_case(n - 40 * 128 - 70, n, 2, 1, 8)),
                    {{0.55f, false}, 0.5f, 8}, false, {Pattern::kPooled, Pattern::kVerticalSlash});
  }
}

TEST_F(PooledCuda, ChunksOfAPrompt) {
  for (const auto& [q_len, kv_len] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                              {1, 1000},
                                                                              {5, 129},
                                                                              {100, 3000},
                                                                              {128, 2560},
                                                                              {129, 2561},
                                                                              {640, 5000},
                                                                              {3000, 3001},
                                                                              {17000, 33100}}) {
    expect_like_cpu(structured_inputs(cuda_case(q_len, kv_len)), {{0.9f, true}, 0.9f, 2});
  }
}

TEST_F(PooledCuda, GroupsAndHeadDims) {
  for (const int64_t group : {1, 3, 7, 8}) {
    for (const int64_t head_dim : {8, 24, 64, 128, 256}) {
      Case c = cuda_case(1500, 2100, 2 * group, 2, head_dim, DType::kFloat16);
      c.layout = head_dim == 24   ? Layout::kOddStrides
                 : head_dim == 64 ? Layout::kHeadMajor
                                  : Layout::kPackedQkv;
      expect_like_cpu(structured_inputs(c), {{0.8f, group % 2 == 0}, 0.9f, 2});
    }
  }
}

TEST_F(PooledCuda, PagedKeys) {
  for (const int64_t page_size : {1, 16, 100}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kOddStrides}) {
      Case c = cuda_case(1300, 1500);
      c.page_size = page_size;
      c.layout = layout;
      c.padding = 37;
      expect_like_cpu(structured_inputs(c), {{0.9f, true}, 0.9f, 2});
    }
  }
}

// Equal keys: row i of the map holds i + 1 equal entries, and the cut falls among them.
TEST_F(PooledCuda, TiesEverywhere) {
  for (const int64_t n : {1280, 1300, 9000, 20000}) {
    for (const bool constant_queries : {false, true}) {
      Inputs inputs = make_inputs(cuda_case(n - 200, n));
      std::fill(inputs.k.data.begin(), inputs.k.data.end(), 0.5f);
      if (constant_queries) std::fill(inputs.q.data.begin(), inputs.q.data.end(), 0.25f);
      for (const float gamma : {0.05f, 0.33f, 0.71f, 0.93f}) {
        expect_like_cpu(inputs, {{gamma, true}, gamma, 1}, true, {Pattern::kPooled});
        expect_like_cpu(inputs, {{gamma, false}, gamma, 1}, true, {Pattern::kPooled});
      }
    }
    Inputs inputs = structured_inputs(cuda_case(n, n));
    make_ties(inputs);
    expect_like_cpu(inputs, {{0.8f, true}, 0.8f, 1});
  }
}

TEST_F(PooledCuda, NoPooledHeadTouchesNothing) {
  const Inputs inputs = structured_inputs(cuda_case(2000, 2000));
  expect_like_cpu(inputs, {}, true, {Pattern::kVerticalSlash, Pattern::kDense});
}

TEST_F(PooledCuda, NotFiniteMeansDense) {
  Inputs inputs = structured_inputs(cuda_case(3000, 3000));
  inputs.q.row(10, 3)[2] = NAN;  // far from the proxy rows
  expect_like_cpu(inputs, {}, false, {Pattern::kPooled});
  inputs.k.row(700, 0)[1] = INFINITY;
  const auto patterns = patterns_of(4, {Pattern::kPooled});
  DeviceRun run(inputs, patterns, std::vector<float>(4 * 192, 1.0f), {});
  run();
  EXPECT_EQ(run.result().pattern, std::vector<Pattern>({Pattern::kDense, Pattern::kDense,
                                                        Pattern::kPooled, Pattern::kDense}));
}

TEST_F(PooledCuda, PagesOutOfRangeAreNotRead) {
  Case c = cuda_case(1300, 1500);
  c.page_size = 16;
  const Inputs inputs = structured_inputs(c);
  const auto patterns = patterns_of(4, {Pattern::kPooled});
  for (const int32_t id : {-1, 1 << 30, INT32_MIN}) {
    DeviceRun run(inputs, patterns, std::vector<float>(4 * 192, 1.0f), {});
    std::vector<int32_t> table = run.call.table->get<int32_t>();
    table[3] = id;
    run.call.table->put(table.data());
    run();
    EXPECT_EQ(run.result().pattern, patterns_of(4, {Pattern::kDense}));
  }
}

bool same(const Result& a, const Result& b, const std::vector<Pattern>& patterns) {
  bool equal = a.pattern == b.pattern && a.words == b.words;
  const size_t num_blocks = a.left_aligned.size() / patterns.size();
  for (size_t h = 0; h < patterns.size(); ++h) {
    if (patterns[h] == Pattern::kDense) continue;
    equal &= std::equal(a.left_aligned.begin() + h * num_blocks,
                        a.left_aligned.begin() + (h + 1) * num_blocks,
                        b.left_aligned.begin() + h * num_blocks);
    if (patterns[h] != Pattern::kVerticalSlash) continue;
    equal &= a.num_vertical[h] == b.num_vertical[h] && a.num_slash[h] == b.num_slash[h];
  }
  return equal;
}

TEST_F(PooledCuda, RunsAgainBitByBit) {
  const Inputs inputs = structured_inputs(cuda_case(20000, 20000, 7, 1, 64));
  const auto patterns = patterns_of(7, kMixed);
  DeviceRun run(inputs, patterns, std::vector<float>(7 * 192, 9.0f), {{0.95f, true}, 0.9f, 2});
  run();
  const Result first = run.result();
  for (int again = 0; again < 3; ++again) {
    run();
    EXPECT_TRUE(same(first, run.result(), patterns));
  }
}

// Slots of a few heads each are worked through in turn, with the same result.
TEST_F(PooledCuda, FewHeadsAtATime) {
  const Inputs inputs = structured_inputs(cuda_case(1700, 2000, 6, 2, 64));
  const auto patterns = patterns_of(6, {Pattern::kPooled, Pattern::kPooled, Pattern::kVerticalSlash,
                                        Pattern::kPooled, Pattern::kDense, Pattern::kPooled});
  const Rules rules{{0.9f, true}, 0.9f, 2};
  const std::vector<float> row_lse(6 * 192, 9.0f);
  DeviceRun at_once(inputs, patterns, row_lse, rules), run(inputs, patterns, row_lse, rules);
  at_once();
  const Result want = at_once.result();
  for (const int64_t num_heads : {1, 2, 3}) {
    run.run_with(num_heads);
    EXPECT_TRUE(same(want, run.result(), patterns)) << num_heads << " at a time";
  }
}

// A captured graph works on whatever its inputs and routes hold when it is replayed.
TEST_F(PooledCuda, GraphReplay) {
  Case c = cuda_case(5000, 5000, 4, 2, 64);
  const Rules rules{{0.9f, true}, 0.9f, 2};
  const std::vector<float> row_lse(4 * 192, 9.0f);
  const auto none = patterns_of(4, {Pattern::kVerticalSlash}), mixed = patterns_of(4, kMixed);
  DeviceRun run(structured_inputs(c), none, row_lse, rules);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  expect_ok(cudaStreamCreate(&stream));
  expect_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run(stream);
  expect_ok(cudaStreamEndCapture(stream, &graph));
  expect_ok(cudaGraphInstantiate(&exec, graph, 0));
  expect_ok(cudaGraphLaunch(exec, stream));
  expect_ok(cudaStreamSynchronize(stream));
  for (const uint64_t seed : {2, 3}) {
    c.seed = seed;
    DeviceRun direct(structured_inputs(c), mixed, row_lse, rules);
    direct();
    run.pattern.put(mixed.data());
    for (const auto& [to, from] : {std::pair(run.call.q.get(), direct.call.q.get()),
                                   std::pair(run.call.k.get(), direct.call.k.get())}) {
      const size_t size = from->bytes().size();
      expect_ok(cudaMemcpy(to->as<void>(), from->as<void>(), size, cudaMemcpyDeviceToDevice));
    }
    expect_ok(cudaMemset(run.words->as<void>(), 0xff, run.words->bytes().size()));
    expect_ok(cudaGraphLaunch(exec, stream));
    expect_ok(cudaStreamSynchronize(stream));
    EXPECT_TRUE(same(run.result(), direct.result(), mixed));
  }
  expect_ok(cudaGraphExecDestroy(exec));
  expect_ok(cudaGraphDestroy(graph));
  expect_ok(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace crisp::test
