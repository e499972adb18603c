// The generator against the reference: masses, routes and selections are recomputed from the
// tensors by the oracle, never taken from the generator's own measurement.
#include "synth/synth.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "reference/proxy.h"
#include "sanitized.h"
#include "synth/convert.h"

namespace crisp::synth {
namespace {

LayerSpec preset_spec(std::string_view preset, int64_t num_tokens, int64_t head_dim = 128,
                      int64_t num_q_heads = 1, int64_t num_kv_heads = 1) {
  LayerSpec spec;
  spec.num_tokens = num_tokens;
  spec.num_q_heads = num_q_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_dim = head_dim;
  apply_preset(preset, spec);
  return spec;
}

// The last `rows` queries before `end` and all keys before it, for the oracle.
reference::Head oracle_head(const Layer& layer, int64_t head, int64_t end, int64_t rows = 128) {
  const LayerSpec& spec = layer.truth.spec;
  const int64_t d = spec.head_dim, group_size = spec.num_q_heads / spec.num_kv_heads;
  rows = std::min(rows, end);
  reference::Head out;
  out.q = reference::Matrix(rows, d);
  out.k = out.v = reference::Matrix(end, d);
  out.softmax_scale = layer.truth.softmax_scale;
  const float* q = layer.q.data() + (head * spec.num_tokens + end - rows) * d;
  const float* k = layer.k.data() + head / group_size * spec.num_tokens * d;
  std::copy(q, q + rows * d, out.q.values.begin());
  std::copy(k, k + end * d, out.k.values.begin());
  return out;
}

struct Proxy {
  reference::ProxyMap map;
  double js_distance = 0;
};

Proxy proxy_of(const Layer& layer, int64_t head) {
  const reference::Head from = oracle_head(layer, head, layer.truth.spec.num_tokens);
  Proxy proxy{reference::proxy_map(from, 128, 128), 0};
  proxy.js_distance = reference::js_distance(reference::pooled_estimate(from), proxy.map.p_v);
  return proxy;
}

double sum(const std::vector<double>& values, int64_t begin, int64_t end) {
  double total = 0;
  for (int64_t i = std::max<int64_t>(begin, 0); i < end; ++i)
    total += values[static_cast<size_t>(i)];
  return total;
}

// Mass of a component read off the marginals of the proxy map.
double oracle_mass(const Layer& layer, int64_t head, const Component& c,
                   const reference::ProxyMap& map) {
  switch (c.kind) {
    case ComponentKind::kSink:
      return sum(map.a_v, 0, c.width);
    case ComponentKind::kNeedle:
      return sum(map.a_v, c.position, c.position + c.width);
    case ComponentKind::kSlash:
      return sum(map.a_s, c.position - c.width, c.position + c.width + 1);
    case ComponentKind::kLocal:
      return sum(map.a_s, 0, c.width);
    case ComponentKind::kCluster:
      break;
  }
  const LayerSpec& spec = layer.truth.spec;
  const size_t kv_head = static_cast<size_t>(head / (spec.num_q_heads / spec.num_kv_heads));
  const size_t topic =
      static_cast<size_t>(layer.truth.heads[static_cast<size_t>(head)].topics.back());
  double total = 0;
  for (int64_t b : layer.truth.topic_blocks[kv_head][topic])
    total += map.p_v[static_cast<size_t>(b)];
  return total;
}

// Targets hold to 0.02, and the realised masses are what the oracle measures.
void expect_masses(const Layer& layer, int64_t head, const reference::ProxyMap& map) {
  const HeadTruth& truth = layer.truth.heads[static_cast<size_t>(head)];
  double rest = 1;
  for (const Component& c : truth.components) {
    if (c.measured.end != layer.truth.spec.num_tokens) continue;
    const double mass = oracle_mass(layer, head, c, map);
    rest -= mass;
    EXPECT_NEAR(mass, c.target, 0.02) << truth.kind << " " << name(c.kind);
    EXPECT_NEAR(mass, c.realised, 2e-3) << truth.kind << " " << name(c.kind);
  }
  EXPECT_NEAR(rest, truth.background_target, 0.02) << truth.kind;
  EXPECT_NEAR(rest, truth.background_realised, 5e-3) << truth.kind;
}

struct Route {
  const char* preset;
  bool structural;                    // C_struct >= 0.2
  double min_distance, max_distance;  // of the square root of the Jensen-Shannon divergence
};

class Presets : public testing::TestWithParam<Route> {};

TEST_P(Presets, HoldTheirMassesAndRouteAsTheyShould) {
  const Route& route = GetParam();
  const Layer layer = make_layer(preset_spec(route.preset, 4096));
  const Proxy proxy = proxy_of(layer, 0);
  expect_masses(layer, 0, proxy.map);
  EXPECT_EQ(proxy.map.structural_mass >= 0.2, route.structural) << proxy.map.structural_mass;
  EXPECT_GE(proxy.js_distance, route.min_distance);
  EXPECT_LE(proxy.js_distance, route.max_distance);
}

INSTANTIATE_TEST_SUITE_P(
    Synth, Presets,
    testing::Values(Route{"dormant", true, .3, 1}, Route{"local", true, .3, 1},
                    Route{"retrieval", true, .3, 1}, Route{"sink-collapse", true, .3, 1},
                    Route{"sink-needle", true, .3, 1}, Route{"slash-near", true, .3, 1},
                    Route{"slash-far", true, .3, 1}, Route{"early-needle", true, .3, 1},
                    Route{"pooled-clustered", false, 0, .05},
                    Route{"pooled-diffuse", false, 0, .05}, Route{"hybrid", true, .15, .3},
                    // The two statistics part, one each way.
                    Route{"sink-free-needle", false, .3, 1}, Route{"spread-sink", true, 0, .05}),
    [](const auto& info) {
      std::string name = info.param.preset;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

// Blocks above alpha times the mean of the blocks that are neither first nor last.
struct Kept {
  int64_t signal = 0, noise = 0;
};

Kept above_floor(const Layer& layer, const reference::ProxyMap& map, double alpha) {
  const int64_t last = static_cast<int64_t>(map.p_v.size()) - 1;
  const double floor = sum(map.p_v, 1, last) / static_cast<double>(last - 1);
  const std::vector<int64_t> signal = signal_blocks(layer.truth, 0, last);
  Kept kept;
  for (int64_t b = 1; b < last; ++b) {
    if (map.p_v[static_cast<size_t>(b)] <= alpha * floor) continue;
    ++(std::binary_search(signal.begin(), signal.end(), b) ? kept.signal : kept.noise);
  }
  return kept;
}

// Blocks that hold 0.95 of the mass, largest first.
int64_t coverage_blocks(const reference::ProxyMap& map) {
  std::vector<double> masses = map.p_v;
  std::sort(masses.rbegin(), masses.rend());
  int64_t count = 0;
  for (double held = 0; held < .95; ++count) held += masses[static_cast<size_t>(count)];
  return count;
}

// Figures at 128 blocks, by the code that Presets runs at 32: nothing new to a sanitizer, to which
// they take most of a minute.
class At16k : public testing::Test {
 protected:
  void SetUp() override {
    if (kIsSanitized) GTEST_SKIP() << "figures only";
  }
};

TEST_F(At16k, FloorFindsNeedlesWhereCoverageTakesTheBackground) {
  const Layer layer = make_layer(preset_spec("sink-needle", 16384));  // 128 blocks
  const reference::ProxyMap map = proxy_of(layer, 0).map;
  for (double alpha : {1.0, 1.25, 1.5}) {
    EXPECT_EQ(above_floor(layer, map, alpha).signal, 4) << alpha;
    EXPECT_EQ(above_floor(layer, map, alpha).noise, 0) << alpha;
  }
  EXPECT_GT(coverage_blocks(map), 64);
}

TEST_F(At16k, FloorIsAKnifeEdgeOnAFlatBackground) {
  const Layer layer = make_layer(preset_spec("pooled-diffuse", 16384));
  const reference::ProxyMap map = proxy_of(layer, 0).map;
  EXPECT_NEAR(static_cast<double>(above_floor(layer, map, 1.0).noise), 63, 15);  // half of them
  EXPECT_EQ(above_floor(layer, map, 1.25).noise, 0);
  EXPECT_GT(coverage_blocks(map), 115);
}

TEST_F(At16k, LocalHeadsRippleAndFarSlashesDoNot) {
  const Layer local = make_layer(preset_spec("local", 16384));
  const reference::ProxyMap ripples = proxy_of(local, 0).map;
  EXPECT_GT(above_floor(local, ripples, 1.0).noise, 10);
  EXPECT_LT(above_floor(local, ripples, 1.5).noise, above_floor(local, ripples, 1.0).noise);
  const Layer far = make_layer(preset_spec("slash-far", 16384));
  const reference::ProxyMap slash = proxy_of(far, 0).map;
  EXPECT_GE(above_floor(far, slash, 1.0).signal, 2);  // the two blocks the band crosses
  EXPECT_LT(above_floor(far, slash, 1.0).noise, 10);
}

TEST_F(At16k, ClustersAreWhatIsKept) {
  const Layer layer = make_layer(preset_spec("pooled-clustered", 16384));
  const Kept kept = above_floor(layer, proxy_of(layer, 0).map, 1.0);
  EXPECT_EQ(kept.signal, 8);
  EXPECT_LE(kept.noise, 2);
}

TEST(Synth, MixHoldsEveryKindAndTopBlocksAreSinkOrRecency) {
  const LayerSpec spec = preset_spec("llama-like", 1536, 128, 20, 5);
  std::multiset<std::string> kinds;
  for (const HeadSpec& head : spec.heads) kinds.insert(head.kind);
  EXPECT_EQ(kinds.count("dormant"), 3u);
  EXPECT_EQ(kinds.count("local"), 6u);
  EXPECT_EQ(kinds.count("slash-far"), 6u);
  EXPECT_EQ(kinds.count("retrieval"), 4u);
  EXPECT_EQ(kinds.count("pooled-clustered"), 1u);
  const Layer layer = make_layer(spec);
  int64_t top_is_edge = 0;
  for (int64_t h = 0; h < 20; ++h) {
    const reference::ProxyMap map = proxy_of(layer, h).map;
    expect_masses(layer, h, map);
    const int64_t top = std::max_element(map.p_v.begin(), map.p_v.end()) - map.p_v.begin();
    if (top == 0 || top >= static_cast<int64_t>(map.p_v.size()) - 2) ++top_is_edge;
  }
  EXPECT_GE(top_is_edge, 17);
}

struct Shape {
  int64_t num_tokens, head_dim;
};

class Shapes : public testing::TestWithParam<Shape> {};

TEST_P(Shapes, HoldTheirMasses) {
  const Layer layer =
      make_layer(preset_spec("llama-like", GetParam().num_tokens, GetParam().head_dim, 4, 2));
  for (int64_t h = 0; h < 4; ++h) expect_masses(layer, h, proxy_of(layer, h).map);
}

INSTANTIATE_TEST_SUITE_P(Synth, Shapes,
                         testing::Values(Shape{2048, 64}, Shape{2048, 96}, Shape{2001, 128},
                                         Shape{2049, 256}, Shape{1500, 72}));

TEST(Synth, DiffuseHeadsOfAnyLength) {
  for (int64_t n : {1, 2, 127, 128, 129, 300}) {
    const Layer layer = make_layer(preset_spec("pooled-diffuse", n, 8));
    EXPECT_EQ(layer.truth.heads[0].background_realised, 1) << n;
    for (float x : layer.q) ASSERT_TRUE(std::isfinite(x)) << n;
  }
}

TEST(Synth, NeedleRowsAreRespected) {
  LayerSpec spec = preset_spec("sink-needle", 4096);
  spec.heads[0].needles = {{1000, 4, .05, {4096 - 32, -1}},  // a question of 32 tokens
                           {2000, 2, .10, {2500, 3500}}};    // gone before the last block
  const Layer layer = make_layer(spec);
  const auto mass = [&](int64_t end, int64_t rows, int64_t position, int64_t width) {
    const reference::Head head = oracle_head(layer, 0, end, rows);
    return sum(reference::column_mass(reference::proxy_rows(head)), position, position + width);
  };
  EXPECT_NEAR(mass(4096, 32, 1000, 4), .2, .01);  // .05 of 128 rows, all of it in 32
  EXPECT_LT(mass(4096 - 32, 96, 1000, 4), .005);
  EXPECT_NEAR(mass(3500, 128, 2000, 2), .1, .01);
  EXPECT_LT(mass(4096, 128, 2000, 2), .005);
  EXPECT_LT(mass(2500, 128, 2000, 2), .005);
  const Component& early = layer.truth.heads[0].components[2];
  EXPECT_EQ(early.measured.begin, 3500 - 128);
  EXPECT_EQ(early.measured.end, 3500);
  EXPECT_NEAR(layer.truth.heads[0].background_target, 1 - .6 - .05, 1e-12);
}

TEST(Synth, DriftTurnsEarlierQueriesAway) {
  LayerSpec spec = preset_spec("sink-needle", 4096);
  spec.heads[0].needles = {{100, 4, .3, {}}};
  const auto early_mass = [&](double drift) {
    spec.heads[0].drift = drift;
    const Layer layer = make_layer(spec);
    EXPECT_NEAR(layer.truth.heads[0].components[1].realised, .3, .02);
    const reference::Head head = oracle_head(layer, 0, 512);
    return sum(reference::column_mass(reference::proxy_rows(head)), 100, 104);
  };
  const double still = early_mass(0), turned = early_mass(1);
  EXPECT_GT(still, .2);
  EXPECT_LT(turned, .02);
}

TEST(Synth, OutlierChannelsStayOutOfTheLogits) {
  LayerSpec spec = preset_spec("retrieval", 2048);
  const Layer with = make_layer(spec);
  spec.massive = 0;
  const Layer without = make_layer(spec);
  for (size_t c = 0; c < with.truth.heads[0].components.size(); ++c)
    EXPECT_EQ(with.truth.heads[0].components[c].amplitude,
              without.truth.heads[0].components[c].amplitude);
  // Median of |x| over tokens, per channel.
  const auto channel = [&](const std::vector<float>& x, int64_t i) {
    std::vector<float> column;
    for (int64_t t = 0; t < 2048; ++t)
      column.push_back(std::abs(x[static_cast<size_t>(t * 128 + i)]));
    std::nth_element(column.begin(), column.begin() + 1024, column.end());
    return column[1024];
  };
  float largest_k = 0, largest_v = 0;
  for (int64_t i = 0; i < 128; ++i) {
    largest_k = std::max(largest_k, channel(with.k, i));
    largest_v = std::max(largest_v, channel(with.v, i));
  }
  EXPECT_GT(largest_k, 5);
  EXPECT_LT(largest_v, 2.5f);
  EXPECT_LT(channel(without.k, 61), 1e-6f);
}

uint64_t digest(const std::vector<float>& values, uint64_t hash) {
  for (float x : values) hash = (hash ^ std::bit_cast<uint32_t>(x)) * 0x100000001b3u;
  return hash;
}

// Bits, not tolerances: whatever the compiler, its flags and the machine.
TEST(Synth, SameSpecSameBits) {
  LayerSpec spec = preset_spec("llama-like", 1301, 64, 4, 2);
  spec.seed = 7;
  const Layer layer = make_layer(spec);
  const uint64_t hash = digest(layer.v, digest(layer.k, digest(layer.q, 0xcbf29ce484222325u)));
  EXPECT_EQ(hash, 2575021520135386374u);
  const Layer again = make_layer(spec);
  EXPECT_EQ(layer.q, again.q);
  spec.seed = 8;
  const Layer other = make_layer(spec);
  EXPECT_NE(layer.q, other.q);
  EXPECT_NE(layer.k, other.k);
  EXPECT_NE(layer.v, other.v);
}

TEST(Synth, HalfTypesHoldTheirMassesAsStored) {
  const LayerSpec spec = preset_spec("retrieval", 2048, 64, 2, 1);
  const size_t head = 2048 * 64;
  const Layer exact = make_layer(spec);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> q(2 * head), k(head), v(head);
    Layer stored;
    stored.truth = generate(spec, {q.data(), k.data(), v.data(), dtype});
    stored.q.resize(q.size());
    stored.k.resize(k.size());
    load_elements(dtype, q.data(), 0, static_cast<int64_t>(q.size()), stored.q.data());
    load_elements(dtype, k.data(), 0, static_cast<int64_t>(k.size()), stored.k.data());
    for (int64_t h = 0; h < 2; ++h) expect_masses(stored, h, proxy_of(stored, h).map);
    std::vector<float> rounded = exact.k;
    round_elements(dtype, rounded.data(), static_cast<int64_t>(rounded.size()));
    EXPECT_EQ(stored.k, rounded);
  }
}

TEST(Synth, SignalBlocksNameEveryComponent) {
  LayerSpec spec = preset_spec("sink-needle", 4000);
  spec.heads[0] = {"custom", .3, .2, 128, {{700, .1}}, {{510, 4, .1, {}}}, 0, .5, 0};
  const Layer layer = make_layer(spec);
  using Blocks = std::vector<int64_t>;
  // Rows 3968..3999: sink 0, needle 3 and 4, slash 3260..3307 = 25, local 3841.. = 30 and 31.
  EXPECT_EQ(signal_blocks(layer.truth, 0, 31), (Blocks{0, 3, 4, 25, 30, 31}));
  EXPECT_EQ(signal_blocks(layer.truth, 0, 0), (Blocks{0}));
  // Rows 256..383: the needle is not causal yet, nor is the slash.
  EXPECT_EQ(signal_blocks(layer.truth, 0, 2), (Blocks{0, 1, 2}));
  EXPECT_THROW(signal_blocks(layer.truth, 0, 32), Error);
}

TEST(Synth, TruthIsWrittenAsJson) {
  const LayerSpec spec = preset_spec("llama-like", 1536, 64, 20, 4);
  const Layer layer = make_layer(spec);
  const auto json = nlohmann::json::parse(to_json(layer.truth));
  EXPECT_EQ(json["num_tokens"], 1536);
  EXPECT_EQ(json["seed"], 0);
  ASSERT_EQ(json["heads"].size(), 20u);
  for (size_t h = 0; h < 20; ++h) {
    const auto& head = json["heads"][h];
    double total = head["background"]["realised"];
    for (const auto& component : head["components"]) {
      total += component["realised"].get<double>();
      if (component["kind"] == "cluster") {
        EXPECT_EQ(component["topic_of_q_block"].size(), 12u);
      }
    }
    EXPECT_NEAR(total, 1, 1e-9) << head["kind"];
  }
}

}  // namespace
}  // namespace crisp::synth
