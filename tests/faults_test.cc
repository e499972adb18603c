// faults_test.cc - the faults of faults_suite.h on the CPU, and more sequences than any launch grid
// has rows.
#include <cstring>

#include "faults_suite.h"

namespace crisp::test {
namespace {

CRISP_ON_CPU(Faults);

// B2: more sequences than any launch grid has rows. Queries repeat every 1,000 sequences.
TEST(ManySequences, SeventyThousand) {
  constexpr int64_t kDistinct = 1000, kRepeats = 70, kTokens = 16, kDim = 64;
  const Inputs inputs =
      make_inputs({.head_dim = kDim,
                   .segments = std::vector<Lengths>(kDistinct, {kTokens, kTokens}),
                   .dtype = DType::kBFloat16});
  Call call(inputs);
  const size_t chunk = static_cast<size_t>(kDistinct * kTokens * kDim) * 2;  // bytes
  std::vector<std::byte> q(chunk * kRepeats);
  std::vector<Segment> segments;
  for (int64_t repeat = 0; repeat < kRepeats; ++repeat) {
    std::memcpy(q.data() + static_cast<size_t>(repeat) * chunk, call.attention.q.data, chunk);
    for (Segment segment : inputs.segments) {
      segment.q_start += repeat * kDistinct * kTokens;
      segments.push_back(segment);
    }
  }
  Attention many = call.attention;
  many.q.data = q.data();
  many.q.num_tokens *= kRepeats;
  many.segments = segments;
  OwnedMask mask(many, 128);
  for (int64_t row = 0; row < kDistinct * kRepeats; ++row) mask.set(0, row, 0);
  Guarded out(q.size()), lse(static_cast<size_t>(many.q.num_tokens) * sizeof(float));
  Context context;
  context.num_threads = 2;
  Guarded workspace(workspace_bytes(many, Dense{}, mask.mask, context));
  context.workspace = workspace.bytes();
  Tensor result{out.data(), DType::kBFloat16, many.q.num_tokens, 1, kDim, kDim, kDim};
  attend(many, mask.mask, result, lse.as<float>(), context);
  EXPECT_TRUE(out.intact() && lse.intact() && workspace.intact());

  Outcome first{Values(kDistinct * kTokens, 1, kDim), {}};
  for (size_t i = 0; i < first.out.data.size(); ++i)
    first.out.data[i] = load(DType::kBFloat16, out.data() + 2 * i);
  first.lse.assign(lse.as<float>().begin(), lse.as<float>().begin() + kDistinct * kTokens);
  EXPECT_TRUE(matches(first, truth_of(inputs, mask_of(inputs, call.attention))));
  for (size_t repeat = 1; repeat < kRepeats; ++repeat) {
    ASSERT_EQ(std::memcmp(out.data() + repeat * chunk, out.data(), chunk), 0) << repeat;
    ASSERT_EQ(std::memcmp(lse.data() + repeat * chunk / kDim * 2, lse.data(), chunk / kDim * 2), 0)
        << repeat;
  }
}

}  // namespace
}  // namespace crisp::test
