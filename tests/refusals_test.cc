// refusals_test.cc - tensors, segments and pages outside the contract are refused.
#include "refusals.h"

namespace crisp::test {
namespace {

TEST(Refusals, TheUnspoiltCallsAreAccepted) {
  for (const int64_t page_size : {0, 16}) {
    Bench bench(page_size);
    EXPECT_EQ(why_unsupported(bench.attention, bench.policy, bench.block_mask, bench.context),
              nullptr);
    attend(bench.attention, bench.block_mask, bench.out, bench.lse, bench.context);
    for (const Policy& policy : {Policy(Dense{}), Policy(Crisp{}), Policy(FlexPrefill{}),
                                 Policy(UserMask{bench.policy_mask.mask})}) {
      prefill(bench.attention, policy, bench.block_mask, bench.out, bench.lse, bench.context,
              bench.report);
    }
  }
}

TEST(Refusals, Tensors) {
  const Refusal refusals[] = {
      {"unknown dtype",
       kShapes,
       [](Bench& b) { b.attention.q.dtype = DType{7}; },
       {"q.dtype", "7", "float32"}},
      {"k of another dtype",
       kShapes,
       [](Bench& b) { b.attention.k.dtype = DType::kFloat16; },
       {"k.dtype", "float16", "float32"}},
      {"v of another dtype",
       kShapes,
       [](Bench& b) { b.attention.v.dtype = DType::kBFloat16; },
       {"v.dtype", "bfloat16", "float32"}},
      {"head_dim no multiple of 8",
       kShapes,
       [](Bench& b) { b.attention.q.head_dim = 12; },
       {"q.head_dim", "12", "multiple of 8"}},
      {"head_dim 0",
       kShapes,
       [](Bench& b) { b.attention.q.head_dim = 0; },
       {"q.head_dim", "0", "[8, 512]"}},
      {"head_dim too large",
       kShapes,
       [](Bench& b) { b.attention.q.head_dim = 520; },
       {"q.head_dim", "520", "512"}},
      {"unequal head_dim of k",
       kShapes,
       [](Bench& b) { b.attention.k.head_dim = 24; },
       {"k.head_dim", "24", "16"}},
      {"unequal head_dim of v",
       kShapes,
       [](Bench& b) { b.attention.v.head_dim = 8; },
       {"v.head_dim", "8", "16"}},
      {"no heads", kShapes, [](Bench& b) { b.attention.q.num_heads = 0; }, {"q.num_heads", "0"}},
      {"groups that do not divide",
       kShapes,
       [](Bench& b) { b.attention.q.num_heads = 5; },
       {"q.num_heads", "5", "2"}},
      {"k and v heads differ",
       kShapes,
       [](Bench& b) { b.attention.v.num_heads = 1; },
       {"v.num_heads", "1", "2"}},
      {"k and v tokens differ",
       kShapes,
       [](Bench& b) { b.attention.v.num_tokens -= 1; },
       {"v.num_tokens", "361", "362"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, StridesScaleAndPointers) {
  const Refusal refusals[] = {
      {"negative tokens",
       kShapes,
       [](Bench& b) { b.attention.q.num_tokens = -3; },
       {"q.num_tokens", "-3"}},
      {"negative token_stride",
       kShapes,
       [](Bench& b) { b.attention.k.token_stride = -32; },
       {"k.token_stride", "-32", ">= 0"}},
      {"negative head_stride",
       kShapes,
       [](Bench& b) { b.attention.v.head_stride = -16; },
       {"v.head_stride", "-16", ">= 0"}},
      {"past the address space",
       kShapes,
       [](Bench& b) { b.attention.k.token_stride = int64_t{1} << 61; },
       {"k", "2305843009213693952", "2^63"}},
      {"scale not set",
       kShapes,
       [](Bench& b) { b.attention.softmax_scale = 0; },
       {"softmax_scale", "0", "finite"}},
      {"negative scale",
       kShapes,
       [](Bench& b) { b.attention.softmax_scale = -1; },
       {"softmax_scale", "-1", "> 0"}},
      {"scale NaN",
       kShapes,
       [](Bench& b) { b.attention.softmax_scale = kNaN; },
       {"softmax_scale", "nan"}},
      {"scale Inf",
       kShapes,
       [](Bench& b) { b.attention.softmax_scale = kInf; },
       {"softmax_scale", "inf"}},
      {"q null", kAll, [](Bench& b) { b.attention.q.data = nullptr; }, {"q.data", "null"}},
      {"k null", kAll, [](Bench& b) { b.attention.k.data = nullptr; }, {"k.data", "null"}},
      {"v null", kAttends, [](Bench& b) { b.attention.v.data = nullptr; }, {"v.data", "null"}},
      {"q misaligned",
       kAll,
       [](Bench& b) { b.attention.q.data = static_cast<const std::byte*>(b.attention.q.data) + 2; },
       {"q.data", "aligned to 4"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, Segments) {
  const Refusal refusals[] = {
      {"q_start negative",
       kShapes,
       [](Bench& b) { b.segments[0].q_start = -1; },
       {"segments[0].q_start", "-1"}},
      {"q past the end",
       kShapes,
       [](Bench& b) { b.segments[1].q_len = 160; },
       {"segments[1].q_", "160", "262"}},
      {"q_len negative",
       kShapes,
       [](Bench& b) { b.segments[0].q_len = -5; },
       {"segments[0].q_len", "-5"}},
      {"kv past the end",
       kShapes,
       [](Bench& b) { b.segments[1].kv_len = 1000; },
       {"segments[1].kv_", "1000", "362"}},
      {"kv_start near 2^63",
       kShapes,
       [](Bench& b) { b.segments[1].kv_start = INT64_MAX - 10; },
       {"segments[1].kv_start", "9223372036854775797"}},
      {"fewer keys than queries",
       kShapes,
       [](Bench& b) { b.segments[1].kv_len = 149; },
       {"segments[1].kv_len", "149", "150", "causal"}},
      {"shared rows",
       kShapes,
       [](Bench& b) { b.segments[1].q_start = 103; },
       {"segments[1].q_start", "103", ">= 104"}},
      {"descending",
       kShapes,
       [](Bench& b) { std::swap(b.segments[0], b.segments[1]); },
       {"segments[1].q_start", "4"}},
      {"q_len above 2^31",
       kShapes,
       [](Bench& b) { b.segments[0].q_len = int64_t{1} << 31; },
       {"segments[0].q_len", "2147483648"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 0);
}

TEST(Refusals, Pages) {
  const Refusal refusals[] = {
      {"page_size negative",
       kShapes,
       [](Bench& b) { b.attention.pages.page_size = -16; },
       {"pages.page_size", "-16"}},
      {"half a page",
       kShapes,
       [](Bench& b) { b.attention.k.num_tokens -= 1, b.attention.v.num_tokens -= 1; },
       {"k.num_tokens", "multiple", "16"}},
      {"no rows",
       kShapes,
       [](Bench& b) { b.attention.pages.num_rows = 0; },
       {"pages.num_rows", "0"}},
      {"row_stride negative",
       kShapes,
       [](Bench& b) { b.attention.pages.row_stride = -1; },
       {"pages.row_stride", "-1"}},
      {"rows too short",
       kShapes,
       [](Bench& b) { b.attention.pages.row_stride = 9; },
       {"segments[", "pages", "9"}},
      {"page_row past the end",
       kShapes,
       [](Bench& b) { b.segments[0].page_row = 2; },
       {"segments[0].page_row", "2"}},
      {"page_stride negative",
       kShapes,
       [](Bench& b) { b.attention.v.page_stride = -1; },
       {"v.page_stride", "-1"}},
      {"no table",
       kAll,
       [](Bench& b) { b.attention.pages.block_table = nullptr; },
       {"pages.block_table", "null"}},
      {"negative page", kAll, [](Bench& b) { b.table[1] = -1; }, {"pages.block_table[0][1]", "-1"}},
      {"page past the pool",
       kAll,
       [](Bench& b) { b.table[2] = 25; },
       {"pages.block_table[0][2]", "25"}},
  };
  for (const Refusal& refusal : refusals) check(refusal, 16);
}

}  // namespace
}  // namespace crisp::test
