// proxy_test.cc - the block masses of the proxy map against the oracle's, from the same q and k.
#include "proxy/proxy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "reference/reference.h"
#include "run.h"
#include "stage.h"
#include "structured.h"

namespace crisp::test {
namespace {

using Proxy = Staged<ProxyMap>;

Proxy run_proxy(const HeadBatch& batch, const ProxyOptions& options, int num_threads = 1) {
  Context context;
  context.num_threads = num_threads;
  return {context, [&](Run& run) { return compute_proxy_map(batch, options, run); }};
}

// Bound on the relative error of a mass, from float arithmetic alone. A score is a dot product of
// scaled products: error <= (d + 3) eps sum |scale q k|. A mass is a sum of exp(score) over its
// normaliser, so its relative error is twice that of a score (in nats), plus the exponentials (2 x
// 3e-7, the weights of blocks included) and float sums of up to 128 terms, above and below.
double relative_bound(const reference::Head& head) {
  constexpr double eps = 0x1p-24;
  const int64_t rows = std::min<int64_t>(head.q_len(), kProxyRows);
  double largest = 0;
  for (int64_t i = head.q_len() - rows; i < head.q_len(); ++i) {
    for (int64_t j = 0; j < head.kv_len(); ++j) {
      double sum = 0;
      for (int64_t d = 0; d < head.q.cols; ++d) sum += std::fabs(head.q(i, d) * head.k(j, d));
      largest = std::max(largest, sum * head.softmax_scale);
    }
  }
  const double score = static_cast<double>(head.q.cols + 3) * eps * largest;
  return 2 * score + 1e-6 + 2 * 128 * eps;
}

void expect_near(const float* got, const std::vector<double>& want, double relative,
                 const char* what) {
  for (size_t b = 0; b < want.size(); ++b) {
    EXPECT_NEAR(got[b], want[b], relative * std::fabs(want[b]) + 1e-30) << what << " " << b;
  }
}

void expect_means(const ProxyMap& map, const HeadBatch& batch, const reference::Head& head,
                  int64_t h) {
  const reference::Matrix means = reference::block_means(head.k, 0);
  const int64_t kv_head = batch.kv_head_of(h) - batch.first_kv_head();
  for (int64_t b = 0; b < means.rows; ++b) {
    for (int64_t d = 0; d < means.cols; ++d) {
      EXPECT_NEAR(map.key_means[(kv_head * map.num_blocks + b) * means.cols + d], means(b, d), 1e-5)
          << "block " << b << " dim " << d;
    }
  }
}

void expect_like_reference(const Inputs& inputs, ProxyOptions options) {
  options.pooled_estimate = true;
  const Call call(inputs);
  for (size_t s = 0; s < inputs.segments.size(); ++s) {
    const HeadBatch batch = batch_of(call.attention, static_cast<int64_t>(s));
    const Proxy proxy = run_proxy(batch, options);
    const ProxyMap& map = proxy.result;
    for (int64_t h = 0; h < batch.num_heads; ++h) {
      SCOPED_TRACE(::testing::Message()
                   << "segment " << s << " head " << h << " of " << inputs.config << " windows "
                   << options.sink_tokens << ", " << options.recency_tokens);
      const reference::Head head = reference_head(inputs, inputs.segments[s], h);
      const reference::ProxyMap want =
          reference::proxy_map(head, options.sink_tokens, options.recency_tokens);
      const double relative = relative_bound(head);
      expect_near(map.vertical + h * map.num_blocks, want.p_v, relative, "vertical");
      expect_near(map.slash + h * map.num_blocks, want.p_s, relative, "slash");
      expect_near(map.structural_mass + h, {want.structural_mass}, relative, "C_struct");
      expect_near(map.pooled_estimate + h * map.num_blocks, reference::pooled_estimate(head), 1e-5,
                  "pooled estimate");
      expect_means(map, batch, head, h);
    }
  }
}

Case proxy_case(int64_t q_len, int64_t kv_len) {
  Case c;
  c.num_q_heads = 3;
  c.head_dim = 16;
  c.segments = {{q_len, kv_len}};
  c.seed = static_cast<uint64_t>(kv_len);
  return c;
}

TEST(Proxy, EveryAlignmentOfTheLastRows) {
  for (const int64_t n : {1,   2,   15,  63,  64,  65,  127, 128, 129, 130, 191,
                          192, 193, 255, 256, 257, 300, 384, 391, 513, 1025}) {
    expect_like_reference(structured_inputs(proxy_case(n, n)), {});
  }
}

TEST(Proxy, ChunksAndFewQueries) {
  for (const Lengths lengths : {Lengths{1, 1},
                                {1, 300},
                                {1, 256},
                                {5, 130},
                                {64, 513},
                                {100, 391},
                                {127, 255},
                                {129, 640},
                                {200, 1000}}) {
    expect_like_reference(structured_inputs(proxy_case(lengths.q_len, lengths.kv_len)), {});
  }
}

TEST(Proxy, WindowsOfAnyLength) {
  for (const int64_t n : {100, 257, 300, 641}) {
    for (const int64_t sink : {1, 100, 128, 200, 300}) {
      for (const int64_t recency : {1, 64, 128, 129, 290}) {
        expect_like_reference(structured_inputs(proxy_case(n, n)), {sink, recency, true});
      }
    }
  }
}

TEST(Proxy, HeadDimsGroupsDtypesLayouts) {
  Case c = proxy_case(391, 391);
  for (const int64_t head_dim : {8, 64, 72, 96, 128, 256}) {
    c.head_dim = head_dim;
    expect_like_reference(structured_inputs(c), {});
  }
  c.head_dim = 64;
  for (const int64_t group : {1, 3, 4, 7}) {
    c.num_q_heads = 2 * group;
    c.num_kv_heads = 2;
    c.dtype = group % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    c.layout = group == 1   ? Layout::kHeadMajor
               : group == 3 ? Layout::kPackedQkv
                            : Layout::kOddStrides;
    c.page_size = group == 7 ? 16 : 0;
    c.segments = {{300, 391}, {130, 130}};
    expect_like_reference(structured_inputs(c), {});
  }
}

// The masses are sums of probabilities: each direction adds up to 1.
TEST(Proxy, MassesSumToOne) {
  const Inputs inputs = structured_inputs(proxy_case(1000, 1000));
  const Call call(inputs);
  const Proxy proxy = run_proxy(batch_of(call.attention), {});
  for (int64_t h = 0; h < 3; ++h) {
    double vertical = 0, slash = 0;
    for (int64_t b = 0; b < 8; ++b) {
      vertical += proxy.result.vertical[h * 8 + b];
      slash += proxy.result.slash[h * 8 + b];
    }
    EXPECT_NEAR(vertical, 1, 1e-6);
    EXPECT_NEAR(slash, 1, 1e-6);
  }
}

void expect_same_bits(const float* a, const float* b, int64_t count, const char* what) {
  for (int64_t i = 0; i < count; ++i) EXPECT_EQ(a[i], b[i]) << what << " " << i;
}

TEST(Proxy, BitEqualForEveryThreadCountAndBatch) {
  Case c = proxy_case(2000, 2100);
  c.num_q_heads = 8;
  c.num_kv_heads = 2;
  const Inputs inputs = structured_inputs(c);
  const Call call(inputs);
  const Proxy one = run_proxy(batch_of(call.attention), {128, 128, true});
  const int64_t num_blocks = one.result.num_blocks;
  // Batches that begin and end inside a kv group, and span two.
  for (const auto& [first, count, threads] :
       {std::tuple{0, 8, 2}, {0, 8, 3}, {0, 8, 7}, {1, 2, 1}, {3, 4, 2}, {7, 1, 3}}) {
    const HeadBatch batch = batch_of(call.attention, 0, first, count);
    const Proxy proxy = run_proxy(batch, {128, 128, true}, threads);
    const int64_t masses = count * num_blocks, from = first * num_blocks;
    expect_same_bits(proxy.result.vertical, one.result.vertical + from, masses, "vertical");
    expect_same_bits(proxy.result.slash, one.result.slash + from, masses, "slash");
    expect_same_bits(proxy.result.structural_mass, one.result.structural_mass + first, count,
                     "C_struct");
    expect_same_bits(proxy.result.pooled_estimate, one.result.pooled_estimate + from, masses,
                     "pooled estimate");
    expect_same_bits(proxy.result.key_means,
                     one.result.key_means + batch.first_kv_head() * num_blocks * c.head_dim,
                     batch.num_kv_heads() * num_blocks * c.head_dim, "key mean");
  }
}

// Heads that fit one batch by the budget, at lengths whose partial sums are larger and smaller.
TEST(Proxy, BatchesAreBounded) {
  Attention attention;
  attention.q = {nullptr, DType::kFloat32, 0, 32, 128, 0, 0, 0};
  attention.k = {nullptr, DType::kFloat32, 0, 8, 128, 0, 0, 0};
  for (const int64_t n : {int64_t{128}, int64_t{65536}, int64_t{1} << 20}) {
    const SegmentShape segment = segment_shape({0, n, 0, n, 0}, kBlockSize);
    const int64_t heads =
        std::clamp<int64_t>(proxy_heads_per_batch(attention, segment, Device::kCpu), 1, 32);
    Workspace counting = Workspace::counting();
    const Context context{.num_threads = 1};
    crisp::Run run{context, counting};
    compute_proxy_map({&attention, segment, 0, 0, heads}, {}, run);
    EXPECT_LE(counting.peak_bytes(), size_t{20} << 20) << n;
    EXPECT_TRUE(heads == 32 || counting.peak_bytes() >= size_t{6} << 20) << n << ": " << heads;
  }
}

// A key that no proxy row sees is not read into any mass; one that is seen spoils its head.
TEST(Proxy, NaNReachesOnlyTheRowsThatSeeIt) {
  Case c = proxy_case(300, 300);
  c.num_q_heads = c.num_kv_heads = 2;
  c.padding = 40;  // NaN rows before and after the segment
  Inputs inputs = structured_inputs(c);
  const Call clean(inputs);
  const Proxy before = run_proxy(batch_of(clean.attention), {});
  for (int64_t h = 0; h < 2; ++h) EXPECT_TRUE(std::isfinite(before.result.structural_mass[h])) << h;

  for (const float bad : {NAN, INFINITY}) {
    for (const int64_t key : {0, 150, 298, 299}) {
      Inputs spoilt = inputs;
      spoilt.k.row(spoilt.segments[0].kv_start + key, 1)[3] = bad;
      const Call call(spoilt);
      const Proxy after = run_proxy(batch_of(call.attention), {});
      expect_same_bits(after.result.vertical, before.result.vertical, 3, "vertical of head 0");
      expect_same_bits(after.result.slash, before.result.slash, 3, "slash of head 0");
      // An infinite key that every row scores -inf weighs nothing; anything else spoils the head.
      const double want =
          reference::proxy_map(reference_head(spoilt, spoilt.segments[0], 1), 128, 128)
              .structural_mass;
      EXPECT_EQ(std::isfinite(after.result.structural_mass[1]), std::isfinite(want))
          << "key " << key << " " << bad;
      EXPECT_FALSE(std::isnan(bad) && std::isfinite(want)) << "key " << key;
    }
  }
}

// A whole block that every row scores -inf weighs nothing, and the rest is as if it were not there.
TEST(Proxy, BlockOfMinusInfinity) {
  Inputs inputs = structured_inputs(proxy_case(391, 391));
  for (int64_t t = 0; t < 391; ++t) {
    for (int64_t h = 0; h < 3; ++h) inputs.q.row(t, h)[9] = 1;
    if (t / 128 == 1) inputs.k.row(t, 0)[9] = -INFINITY;
  }
  const Call call(inputs);
  const Proxy proxy = run_proxy(batch_of(call.attention), {});
  for (int64_t h = 0; h < 3; ++h) {
    const reference::Head head = reference_head(inputs, inputs.segments[0], h);
    const reference::ProxyMap want = reference::proxy_map(head, 128, 128);
    ASSERT_EQ(want.p_v[1], 0);
    expect_near(proxy.result.vertical + h * 4, want.p_v, 1e-4, "vertical");
    expect_near(proxy.result.slash + h * 4, want.p_s, 1e-4, "slash");
    expect_near(proxy.result.structural_mass + h, {want.structural_mass}, 1e-4, "C_struct");
  }
}

}  // namespace
}  // namespace crisp::test
