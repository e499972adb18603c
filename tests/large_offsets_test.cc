// large_offsets_test.cc - every product of index and stride is 64 bits wide. Tensors of more than
// 2^31 elements and 2^32 bytes are reserved without memory behind them; only the rows that are read
// or written become real. A truncated offset faults or gives other bits.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "compare.h"
#include "run.h"
#include "structured.h"

namespace crisp::test {
namespace {

// A zero-filled reservation. Alone in its test, so that nothing lies near it by design.
class Sparse {
 public:
  explicit Sparse(int64_t bytes)
      : size_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, size_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t size_;
  void* data_;
};

#define NEEDS_RESERVATION(sparse) \
  if (!(sparse).ok())             \
  GTEST_SKIP() << "the system reserves no address space without memory behind it"

void copy_rows(const Values& from, DType dtype, std::byte* to, int64_t token_stride,
               int64_t head_stride, int64_t first_token = 0) {
  for (int64_t token = 0; token < from.tokens; ++token) {
    for (int64_t head = 0; head < from.heads; ++head) {
      std::byte* row =
          to + ((first_token + token) * token_stride + head * head_stride) * element_bytes(dtype);
      for (int64_t i = 0; i < from.dim; ++i)
        store(dtype, from.row(token, head)[i], row + i * element_bytes(dtype));
    }
  }
}

Values read_rows(const Values& shape, DType dtype, const std::byte* from, int64_t token_stride,
                 int64_t head_stride, int64_t first_token = 0) {
  Values values(shape.tokens, shape.heads, shape.dim);
  for (int64_t token = 0; token < shape.tokens; ++token) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      const std::byte* row =
          from + ((first_token + token) * token_stride + head * head_stride) * element_bytes(dtype);
      for (int64_t i = 0; i < shape.dim; ++i)
        values.row(token, head)[i] = load(dtype, row + i * element_bytes(dtype));
    }
  }
  return values;
}

struct Expectation {
  Inputs inputs;
  OwnedMask mask;
  Outcome outcome;
  explicit Expectation(const Case& c)
      : inputs(make_inputs(c)),
        mask(mask_of(inputs, Call(inputs).attention)),
        outcome(run_attend(inputs, mask)) {
    EXPECT_TRUE(matches(outcome, truth_of(inputs, mask)));
  }
};

void attend_into(const Attention& attention, const OwnedMask& mask, const Tensor& out,
                 std::span<float> lse) {
  Context context;
  context.num_threads = 2;
  Guarded workspace(workspace_bytes(attention, Dense{}, mask.mask, context));
  context.workspace = workspace.bytes();
  attend(attention, mask.mask, out, lse, context);
  EXPECT_TRUE(workspace.intact());
}

// The last rows lie past 2^32 bytes and 2^31 elements from the first, in q, k, v and out.
void expect_same_with_stride(DType dtype, int64_t token_stride, int64_t head_stride) {
  const Expectation expected({.num_q_heads = 2,
                              .num_kv_heads = 2,
                              .head_dim = 32,
                              .segments = {{150, 310}},
                              .dtype = dtype,
                              .density = 0.8f});
  const Inputs& inputs = expected.inputs;
  const int64_t reach = 310 * token_stride + 2 * head_stride;
  ASSERT_GT(reach, int64_t{1} << 31);
  Sparse q(reach * element_bytes(dtype)), k(reach * element_bytes(dtype)),
      v(reach * element_bytes(dtype)), out(reach * element_bytes(dtype));
  for (const Sparse* sparse : {&q, &k, &v, &out}) NEEDS_RESERVATION(*sparse);
  copy_rows(inputs.q, dtype, q.data(), token_stride, head_stride);
  copy_rows(inputs.k, dtype, k.data(), token_stride, head_stride);
  copy_rows(inputs.v, dtype, v.data(), token_stride, head_stride);
  Attention attention;
  attention.q = {q.data(), dtype, 150, 2, 32, token_stride, head_stride};
  attention.k = {k.data(), dtype, 310, 2, 32, token_stride, head_stride};
  attention.v = {v.data(), dtype, 310, 2, 32, token_stride, head_stride};
  attention.softmax_scale = inputs.softmax_scale;
  std::vector<float> lse(300);
  attend_into(attention, expected.mask, {out.data(), dtype, 150, 2, 32, token_stride, head_stride},
              lse);
  EXPECT_TRUE(same_bits({read_rows(inputs.q, dtype, out.data(), token_stride, head_stride), lse},
                        expected.outcome));
}

TEST(LargeOffsets, TokenStride) {
  expect_same_with_stride(DType::kFloat32, (int64_t{1} << 24) + 8, 32);
  expect_same_with_stride(DType::kBFloat16, (int64_t{1} << 24) + 1, 32);
  expect_same_with_stride(DType::kFloat16, (int64_t{1} << 24) + 3, 40);
}

TEST(LargeOffsets, HeadStride) {
  expect_same_with_stride(DType::kFloat32, 32, (int64_t{1} << 31) + 40);
  expect_same_with_stride(DType::kBFloat16, 33, (int64_t{1} << 32) + 7);
}

// A1: packed [131072, 3, 48, 128]: the last row starts at element 2.4e9. A6: the segment lies just
// past 2^31 elements.
TEST(LargeOffsets, SegmentAtTheEndOfAPackedBuffer) {
  constexpr int64_t kTokens = 131072, kRow = 3 * 48 * 128, kLen = 200;
  const Expectation expected({.num_q_heads = 2,
                              .num_kv_heads = 2,
                              .head_dim = 128,
                              .segments = {{kLen, kLen}},
                              .dtype = DType::kBFloat16});
  Sparse packed(kTokens * kRow * 2), out(kTokens * 2 * 128 * 2);
  NEEDS_RESERVATION(packed);
  NEEDS_RESERVATION(out);
  const int64_t edge = (int64_t{1} << 31) / kRow;  // token whose row holds element 2^31
  for (const int64_t start : {kTokens - kLen, edge - kLen, edge - 3, edge, edge + 1}) {
    const Values* values[] = {&expected.inputs.q, &expected.inputs.k, &expected.inputs.v};
    ConstTensor tensors[3];
    for (int64_t i = 0; i < 3; ++i) {
      std::byte* slice = packed.data() + (i * 48 + 46) * 128 * 2;  // the last two of 48 heads
      copy_rows(*values[i], DType::kBFloat16, slice, kRow, 128, start);
      tensors[i] = {slice, DType::kBFloat16, kTokens, 2, 128, kRow, 128};
    }
    const Segment segment{start, kLen, start, kLen, 0};
    Attention attention{tensors[0], tensors[1],    tensors[2], expected.inputs.softmax_scale,
                        true,       {&segment, 1}, {}};
    std::vector<float> lse(2 * kTokens);
    attend_into(attention, expected.mask, {out.data(), DType::kBFloat16, kTokens, 2, 128, 256, 128},
                lse);
    std::vector<float> rows(lse.begin() + start, lse.begin() + start + kLen);
    rows.insert(rows.end(), lse.begin() + kTokens + start, lse.begin() + kTokens + start + kLen);
    EXPECT_TRUE(same_bits(
        {read_rows(expected.inputs.q, DType::kBFloat16, out.data(), 256, 128, start), rows},
        expected.outcome))
        << start;
  }
}

// A5: a pool of 65,544 pages of 16 tokens, 8 kv heads, D = 128, of which the last 8 are used.
TEST(LargeOffsets, LastPagesOfABigPool) {
  constexpr int64_t kPages = 65544, kPage = 16, kToken = 8 * 128, kLen = 8 * kPage;
  const Expectation expected({.num_q_heads = 16,
                              .num_kv_heads = 8,
                              .head_dim = 128,
                              .segments = {{30, kLen}},
                              .dtype = DType::kBFloat16});
  Sparse k(kPages * kPage * kToken * 2), v(kPages * kPage * kToken * 2);
  NEEDS_RESERVATION(k);
  NEEDS_RESERVATION(v);
  copy_rows(expected.inputs.k, DType::kBFloat16, k.data(), kToken, 128, (kPages - 8) * kPage);
  copy_rows(expected.inputs.v, DType::kBFloat16, v.data(), kToken, 128, (kPages - 8) * kPage);
  std::vector<int32_t> table;
  for (int32_t page = kPages - 8; page < kPages; ++page) table.push_back(page);
  Call call(expected.inputs);
  const Segment segment{0, 30, 0, kLen, 0};
  Attention attention = call.attention;
  attention.k = {k.data(), DType::kBFloat16, kPages * kPage, 8, 128, kToken, 128, kPage * kToken};
  attention.v = attention.k;
  attention.v.data = v.data();
  attention.segments = {&segment, 1};
  attention.pages = {table.data(), 1, 8, kPage};
  Guarded out(30 * 16 * 128 * 2);
  std::vector<float> lse(16 * 30);
  attend_into(attention, expected.mask, {out.data(), DType::kBFloat16, 30, 16, 128, 16 * 128, 128},
              lse);
  EXPECT_TRUE(
      same_bits({read_rows(expected.inputs.q, DType::kBFloat16, out.data(), 16 * 128, 128), lse},
                expected.outcome));
}

// Token numbers and lse offsets past 2^31.
TEST(LargeOffsets, RowsPastTwoToThe31) {
  constexpr int64_t kTokens = (int64_t{1} << 31) + 1000, kStart = kTokens - 300;
  const Expectation expected({.num_q_heads = 2, .head_dim = 8, .segments = {{150, 200}}});
  Sparse q(kTokens * 16 * 4), k(kTokens * 8 * 4), v(kTokens * 8 * 4), out(kTokens * 16 * 4),
      lse(kTokens * 2 * 4);
  for (const Sparse* sparse : {&q, &k, &v, &out, &lse}) NEEDS_RESERVATION(*sparse);
  copy_rows(expected.inputs.q, DType::kFloat32, q.data(), 16, 8, kStart);
  copy_rows(expected.inputs.k, DType::kFloat32, k.data(), 8, 8, kStart);
  copy_rows(expected.inputs.v, DType::kFloat32, v.data(), 8, 8, kStart);
  const Segment segment{kStart, 150, kStart, 200, 0};
  Attention attention;
  attention.q = {q.data(), DType::kFloat32, kTokens, 2, 8, 16, 8};
  attention.k = {k.data(), DType::kFloat32, kTokens, 1, 8, 8, 8};
  attention.v = {v.data(), DType::kFloat32, kTokens, 1, 8, 8, 8};
  attention.softmax_scale = expected.inputs.softmax_scale;
  attention.segments = {&segment, 1};
  float* const all = reinterpret_cast<float*>(lse.data());
  attend_into(attention, expected.mask, {out.data(), DType::kFloat32, kTokens, 2, 8, 16, 8},
              {all, static_cast<size_t>(2 * kTokens)});
  std::vector<float> rows(all + kStart, all + kStart + 150);
  rows.insert(rows.end(), all + kTokens + kStart, all + kTokens + kStart + 150);
  EXPECT_TRUE(
      same_bits({read_rows(expected.inputs.q, DType::kFloat32, out.data(), 16, 8, kStart), rows},
                expected.outcome));
}

// One sequence of 2^31 - 1 keys, of which the mask keeps a few blocks at both ends.
TEST(LargeOffsets, LongestSequence) {
  constexpr int64_t kLen = (int64_t{1} << 31) - 1, kBlocks = (kLen + 127) / 128;
  const Inputs inputs =
      make_inputs({.head_dim = 8, .segments = {{100, 255}}});  // blocks 0 and last
  Sparse k(kLen * 8 * 4), v(kLen * 8 * 4);
  NEEDS_RESERVATION(k);
  NEEDS_RESERVATION(v);
  for (const auto& [values, to] : {std::pair{&inputs.k, &k}, {&inputs.v, &v}}) {
    std::memcpy(to->data(), values->data.data(), 128 * 8 * 4);
    std::memcpy(to->data() + (kLen - 127) * 8 * 4, values->data.data() + 128 * 8, 127 * 8 * 4);
  }
  Attention attention = Call(inputs).attention;
  attention.q.data = inputs.q.data.data();
  attention.k = {k.data(), DType::kFloat32, kLen, 1, 8, 8, 8};
  attention.v = {v.data(), DType::kFloat32, kLen, 1, 8, 8, 8};
  OwnedMask mask(attention, 128);
  ASSERT_EQ(mask.mask.num_kv_blocks, kBlocks);
  for (const int64_t block : {int64_t{0}, kBlocks - 1}) mask.set(0, 0, block);
  Outcome outcome{Values(100, 1, 8), std::vector<float>(100)};
  attend_into(attention, mask, {outcome.out.data.data(), DType::kFloat32, 100, 1, 8, 8, 8},
              outcome.lse);
  EXPECT_TRUE(matches(outcome, truth_of(inputs, mask_of(inputs, Call(inputs).attention))));
}

// A6: 32 kv heads of 128 pass 2^31 elements between 524,288 and 524,289 keys. A chunk of the last
// 256 queries sees the sink and a window; the same keys without the gap give the same bits.
TEST(LargeOffsets, BothSidesOfTwoToThe31Elements) {
  constexpr int64_t kHeads = 32, kDim = 128, kToken = kHeads * kDim, kWindow = 4, kShort = 1024;
  for (const int64_t n : {int64_t{524288}, int64_t{524289}}) {
    const int64_t gap = (n - 1) / 128 * 128 - (kShort - 128);  // a multiple of the block
    const Inputs inputs = make_inputs({.num_q_heads = kHeads,
                                       .num_kv_heads = kHeads,
                                       .head_dim = kDim,
                                       .segments = {{256, n - gap}},
                                       .dtype = DType::kBFloat16});
    Sparse k(n * kToken * 2), v(n * kToken * 2);
    NEEDS_RESERVATION(k);
    NEEDS_RESERVATION(v);
    Call call(inputs);
    Attention attention = call.attention;
    attention.k = {k.data(), DType::kBFloat16, n, kHeads, kDim, kToken, kDim};
    attention.v = attention.k;
    attention.v.data = v.data();
    const auto place = [&](const Values& values, std::byte* to) {
      copy_rows(values, DType::kBFloat16, to + gap * kToken * 2, kToken, kDim);
      std::memmove(to, to + gap * kToken * 2, 128 * kToken * 2);  // the sink
    };
    place(inputs.k, k.data());
    place(inputs.v, v.data());
    OwnedMask near(call.attention, 128), far(attention, 128);
    const MaskRows rows = mask_rows(inputs, 128)[0];
    ASSERT_EQ(near.mask.num_q_blocks, far.mask.num_q_blocks);
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t row = 0; row < near.mask.num_q_blocks; ++row) {
        near.set(head, row, 0), far.set(head, row, 0);
        for (int64_t back = 0; back < kWindow; ++back) {
          near.set(head, row, rows.first_q_block + row - back);
          far.set(head, row, rows.first_q_block + row - back + gap / 128);
        }
      }
    }
    Guarded out(256 * kToken * 2);
    std::vector<float> lse(256 * kHeads);
    attend_into(attention, far, {out.data(), DType::kBFloat16, 256, kHeads, kDim, kToken, kDim},
                lse);
    EXPECT_TRUE(same_bits({read_rows(inputs.q, DType::kBFloat16, out.data(), kToken, kDim), lse},
                          run_attend(inputs, near)))
        << n;
  }
}

// ---- Selection reads q and k with the same strides and pages.

OwnedMask select_from(const Attention& attention, const Policy& policy) {
  OwnedMask mask(attention, 128);
  Context context;
  context.num_threads = 2;
  Guarded workspace(workspace_bytes(attention, policy, mask.mask, context));
  context.workspace = workspace.bytes();
  select_blocks(attention, policy, mask.mask, context);
  EXPECT_TRUE(workspace.intact());
  return mask;
}

TEST(LargeOffsets, SelectionWithLargeStrides) {
  constexpr int64_t kLen = 1500, kStride = (int64_t{1} << 22) + 3;
  const DType dtype = DType::kBFloat16;
  const Inputs inputs = structured_inputs(
      {.num_q_heads = 3, .head_dim = 32, .segments = {{kLen, kLen}}, .dtype = dtype});
  Sparse q(kLen * kStride * 2), k(kLen * kStride * 2);
  NEEDS_RESERVATION(q);
  NEEDS_RESERVATION(k);
  copy_rows(inputs.q, dtype, q.data(), kStride, 40);
  copy_rows(inputs.k, dtype, k.data(), kStride, 40);
  const Call call(inputs);
  Attention attention = call.attention;
  attention.q = {q.data(), dtype, kLen, 3, 32, kStride, 40};
  attention.k = {k.data(), dtype, kLen, 1, 32, kStride, 40};
  for (const Policy& policy : {Policy(Crisp{}), Policy(FlexPrefill{})}) {
    EXPECT_TRUE(select_from(attention, policy) == select_from(call.attention, policy));
  }
}

TEST(LargeOffsets, SelectionFromTheLastPages) {
  constexpr int64_t kPages = 65600, kPage = 16, kToken = 8 * 128, kUsed = 100, kLen = kUsed * kPage;
  const DType dtype = DType::kBFloat16;
  const Inputs inputs = structured_inputs({.num_q_heads = 16,
                                           .num_kv_heads = 8,
                                           .head_dim = 128,
                                           .segments = {{200, kLen}},
                                           .dtype = dtype});
  Sparse k(kPages * kPage * kToken * 2);
  NEEDS_RESERVATION(k);
  copy_rows(inputs.k, dtype, k.data(), kToken, 128, (kPages - kUsed) * kPage);
  std::vector<int32_t> table;
  for (int32_t page = kPages - kUsed; page < kPages; ++page) table.push_back(page);
  const Call call(inputs);
  const Segment segment{0, 200, 0, kLen, 0};
  Attention attention = call.attention;
  attention.k = {k.data(), dtype, kPages * kPage, 8, 128, kToken, 128, kPage * kToken};
  attention.v = attention.k;
  attention.segments = {&segment, 1};
  attention.pages = {table.data(), 1, kUsed, kPage};
  EXPECT_TRUE(select_from(attention, Crisp{}) == select_from(call.attention, Crisp{}));
}

}  // namespace
}  // namespace crisp::test
