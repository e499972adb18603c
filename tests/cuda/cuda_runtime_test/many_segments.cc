// many_segments.cc - more sequences, and more heads of sequences, than a launch grid has rows on
// its short axes. Every sequence is compared: the queries repeat, so one truth serves many.
#include <cstring>
#include <vector>

#include "backend.h"
#include "compare.h"
#include "core/half.h"
#include "run.h"
#include "runtime.h"

namespace crisp::test {
namespace {

class ManySegments : public OnBackend {
 protected:
  // The case's segments `repeats` times over, on the same keys; all must give what they give once.
  void expect_repeats(const Case& c, int64_t repeats) const {
    SCOPED_TRACE(::testing::PrintToString(c));
    const Inputs inputs = make_inputs(c);
    const Call call(inputs);
    const OwnedMask one_mask = mask_of(inputs, call.attention);
    const Outcome one = run_attend(inputs, call, one_mask);
    EXPECT_TRUE(matches(one, truth_of(inputs, one_mask)));

    const int64_t tokens = inputs.q.tokens, heads = inputs.q.heads, dim = inputs.q.dim;
    const int64_t chunk = tokens * heads * dim * 2;  // bytes
    DeviceMemory q(chunk * repeats), out(chunk * repeats), lse(tokens * repeats * heads * 4);
    out.fill(0xff);
    lse.fill(0xff);
    std::vector<Segment> segments;
    for (int64_t repeat = 0; repeat < repeats; ++repeat) {
      CHECK_CUDA(cudaMemcpy(q.data() + repeat * chunk, call.attention.q.data,
                            static_cast<size_t>(chunk), cudaMemcpyDeviceToDevice));
      for (Segment segment : inputs.segments) {
        segment.q_start += repeat * tokens;
        segments.push_back(segment);
      }
    }
    Attention many = call.attention;
    many.q.data = q.data();
    many.q.num_tokens *= repeats;
    many.segments = segments;
    OwnedMask mask(many, c.block_size);
    repeat_rows(one_mask.mask, mask.mask, repeats);
    DeviceCopy words(mask.memory());
    BlockMask on_device = mask.mask;
    on_device.words = reinterpret_cast<uint32_t*>(words.data());
    Context context;
    context.device = Device::kCuda;
    DeviceMemory workspace(
        static_cast<int64_t>(workspace_bytes(many, Dense{}, on_device, context)));
    context.workspace = {workspace.data(), workspace.size()};
    attend(many, on_device,
           {out.data(), c.dtype, many.q.num_tokens, heads, dim, heads * dim, dim, 0},
           {reinterpret_cast<float*>(lse.data()), static_cast<size_t>(tokens * repeats * heads)},
           context);
    synchronize(Device::kCuda);
    expect_copies(out, chunk, repeats, 1, one_bytes(one, c.dtype));
    std::vector<std::byte> one_lse(one.lse.size() * 4);
    std::memcpy(one_lse.data(), one.lse.data(), one_lse.size());
    expect_copies(lse, tokens * 4, repeats, heads, one_lse);
  }

 private:
  static void repeat_rows(const BlockMask& one, const BlockMask& many, int64_t repeats) {
    const auto words = static_cast<size_t>(one.num_q_blocks * one.words_per_row());
    for (int64_t head = 0; head < one.num_heads; ++head) {
      for (int64_t repeat = 0; repeat < repeats; ++repeat) {
        std::memcpy(many.words + static_cast<size_t>(head * repeats + repeat) * words,
                    one.words + static_cast<size_t>(head) * words, words * 4);
      }
    }
  }
  static std::vector<std::byte> one_bytes(const Outcome& outcome, DType dtype) {
    std::vector<std::byte> bytes(outcome.out.data.size() * 2);
    for (size_t i = 0; i < outcome.out.data.size(); ++i)
      store(dtype, outcome.out.data[i], bytes.data() + 2 * i);
    return bytes;
  }
  // `memory` is [heads][repeats][chunk bytes]; `one` is [heads][chunk bytes].
  static void expect_copies(const DeviceMemory& memory, int64_t chunk, int64_t repeats,
                            int64_t heads, const std::vector<std::byte>& one) {
    std::vector<std::byte> got(memory.size());
    CHECK_CUDA(cudaMemcpy(got.data(), memory.data(), memory.size(), cudaMemcpyDeviceToHost));
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t repeat = 0; repeat < repeats; ++repeat) {
        ASSERT_EQ(std::memcmp(got.data() + (head * repeats + repeat) * chunk,
                              one.data() + head * chunk, static_cast<size_t>(chunk)),
                  0)
            << "head " << head << " repeat " << repeat;
      }
    }
  }
};

// B2: 70,000 sequences of 16 tokens, one head.
TEST_P(ManySegments, SeventyThousandSequences) {
  expect_repeats(exactly({.head_dim = 64,
                          .segments = std::vector<Lengths>(1000, {16, 16}),
                          .dtype = DType::kBFloat16}),
                 70);
}

// B1: 2,048 sequences of 128 tokens with 32 heads: 65,536 of them, and every value is written.
TEST_P(ManySegments, SixtyFiveThousandHeadRows) {
  expect_repeats(exactly({.num_q_heads = 32,
                          .num_kv_heads = 8,
                          .head_dim = 64,
                          .segments = std::vector<Lengths>(2, {128, 128}),
                          .dtype = DType::kFloat16}),
                 1024);
}

// More segments than one launch carries, of unequal lengths, some of them empty.
TEST_P(ManySegments, UnequalOnes) {
  std::vector<Lengths> segments;
  for (int64_t i = 0; i < 250; ++i) segments.push_back({i % 7 * 30, i % 7 * 30 + i % 3 * 50});
  segments[100] = {40, 0};
  expect_repeats(exactly({.num_q_heads = 2,
                          .head_dim = 128,
                          .segments = segments,
                          .dtype = DType::kBFloat16,
                          .density = 0.7f}),
                 3);
}

CRISP_ON_CUDA(ManySegments);

}  // namespace
}  // namespace crisp::test
