// refusals.h - a call that is accepted, and a check that one spoilt argument gets it refused: with
// crisp::Error, before anything is written, in a sentence that names the argument, its value and
// what was expected.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "run.h"

namespace crisp::test {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// A call that is accepted, with all that a refusal must leave alone.
struct Bench {
  explicit Bench(int64_t page_size)
      : inputs(make_inputs({.num_q_heads = 4,
                            .num_kv_heads = 2,
                            .head_dim = 16,
                            .segments = {{100, 200}, {150, 150}},
                            .padding = 4,
                            .page_size = page_size})),
        call(inputs),
        attention(call.attention),
        segments(attention.segments.begin(), attention.segments.end()),
        mask(attention, 128),
        policy_mask(attention, 128),
        out_memory(static_cast<size_t>(inputs.q.data.size()) * 4 + 256),
        lse_memory(static_cast<size_t>(inputs.q.tokens) * 4 * sizeof(float)),
        report_memory(8 * sizeof(HeadReport)) {
    attention.segments = segments;
    if (page_size > 0) {
      table.assign(attention.pages.block_table,
                   attention.pages.block_table + 2 * attention.pages.row_stride);
      attention.pages.block_table = table.data();
    }
    out = {out_memory.data(), DType::kFloat32, inputs.q.tokens, 4, 16, 64, 16};
    lse = lse_memory.as<float>();
    report = report_memory.as<HeadReport>();
    block_mask = mask.mask;
    mask.memory().refill();
    const size_t needed =
        std::max({bytes(Dense{}), bytes(Crisp{.dense_below_tokens = 0}), bytes(FlexPrefill{})});
    workspace_memory = std::make_unique<Guarded>(needed + 256);
    context.workspace = workspace_memory->bytes().first(needed);
  }
  size_t bytes(const Policy& p) const { return workspace_bytes(attention, p, mask.mask, context); }
  bool untouched() {
    return out_memory.untouched() && lse_memory.untouched() && report_memory.untouched() &&
           workspace_memory->untouched() && mask.memory().untouched();
  }

  Inputs inputs;
  Call call;
  Attention attention;
  std::vector<Segment> segments;
  std::vector<int32_t> table;
  OwnedMask mask, policy_mask;
  Guarded out_memory, lse_memory, report_memory;
  std::unique_ptr<Guarded> workspace_memory;
  Tensor out;
  std::span<float> lse;
  std::span<HeadReport> report;
  BlockMask block_mask;
  Policy policy = Dense{};
  Context context;
};

// Which functions refuse it. kShapes: all of them, and why_unsupported says the same.
enum Who { kShapes, kPolicy, kAll, kAttends, kSelects };

struct Refusal {
  const char* what;
  Who who;
  std::function<void(Bench&)> spoil;
  std::vector<const char*> says;
};

inline void expect_says(const std::string& message, const Refusal& refusal) {
  for (const char* part : refusal.says)
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  EXPECT_NE(message.find("must"), std::string::npos) << "no expectation in: " << message;
}

inline void expect_refused(Bench& bench, const Refusal& refusal, const char* function,
                           const std::function<void()>& call) {
  SCOPED_TRACE(std::string(refusal.what) + ", " + function);
  try {
    call();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    expect_says(error.what(), refusal);
  }
  EXPECT_TRUE(bench.untouched()) << "something was written";
}

inline void check(const Refusal& refusal, int64_t page_size) {
  Bench bench(page_size);
  refusal.spoil(bench);
  const Attention& attention = bench.attention;
  const Policy& policy = bench.policy;
  const BlockMask& mask = bench.block_mask;
  const Context& context = bench.context;
  if (refusal.who == kShapes || refusal.who == kPolicy) {
    SCOPED_TRACE(refusal.what);
    const char* why = why_unsupported(attention, policy, mask, context);
    ASSERT_NE(why, nullptr);
    expect_says(why, refusal);
    EXPECT_THROW(workspace_bytes(attention, policy, mask, context), Error);
  }
  const bool attends = refusal.who != kSelects && refusal.who != kPolicy,
             selects = refusal.who != kAttends;
  if (attends) {
    expect_refused(bench, refusal, "attend",
                   [&] { attend(attention, mask, bench.out, bench.lse, context); });
  }
  if (selects) {
    expect_refused(bench, refusal, "select_blocks",
                   [&] { select_blocks(attention, policy, mask, context, bench.report); });
  }
  expect_refused(bench, refusal, "prefill", [&] {
    prefill(attention, policy, mask, bench.out, bench.lse, context, bench.report);
  });
}

}  // namespace crisp::test
