// pooled_cuda.h - the token budgets and the pooled prefix of one segment, on the CPU and on CUDA.
// Tests that include it are built with CUDA only.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "device_bytes.h"
#include "run.h"
#include "select/pooled.h"
#include "select/token_budget.h"
#include "stage.h"

namespace crisp::test {

struct Result {
  std::vector<Pattern> pattern;
  std::vector<uint32_t> words;
  std::vector<int64_t> num_vertical, num_slash;
  std::vector<float> left_aligned;
};

struct Rules {
  PooledRule pooled;
  float gamma = 0.9f;
  int64_t min_blocks = 2;
};

// All heads of the only segment: token budgets, then the pooled prefix.
template <class Stages>
size_t run_stages(const HeadBatch& batch, const ProxyMap& map, const Routes& routes,
                  const Rules& rules, const BlockMask& mask, Run& run, Stages&& done) {
  const TokenBudget budget =
      count_token_budget(batch, map, routes, rules.gamma, rules.min_blocks, run);
  select_pooled(batch, map, routes, rules.pooled, mask, run);
  if (!run.is_counting()) done(budget);
  return run.workspace.peak_bytes();
}

// The proxy's row_lse stays on the host for the device's run.
inline Result run_cpu(const Inputs& inputs, std::vector<Pattern> pattern, const Rules& rules,
                      std::vector<float>& row_lse) {
  const Call call(inputs);
  const HeadBatch batch = batch_of(call.attention);
  OwnedMask mask(call.attention, 128);
  mask.memory().refill();
  const Context context{.num_threads = 2};
  Result result;
  const Staged<int> staged(context, [&](Run& run) {
    const ProxyMap map = compute_proxy_map(batch, {}, run);
    run_stages(batch, map, {pattern.data(), nullptr}, rules, mask.mask, run,
               [&](const TokenBudget& budget) {
                 const int64_t heads = batch.num_heads;
                 result.num_vertical.assign(budget.num_vertical, budget.num_vertical + heads);
                 result.num_slash.assign(budget.num_slash, budget.num_slash + heads);
                 result.left_aligned.assign(budget.left_aligned_slash,
                                            budget.left_aligned_slash + heads * map.num_blocks);
                 row_lse.assign(map.row_lse,
                                map.row_lse + heads * proxy_rows(batch.segment).num_slots);
               });
    return 0;
  });
  result.pattern = std::move(pattern);
  const auto words = mask.memory().as<uint32_t>();
  result.words.assign(words.begin(), words.end());
  return result;
}

// What a run on the device reads and writes; may be run again.
struct DeviceRun {
  DeviceRun(const Inputs& inputs, const std::vector<Pattern>& patterns,
            const std::vector<float>& row_lse, const Rules& rules_)
      : call(inputs), rules(rules_), pattern(patterns.size()), lse(4 * row_lse.size()) {
    pattern.put(patterns.data());
    lse.put(row_lse.data());
    batch = batch_of(call.attention);
    mask = mask_for(call.attention);
    words = std::make_unique<DeviceBytes>(static_cast<size_t>(mask.bytes()));
    mask.words = words->as<uint32_t>();
    map.num_blocks = batch.segment.num_kv_blocks;
    map.row_lse = lse.as<float>();
    means = std::make_unique<DeviceBytes>(static_cast<size_t>(
        4 * call.attention.k.num_heads * map.num_blocks * call.attention.k.head_dim));
    map.key_means = means->as<float>();
    Workspace counting = Workspace::counting();
    Run run{context, counting};
    enqueue(run);
    workspace = std::make_unique<DeviceBytes>(counting.peak_bytes());
  }
  void enqueue(Run& run) {
    run_stages(batch, map, {pattern.as<Pattern>(), nullptr}, rules, mask, run,
               [&](const TokenBudget& taken) { budget = taken; });
  }
  void operator()(cudaStream_t stream = nullptr) {
    context.stream = stream;
    Workspace memory(workspace->bytes());
    Run run{context, memory};
    enqueue(run);
  }
  // Through the kernels' own interface, with scratch for `num_heads` heads.
  void run_with(int64_t num_heads) {
    expect_ok(cudaMemset(words->as<void>(), 0xff, words->bytes().size()));
    Workspace memory(workspace->bytes());
    const SegmentShape& segment = batch.segment;
    const Routes routes = {pattern.as<Pattern>(), nullptr};
    const int64_t tokens = num_heads * map.num_blocks * 128, rows = num_heads * mask.num_q_blocks;
    budget.num_vertical = memory.take<int64_t>(batch.num_heads);
    budget.num_slash = memory.take<int64_t>(batch.num_heads);
    budget.left_aligned_slash = memory.take<float>(batch.num_heads * map.num_blocks);
    const size_t mark = memory.mark();
    const TokenCudaScratch token_scratch = {num_heads, memory.take<float>(tokens),
                                            memory.take<float>(2 * tokens)};
    token_budget_cuda({batch,
                       map,
                       routes,
                       rules.gamma,
                       rules.min_blocks,
                       proxy_rows(segment),
                       budget,
                       {},
                       1,
                       token_scratch},
                      nullptr);
    memory.rewind(mark);
    PooledCudaScratch scratch;
    scratch.num_heads = num_heads;
    scratch.queries = memory.take<float>(rows * batch.attention->q.head_dim);
    scratch.maps = memory.take<float>(num_heads * PooledCudaScratch::floats_of_map(segment));
    scratch.prefixes = memory.take<PooledPrefix>(num_heads);
    scratch.bins = memory.take<uint64_t>(num_heads * 6 * PooledScratch::kMaxBins);
    scratch.row_equals = memory.take<int32_t>(rows);
    pooled_cuda({batch, map, routes, rules.pooled, mask, {}, 1, scratch}, nullptr);
  }
  Result result() {
    expect_ok(cudaDeviceSynchronize());
    EXPECT_TRUE(workspace->intact() && words->intact() && means->intact() && pattern.intact());
    const auto heads = static_cast<size_t>(batch.num_heads);
    return {pattern.get<Pattern>(), words->get<uint32_t>(), array(budget.num_vertical, heads),
            array(budget.num_slash, heads),
            array(budget.left_aligned_slash, heads * static_cast<size_t>(map.num_blocks))};
  }
  template <class T>
  static std::vector<T> array(const T* from, size_t count) {
    std::vector<T> to(count);
    expect_ok(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }

  DeviceCall call;
  Rules rules;
  Context context{.device = Device::kCuda};
  HeadBatch batch;
  BlockMask mask;
  ProxyMap map;
  TokenBudget budget;
  DeviceBytes pattern, lse;
  std::unique_ptr<DeviceBytes> words, means, workspace;
};

// The same numbers as float32 in plain layout.
inline Inputs for_cpu(Inputs inputs) {
  inputs.config.dtype = DType::kFloat32;
  inputs.config.layout = Layout::kContiguous;
  inputs.config.page_size = 0;
  return inputs;
}

}  // namespace crisp::test
