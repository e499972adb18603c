// shapes_test.cc - what is told from shapes alone (masks, counts, workspace), and which views of
// one packed buffer a call may use. What is refused is in refusals_test.cc.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {
namespace {

constexpr int64_t kTokens = 300, kQHeads = 4, kKvHeads = 2, kHeadDim = 16;

// A call that is accepted, with memory of its own.
struct Call {
  std::vector<float> q = std::vector<float>(kTokens * kQHeads * kHeadDim, 0.5f);
  std::vector<float> k = std::vector<float>(kTokens * kKvHeads * kHeadDim, 0.25f);
  std::vector<float> v = std::vector<float>(kTokens * kKvHeads * kHeadDim, 1.f);
  std::vector<float> out_values = std::vector<float>(q.size());
  std::vector<float> lse_values = std::vector<float>(kTokens * kQHeads);
  std::vector<uint64_t> mask_words;
  std::vector<HeadReport> report_values = std::vector<HeadReport>(kQHeads);
  std::vector<std::byte> memory;
  std::vector<Segment> segments;
  std::vector<int32_t> table;

  Attention attention;
  Policy policy = Crisp{};
  BlockMask mask;
  Tensor out;
  std::span<float> lse;
  std::span<HeadReport> report;
  Context context;

  Call() {
    const DType f32 = DType::kFloat32;
    attention.q = {q.data(), f32, kTokens, kQHeads, kHeadDim, kQHeads * kHeadDim, kHeadDim, 0};
    attention.k = {k.data(), f32, kTokens, kKvHeads, kHeadDim, kKvHeads * kHeadDim, kHeadDim, 0};
    attention.v = attention.k;
    attention.v.data = v.data();
    attention.softmax_scale = 0.25f;
    out = {out_values.data(), f32, kTokens, kQHeads, kHeadDim, kQHeads * kHeadDim, kHeadDim, 0};
    lse = lse_values;
    report = report_values;
    context.num_threads = 1;
    mask = mask_for(attention);
    mask_words.assign(static_cast<size_t>(mask.bytes() / 8), 0xabababababababab);
    mask.words = reinterpret_cast<uint32_t*>(mask_words.data());
    const size_t bytes = workspace_bytes(attention, policy, mask, context);
    memory.resize(bytes + 512, std::byte{0x5a});
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    context.workspace = {memory.data() + (256 - address % 256) % 256, bytes};
  }
  Call(const Call&) = delete;

  void use_pages(int64_t page_size) {
    for (int32_t page = 0; page < kTokens / page_size; ++page) table.push_back(page);
    attention.pages = {table.data(), 1, static_cast<int64_t>(table.size()), page_size};
    attention.k.page_stride = attention.v.page_stride = page_size * kKvHeads * kHeadDim;
  }
};

std::string refusal(Call& call) {
  try {
    prefill(call.attention, call.policy, call.mask, call.out, call.lse, call.context, call.report);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// q, k, v and out as slices of one [tokens, 2 * q_heads + 2 * kv_heads, head_dim] buffer.
TEST(Shapes, AcceptsAlternatingViewsOfOnePackedBuffer) {
  constexpr int64_t kRow = (2 * kQHeads + 2 * kKvHeads) * kHeadDim;
  std::vector<float> packed(kTokens * kRow, 0.5f);
  Call call;
  const auto place = [&](auto& tensor, int64_t head) {
    tensor.data = packed.data() + head * kHeadDim;
    tensor.token_stride = kRow;
  };
  place(call.attention.q, 0);
  place(call.attention.k, kQHeads);
  place(call.attention.v, kQHeads + kKvHeads);
  place(call.out, kQHeads + 2 * kKvHeads);
  EXPECT_EQ(refusal(call), "accepted");
  place(call.out, kQHeads + 2 * kKvHeads - 1);
  EXPECT_NE(refusal(call).find("out.data overlaps v.data"), std::string::npos) << refusal(call);
  place(call.out, kQHeads + 2 * kKvHeads + 1);  // its last head is the next token's first q head
  EXPECT_NE(refusal(call).find("out.data overlaps q.data"), std::string::npos) << refusal(call);
}

TEST(Shapes, ReadsNoPointerWhenOnlyShapesAreAsked) {
  Call call;
  call.use_pages(20);
  call.attention.q.data = call.attention.k.data = call.attention.v.data = nullptr;
  call.attention.pages.block_table = nullptr;
  call.mask.words = nullptr;
  call.context.workspace = {};
  EXPECT_EQ(why_unsupported(call.attention, call.policy, call.mask, call.context), nullptr);
  EXPECT_GT(workspace_bytes(call.attention, call.policy, call.mask, call.context), 0u);
}

TEST(Shapes, ShapesOfMasksFollowTheBlockGrid) {
  Call call;
  call.segments = {
      {0, 100, 0, 200, 0}, {100, 0, 0, 0, 0}, {100, 128, 0, 129, 0}, {228, 9, 5, 0, 0}};
  call.attention.segments = call.segments;
  const BlockMask mask = mask_for(call.attention);
  EXPECT_EQ(mask.num_heads, kQHeads);
  EXPECT_EQ(mask.num_q_blocks, 2 + 0 + 2 + 1);  // [100, 200), [1, 129), an empty state of 9 rows
  EXPECT_EQ(mask.num_kv_blocks, 2);
  EXPECT_EQ(mask.words_per_row(), 2);
  EXPECT_EQ(num_causal_blocks(call.attention), (1 + 2) + (1 + 2) + 0);
  EXPECT_THROW(mask_for(call.attention, 100), Error);
}

TEST(Shapes, CountsCausalBlocksOfEveryLength) {
  Call call;
  for (int64_t kv_len = 1; kv_len <= kTokens; ++kv_len) {
    for (const int64_t q_len : {int64_t{1}, kv_len / 2 + 1, kv_len}) {
      call.segments = {{0, q_len, 0, kv_len, 0}};
      call.attention.segments = call.segments;
      const SegmentShape shape = segment_shape(call.segments[0], 64);
      int64_t expected = 0;
      for (int64_t row = 0; row < shape.num_q_blocks; ++row)
        expected += kv_block_limit(shape, row, true);
      EXPECT_EQ(num_causal_blocks(call.attention, 64), expected) << kv_len << " " << q_len;
    }
  }
}

}  // namespace
}  // namespace crisp
