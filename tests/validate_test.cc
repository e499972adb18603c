// Everything a public function refuses: named, with value and expectation, and nothing written.
#include "core/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "crisp/crisp.h"

namespace crisp {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kTokens = 300, kQHeads = 4, kKvHeads = 2, kHeadDim = 16;

// A call that is accepted, with memory of its own; each case spoils one thing.
struct Call {
  std::vector<float> q = std::vector<float>(kTokens * kQHeads * kHeadDim, 0.5f);
  std::vector<float> k = std::vector<float>(kTokens * kKvHeads * kHeadDim, 0.25f);
  std::vector<float> v = std::vector<float>(kTokens * kKvHeads * kHeadDim, 1.f);
  std::vector<float> out_values = std::vector<float>(q.size(), -7.f);
  std::vector<float> lse_values = std::vector<float>(kTokens * kQHeads, -7.f);
  std::vector<uint64_t> mask_words, user_words;
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

  void use_segments(std::vector<Segment> list) {
    segments = std::move(list);
    attention.segments = segments;
    report = {};
    mask.num_q_blocks = 0;  // never reached: the segments are refused first
  }
  void use_pages(int64_t page_size) {
    for (int32_t page = 0; page < kTokens / page_size; ++page) table.push_back(page);
    attention.pages = {table.data(), 1, static_cast<int64_t>(table.size()), page_size};
    attention.k.page_stride = attention.v.page_stride = page_size * kKvHeads * kHeadDim;
  }
  void use_user_mask() {
    user_words.assign(mask_words.size(), ~uint64_t{0});
    UserMask user{mask};
    user.mask.words = reinterpret_cast<uint32_t*>(user_words.data());
    policy = user;
  }
  BlockMask& user_mask() { return std::get<UserMask>(policy).mask; }
  bool untouched() const {
    const auto is_seven = [](float value) { return value == -7.f; };
    return std::all_of(out_values.begin(), out_values.end(), is_seven) &&
           std::all_of(lse_values.begin(), lse_values.end(), is_seven) &&
           std::all_of(mask_words.begin(), mask_words.end(),
                       [](uint64_t word) { return word == 0xabababababababab; }) &&
           std::all_of(memory.begin(), memory.end(),
                       [](std::byte byte) { return byte == std::byte{0x5a}; });
  }
};

struct Case {
  const char* name;
  std::function<void(Call&)> spoil;
  const char* message;   // a part of it
  bool by_shape = true;  // false: only a look at pointers can tell
};

std::string refusal(Call& call) {
  try {
    prefill(call.attention, call.policy, call.mask, call.out, call.lse, call.context, call.report);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

void expect_refused(const Case& test) {
  SCOPED_TRACE(test.name);
  Call call;
  test.spoil(call);
  EXPECT_NE(refusal(call).find(test.message), std::string::npos) << refusal(call);
  EXPECT_TRUE(call.untouched());
  const char* why = why_unsupported(call.attention, call.policy, call.mask, call.context);
  if (test.by_shape) {
    ASSERT_NE(why, nullptr);
    EXPECT_NE(std::string(why).find(test.message), std::string::npos) << why;
  } else {
    EXPECT_EQ(why, nullptr) << why;
  }
}

void expect_all_refused(const std::vector<Case>& cases) {
  for (const Case& test : cases) expect_refused(test);
}

TEST(Validate, AcceptsTheCallThatTheCasesSpoil) {
  Call call;
  EXPECT_EQ(why_unsupported(call.attention, call.policy, call.mask, call.context), nullptr);
  EXPECT_EQ(refusal(call), "accepted");
  EXPECT_FALSE(call.untouched());
}

TEST(Validate, RefusesTensors) {
  expect_all_refused({
      {"dtype", [](Call& c) { c.attention.q.dtype = DType(9); }, "q.dtype is 9, must be float32"},
      {"k dtype", [](Call& c) { c.attention.k.dtype = DType::kBFloat16; },
       "k.dtype is bfloat16, must equal q.dtype, which is float32"},
      {"v dtype", [](Call& c) { c.attention.v.dtype = DType::kFloat16; }, "v.dtype is float16"},
      {"no tokens", [](Call& c) { c.attention.q.num_tokens = -1; }, "q.num_tokens is -1"},
      {"no heads", [](Call& c) { c.attention.k.num_heads = 0; }, "k.num_heads is 0"},
      {"group", [](Call& c) { c.attention.q.num_heads = 3; },
       "q.num_heads is 3, must be a multiple of k.num_heads, which is 2"},
      {"v heads", [](Call& c) { c.attention.v.num_heads = 1; }, "v.num_heads is 1, must equal k"},
      {"v tokens", [](Call& c) { c.attention.v.num_tokens = 8; }, "v.num_tokens is 8"},
      {"head_dim 0", [](Call& c) { c.attention.q.head_dim = 0; }, "q.head_dim is 0"},
      {"head_dim 12", [](Call& c) { c.attention.q.head_dim = 12; },
       "q.head_dim is 12, must be a multiple of 8 in [8, 512]"},
      {"head_dim 520", [](Call& c) { c.attention.q.head_dim = 520; }, "q.head_dim is 520"},
      {"k head_dim", [](Call& c) { c.attention.k.head_dim = 8; }, "k.head_dim is 8, must equal q"},
      {"v head_dim", [](Call& c) { c.attention.v.head_dim = 8; }, "v.head_dim is 8, must equal q"},
      {"stride", [](Call& c) { c.attention.q.token_stride = -64; }, "q.token_stride is -64"},
      {"head stride", [](Call& c) { c.attention.v.head_stride = -1; }, "v.head_stride is -1"},
      {"far", [](Call& c) { c.attention.k.token_stride = INT64_MAX / 8; }, "reaches past 2^63"},
  });
}

TEST(Validate, RefusesScaleAndContext) {
  expect_all_refused({
      {"scale unset", [](Call& c) { c.attention.softmax_scale = 0; }, "softmax_scale is 0, must"},
      {"scale < 0", [](Call& c) { c.attention.softmax_scale = -1; }, "softmax_scale is -1"},
      {"scale nan", [](Call& c) { c.attention.softmax_scale = kNaN; }, "softmax_scale is nan"},
      {"cuda", [](Call& c) { c.context.device = Device::kCuda; }, "no CUDA backend"},
      {"device", [](Call& c) { c.context.device = Device(7); }, "context.device is 7"},
      {"threads", [](Call& c) { c.context.num_threads = -1; }, "context.num_threads is -1"},
      {"threads", [](Call& c) { c.context.num_threads = 1025; }, "must be in [0, 1024]"},
  });
}

TEST(Validate, RefusesSegments) {
  const auto one = [](Segment segment) {
    return [segment](Call& call) { call.use_segments({segment}); };
  };
  expect_all_refused({
      {"q range", one({1, kTokens, 0, kTokens, 0}), "segments[0].q_start 1 with q_len 300"},
      {"q start", one({-1, 5, 0, 5, 0}), "segments[0].q_start -1"},
      {"q start far", one({INT64_MAX, 5, 0, 5, 0}), "segments[0].q_start 9223372036854775807"},
      {"q len", one({0, -5, 0, 5, 0}), "segments[0].q_len is -5"},
      {"kv range", one({0, 5, 290, 11, 0}), "segments[0].kv_start 290 with kv_len 11"},
      {"kv len", one({0, 5, 0, INT64_MAX, 0}), "segments[0].kv_len is 9223372036854775807"},
      {"short kv", one({0, 6, 0, 5, 0}), "segments[0].kv_len is 5, must be 0 or >= q_len"},
      {"overlap",
       [](Call& c) {
         c.use_segments({{0, 20, 0, 20, 0}, {19, 5, 0, 5, 0}});
       },
       "segments[1].q_start is 19, must be >= 20"},
      {"order",
       [](Call& c) {
         c.use_segments({{20, 5, 0, 5, 0}, {0, 20, 0, 20, 0}});
       },
       "segments[1].q_start is 0, must be >= 25"},
  });
}

TEST(Validate, RefusesPages) {
  const auto paged = [](std::function<void(Call&)> spoil) {
    return [spoil](Call& call) {
      call.use_pages(20);
      spoil(call);
    };
  };
  expect_all_refused({
      {"page size", paged([](Call& c) { c.attention.pages.page_size = -1; }), "page_size is -1"},
      {"whole pages", paged([](Call& c) { c.attention.pages.page_size = 16; }),
       "k.num_tokens is 300, must be a multiple of pages.page_size, which is 16"},
      {"rows", paged([](Call& c) { c.attention.pages.num_rows = 0; }), "pages.num_rows is 0"},
      {"row", paged([](Call& c) {
         c.use_segments({{0, 4, 0, 4, 1}});
       }),
       "segments[0].page_row is 1, must be in [0, pages.num_rows), which is [0, 1)"},
      {"row stride", paged([](Call& c) { c.attention.pages.row_stride = 14; }),
       "segments[0] needs 15 pages"},
      {"page stride", paged([](Call& c) { c.attention.v.page_stride = -1; }),
       "v.page_stride is -1"},
      {"null table", paged([](Call& c) { c.attention.pages.block_table = nullptr; }),
       "pages.block_table is null", false},
      {"page id", paged([](Call& c) { c.table[3] = 15; }),
       "pages.block_table[0][3] is 15, must be in [0, k.num_tokens / page_size), which is [0, 15)",
       false},
      {"page id", paged([](Call& c) { c.table[14] = -1; }), "block_table[0][14] is -1", false},
  });
}

TEST(Validate, RefusesMasks) {
  expect_all_refused({
      {"block size", [](Call& c) { c.mask.block_size = 32; }, "mask.block_size is 32, must be 64"},
      {"64", [](Call& c) { c.mask = mask_for(c.attention, 64); },
       "mask.block_size is 64, must be 128 for the Crisp policy"},
      {"heads", [](Call& c) { c.mask.num_heads = 2; }, "mask.num_heads is 2, must be 4"},
      {"rows", [](Call& c) { c.mask.num_q_blocks = 4; }, "mask.num_q_blocks is 4, must be 3"},
      {"columns", [](Call& c) { c.mask.num_kv_blocks = 2; }, "mask.num_kv_blocks is 2, must be 3"},
      {"null", [](Call& c) { c.mask.words = nullptr; }, "mask.words is null", false},
      {"aligned", [](Call& c) { c.mask.words += 1; }, "must be aligned to 8 bytes", false},
      {"user shape", [](Call& c) { c.use_user_mask(), c.user_mask().num_heads = 1; },
       "policy.mask.num_heads is 1, must be 4"},
      {"user block", [](Call& c) { c.use_user_mask(), c.user_mask() = mask_for(c.attention, 64); },
       "policy.mask.block_size is 64, must equal mask.block_size"},
      {"user null", [](Call& c) { c.use_user_mask(), c.user_mask().words = nullptr; },
       "policy.mask.words is null", false},
      {"user alias", [](Call& c) { c.use_user_mask(), c.user_mask().words = c.mask.words; },
       "mask.words overlaps policy.mask.words", false},
  });
}

template <class P, class Field>
Case spoiled(const char* name, Field P::*field, Field value, const char* message) {
  return {name,
          [=](Call& call) {
            P policy;
            policy.*field = value;
            call.policy = policy;
          },
          message};
}

TEST(Validate, RefusesPolicies) {
  expect_all_refused({
      {"non-causal", [](Call& c) { c.attention.causal = false; }, "must be true for the Crisp"},
      spoiled("tau", &Crisp::tau_proxy, -0.1f, "policy.tau_proxy is -0.1, must be finite and >= 0"),
      spoiled("tau nan", &Crisp::tau_proxy, kNaN, "policy.tau_proxy is nan"),
      spoiled("alpha", &Crisp::alpha, 0.f, "policy.alpha is 0, must be finite and > 0"),
      spoiled("alpha", &Crisp::alpha, HUGE_VALF, "policy.alpha is inf"),
      spoiled("gamma", &Crisp::gamma, 1.5f, "policy.gamma is 1.5, must be in (0, 1]"),
      spoiled("gamma", &Crisp::gamma, 0.f, "policy.gamma is 0"),
      spoiled("tau_js", &Crisp::tau_js, kNaN, "policy.tau_js is nan"),
      spoiled("sink", &Crisp::sink_tokens, 0, "policy.sink_tokens is 0, must be >= 1"),
      spoiled("recency", &Crisp::recency_tokens, -1, "policy.recency_tokens is -1"),
      spoiled("budget", &Crisp::min_budget_tokens, -1, "policy.min_budget_tokens is -1"),
      spoiled("gate", &Crisp::dense_below_tokens, -1, "policy.dense_below_tokens is -1"),
      spoiled("floor", &Crisp::noise_floor, NoiseFloor(2), "policy.noise_floor is 2"),
      spoiled("routing", &Crisp::routing, Routing(2), "policy.routing is 2"),
      spoiled("selection", &Crisp::selection, Selection(2), "policy.selection is 2"),
      spoiled("flex tau", &FlexPrefill::tau, -1.f, "policy.tau is -1"),
      spoiled("flex gamma", &FlexPrefill::gamma, -1.f, "policy.gamma is -1"),
      spoiled("flex budget", &FlexPrefill::min_budget_tokens, -2, "policy.min_budget_tokens is -2"),
      spoiled("variant", &FlexPrefill::variant, FlexPrefill::Variant(2), "policy.variant is 2"),
  });
}

TEST(Validate, RefusesPointersAndOutputs) {
  const auto shift = [](const void* data, int bytes) {
    return static_cast<const void*>(static_cast<const std::byte*>(data) + bytes);
  };
  expect_all_refused({
      {"q null", [](Call& c) { c.attention.q.data = nullptr; }, "q.data is null", false},
      {"v null", [](Call& c) { c.attention.v.data = nullptr; }, "v.data is null", false},
      {"k aligned", [=](Call& c) { c.attention.k.data = shift(c.k.data(), 2); },
       "must be aligned to 4 bytes", false},
      {"out null", [](Call& c) { c.out.data = nullptr; }, "out.data is null", false},
      {"out dtype", [](Call& c) { c.out.dtype = DType::kBFloat16; }, "out.dtype is bfloat16",
       false},
      {"out shape", [](Call& c) { c.out.num_tokens = 299; },
       "out is [299, 4, 16], must have the shape of q, which is [300, 4, 16]", false},
      {"out rows", [](Call& c) { c.out.token_stride = 63; }, "must keep the rows", false},
      {"out rows", [](Call& c) { c.out.head_stride = 0; }, "must keep the rows", false},
      {"lse", [](Call& c) { c.lse = c.lse.first(5); }, "lse has 5 entries, must be empty", false},
      {"report", [](Call& c) { c.report = c.report.first(3); }, "report has 3 entries", false},
      {"workspace", [](Call& c) { c.context.workspace = c.context.workspace.first(16); },
       "context.workspace has 16 bytes, must have at least", false},
      {"workspace",
       [](Call& c) {
         c.memory.resize(c.memory.size() + 512, std::byte{0x5a});
         const auto address = reinterpret_cast<uintptr_t>(c.memory.data());
         c.context.workspace = {c.memory.data() + (256 - address % 256) % 256 + 8,
                                c.context.workspace.size()};
       },
       "must be aligned to 256 bytes", false},
      {"out on q", [](Call& c) { c.attention.q.data = c.out.data; }, "out.data overlaps q.data",
       false},
      {"lse on out",
       [](Call& c) {
         c.lse = {c.out_values.data(), c.lse.size()};
       },
       "out.data overlaps lse", false},
  });
}

// q, k, v and out as slices of one [tokens, 2 * q_heads + 2 * kv_heads, head_dim] buffer.
TEST(Validate, AcceptsAlternatingViewsOfOnePackedBuffer) {
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

TEST(Validate, ReadsNoPointerWhenOnlyShapesAreAsked) {
  Call call;
  call.use_pages(20);
  call.attention.q.data = call.attention.k.data = call.attention.v.data = nullptr;
  call.attention.pages.block_table = nullptr;
  call.mask.words = nullptr;
  call.context.workspace = {};
  EXPECT_EQ(why_unsupported(call.attention, call.policy, call.mask, call.context), nullptr);
  EXPECT_GT(workspace_bytes(call.attention, call.policy, call.mask, call.context), 0u);
}

TEST(Validate, ShapesOfMasksFollowTheBlockGrid) {
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

TEST(Validate, CountsCausalBlocksOfEveryLength) {
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
