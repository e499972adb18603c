// large_offsets.cc - tensors past 2^31 elements and 2^32 bytes on the device. They are filled
// there, by numbers that the host can make as well, so that rows can be checked against the
// double-precision reference without the tensors ever leaving the device.
#include <vector>

#include "attend/attend_cuda.h"
#include "backend.h"
#include "compare.h"
#include "core/random_fill.h"
#include "run.h"
#include "runtime.h"

namespace crisp::test {
namespace {

constexpr int64_t kBlock = 128;

// q, k and v of one long sequence, all of seeds of their own.
struct Long {
  Attention attention;
  Tensor out;
  float* lse;
};

// A tensor's rows on the host, of the tokens listed.
Values values_of(const ConstTensor& tensor, uint64_t seed, const std::vector<int64_t>& tokens) {
  Values values(static_cast<int64_t>(tokens.size()), tensor.num_heads, tensor.head_dim);
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (int64_t head = 0; head < tensor.num_heads; ++head) {
      for (int64_t i = 0; i < tensor.head_dim; ++i) {
        const uint64_t index = random_index(tensor.num_heads, tensor.head_dim, tokens[t], head, i);
        values.row(static_cast<int64_t>(t), head)[i] =
            round_to(tensor.dtype, random_value(seed, index));
      }
    }
  }
  return values;
}

Values read_rows(const Tensor& tensor, int64_t begin, int64_t count) {
  Values values(count, tensor.num_heads, tensor.head_dim);
  std::vector<std::byte> row(static_cast<size_t>(tensor.head_dim * 2));
  for (int64_t token = 0; token < count; ++token) {
    for (int64_t head = 0; head < tensor.num_heads; ++head) {
      const int64_t at = (begin + token) * tensor.token_stride + head * tensor.head_stride;
      CHECK_CUDA(cudaMemcpy(row.data(), static_cast<std::byte*>(tensor.data) + at * 2, row.size(),
                            cudaMemcpyDeviceToHost));
      for (int64_t i = 0; i < tensor.head_dim; ++i)
        values.row(token, head)[i] = load(tensor.dtype, row.data() + 2 * i);
    }
  }
  return values;
}

class LargeOffsets : public OnBackend {
 protected:
  static constexpr uint64_t kSeeds[] = {101, 102, 103};

  // The sink, the diagonal block and the `kWindow` - 1 before it.
  static constexpr int64_t kWindow = 4;
  static std::vector<int64_t> kept_blocks(int64_t q_block) {
    std::vector<int64_t> blocks;
    if (q_block >= kWindow) blocks.push_back(0);
    for (int64_t b = std::max<int64_t>(0, q_block - kWindow + 1); b <= q_block; ++b)
      blocks.push_back(b);
    return blocks;
  }

  void fill(const Attention& a) const {
    const ConstTensor* tensors[] = {&a.q, &a.k, &a.v};
    for (size_t i = 0; i < 3; ++i) {
      const ConstTensor& t = *tensors[i];
      fill_random_cuda({const_cast<void*>(t.data), t.dtype, t.num_tokens, t.num_heads, t.head_dim,
                        t.token_stride, t.head_stride, 0},
                       kSeeds[i], nullptr);
    }
    synchronize(Device::kCuda);
  }

  void attend_window(const Long& call) const {
    OwnedMask mask(call.attention, kBlock);
    for (int64_t head = 0; head < mask.mask.num_heads; ++head) {
      for (int64_t row = 0; row < mask.mask.num_q_blocks; ++row) {
        for (const int64_t block : kept_blocks(row)) mask.set(head, row, block);
      }
    }
    DeviceCopy words(mask.memory());
    BlockMask on_device = mask.mask;
    on_device.words = reinterpret_cast<uint32_t*>(words.data());
    const ConstTensor& q = call.attention.q;
    Context context;
    context.device = Device::kCuda;
    DeviceMemory workspace(
        static_cast<int64_t>(workspace_bytes(call.attention, Dense{}, on_device, context)));
    context.workspace = {workspace.data(), workspace.size()};
    force_sm80_for_tests(GetParam() == Backend::kCudaSm80);
    attend(call.attention, on_device, call.out,
           {call.lse, static_cast<size_t>(q.num_heads * q.num_tokens)}, context);
    synchronize(Device::kCuda);
  }

  // Queries of one block against the keys it keeps, moved together: what the long run must give.
  void expect_block(const Long& call, int64_t q_block) const {
    const Attention& a = call.attention;
    const int64_t n = a.q.num_tokens, begin = q_block * kBlock, end = std::min(begin + kBlock, n);
    std::vector<int64_t> queries, keys;
    for (int64_t token = begin; token < end; ++token) queries.push_back(token);
    for (const int64_t block : kept_blocks(q_block)) {
      for (int64_t token = block * kBlock; token < std::min((block + 1) * kBlock, n); ++token)
        keys.push_back(token);
    }
    Inputs near;
    near.config = exactly({.num_q_heads = a.q.num_heads,
                           .num_kv_heads = a.k.num_heads,
                           .head_dim = a.q.head_dim,
                           .dtype = a.q.dtype});
    const auto q_len = static_cast<int64_t>(queries.size()),
               kv_len = static_cast<int64_t>(keys.size());
    near.config.segments = {{q_len, kv_len}};
    near.segments = {{0, q_len, 0, kv_len, 0}};
    near.q = values_of(a.q, kSeeds[0], queries);
    near.k = values_of(a.k, kSeeds[1], keys);
    near.v = values_of(a.v, kSeeds[2], keys);
    near.softmax_scale = a.softmax_scale;
    const Call near_call(near);
    const OwnedMask all = mask_of(near, near_call.attention);
    Outcome outcome{read_rows(call.out, begin, q_len), {}};
    for (int64_t head = 0; head < a.q.num_heads; ++head) {
      std::vector<float> lse(static_cast<size_t>(q_len));
      CHECK_CUDA(cudaMemcpy(lse.data(), call.lse + head * n + begin, lse.size() * 4,
                            cudaMemcpyDeviceToHost));
      outcome.lse.insert(outcome.lse.end(), lse.begin(), lse.end());
    }
    const Outcome alone = run_attend(near, near_call, all);
    EXPECT_TRUE(same_bits(outcome, alone)) << "block " << q_block;
    EXPECT_TRUE(matches(outcome, truth_of(near, all))) << "block " << q_block;
  }
};

// A6: q, k, v and out pass 2^31 elements and 2^32 bytes; 17 GB.
TEST_P(LargeOffsets, FiveHundredThousandTokensOfThirtyTwoHeads) {
  constexpr int64_t kTokens = 524416, kHeads = 32, kDim = 128, kToken = kHeads * kDim;
  constexpr int64_t kBytes = kTokens * kToken * 2;
  NEEDS_DEVICE_MEMORY(4 * kBytes + (int64_t{1} << 30));
  DeviceMemory q(kBytes), k(kBytes), v(kBytes), out(kBytes), lse(kTokens * kHeads * 4);
  out.fill(0xff);
  lse.fill(0xff);
  Long call;
  const auto tensor = [&](const DeviceMemory& memory) {
    return ConstTensor{memory.data(), DType::kBFloat16, kTokens, kHeads, kDim, kToken, kDim, 0};
  };
  call.attention.q = tensor(q);
  call.attention.k = tensor(k);
  call.attention.v = tensor(v);
  call.attention.softmax_scale = 0.08838835f;
  call.out = {out.data(), DType::kBFloat16, kTokens, kHeads, kDim, kToken, kDim, 0};
  call.lse = reinterpret_cast<float*>(lse.data());
  fill(call.attention);
  attend_window(call);
  // The last 256 rows, both sides of 2^31 elements (token 524,288), of 2^31 bytes, and a few more.
  for (const int64_t block : {0, 3, 4, 1000, 2047, 2048, 3000, 4095, 4096})
    expect_block(call, block);
}

// 1M tokens of one head, 4,096 elements apart; q, k, v and out are slices of one buffer of 8.6 GB.
TEST_P(LargeOffsets, AMillionTokensFarApart) {
  constexpr int64_t kTokens = int64_t{1} << 20, kStride = 4096, kDim = 128;
  NEEDS_DEVICE_MEMORY(kTokens * kStride * 2 + (int64_t{1} << 30));
  DeviceMemory packed(kTokens * kStride * 2), lse(kTokens * 4);
  packed.fill(0xff);
  lse.fill(0xff);
  const auto slice = [&](int64_t first) { return packed.data() + first * 2; };
  const auto tensor = [&](int64_t first) {
    return ConstTensor{slice(first), DType::kBFloat16, kTokens, 1, kDim, kStride, kDim, 0};
  };
  Long call;
  call.attention.q = tensor(0);
  call.attention.k = tensor(1024);
  call.attention.v = tensor(2048);
  call.attention.softmax_scale = 0.08838835f;
  call.out = {slice(3072), DType::kBFloat16, kTokens, 1, kDim, kStride, kDim, 0};
  call.lse = reinterpret_cast<float*>(lse.data());
  fill(call.attention);
  attend_window(call);
  for (const int64_t block : {0, 5, 2047, 2048, 4095, 4096, 6000, 8190, 8191})
    expect_block(call, block);
}

// A5: a pool of 65,544 pages of 16 tokens, 8 kv heads, of which the last 8 are used; the same keys
// in a pool of their own give the same bits.
TEST_P(LargeOffsets, LastPagesOfABigPool) {
  constexpr int64_t kPages = 65544, kPage = 16, kUsed = 8, kToken = 8 * 128, kLen = kUsed * kPage;
  constexpr int64_t kBytes = kPages * kPage * kToken * 2;
  NEEDS_DEVICE_MEMORY(2 * kBytes + (int64_t{1} << 28));
  const Inputs inputs = make_inputs(exactly({.num_q_heads = 16,
                                             .num_kv_heads = 8,
                                             .head_dim = 128,
                                             .segments = {{30, kLen}},
                                             .dtype = DType::kBFloat16}));
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  const Outcome expected = run_attend(inputs, call, mask);
  EXPECT_TRUE(matches(expected, truth_of(inputs, mask)));

  DeviceMemory k(kBytes), v(kBytes), table(kUsed * 4), words(mask.mask.bytes());
  DeviceMemory out(30 * 16 * 128 * 2), lse(30 * 16 * 4);
  std::vector<int32_t> pages;
  for (int32_t page = kPages - kUsed; page < kPages; ++page) pages.push_back(page);
  k.fill(0xff);
  v.fill(0xff);
  const auto copy = [](void* to, const void* from, int64_t bytes) {
    CHECK_CUDA(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault));
  };
  copy(k.data() + (kPages - kUsed) * kPage * kToken * 2, call.attention.k.data, kLen * kToken * 2);
  copy(v.data() + (kPages - kUsed) * kPage * kToken * 2, call.attention.v.data, kLen * kToken * 2);
  copy(table.data(), pages.data(), kUsed * 4);
  copy(words.data(), mask.mask.words, mask.mask.bytes());
  const Segment segment{0, 30, 0, kLen, 0};
  Attention paged = call.attention;
  paged.k = {k.data(), DType::kBFloat16, kPages * kPage, 8, 128, kToken, 128, kPage * kToken};
  paged.v = paged.k;
  paged.v.data = v.data();
  paged.segments = {&segment, 1};
  paged.pages = {reinterpret_cast<const int32_t*>(table.data()), 1, kUsed, kPage};
  BlockMask on_device = mask.mask;
  on_device.words = reinterpret_cast<uint32_t*>(words.data());
  Context context;
  context.device = Device::kCuda;
  DeviceMemory workspace(static_cast<int64_t>(workspace_bytes(paged, Dense{}, on_device, context)));
  context.workspace = {workspace.data(), workspace.size()};
  const Tensor to{out.data(), DType::kBFloat16, 30, 16, 128, 16 * 128, 128, 0};
  attend(paged, on_device, to, {reinterpret_cast<float*>(lse.data()), 30 * 16}, context);
  synchronize(Device::kCuda);
  Outcome outcome{read_rows(to, 0, 30), std::vector<float>(30 * 16)};
  copy(outcome.lse.data(), lse.data(), 30 * 16 * 4);
  EXPECT_TRUE(same_bits(outcome, expected));
}

CRISP_ON_CUDA(LargeOffsets);

}  // namespace
}  // namespace crisp::test
