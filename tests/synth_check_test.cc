// Specs the generator refuses: the message names the value and what was expected.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "synth/synth.h"

namespace crisp::synth {
namespace {

std::string refusal(const LayerSpec& spec) {
  try {
    make_layer(spec);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(SynthCheck, RefusesBadSpecs) {
  LayerSpec good;
  good.num_tokens = 2048;
  good.num_q_heads = 1;
  apply_preset("sink-needle", good);
  const auto with = [&](auto change) {
    LayerSpec spec = good;
    change(spec, spec.heads[0]);
    return refusal(spec);
  };
  using Spec = LayerSpec;
  using Head = HeadSpec;
  const auto expect = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(with([](Spec& s, Head&) { s.num_tokens = 0; }), "num_tokens is 0");
  expect(with([](Spec& s, Head&) { s.head_dim = 12; }), "head_dim is 12, must be a multiple of 8");
  expect(with([](Spec& s, Head&) { s.num_kv_heads = 2; }), "num_q_heads is 1");
  expect(with([](Spec& s, Head&) { s.num_q_heads = 2; }), "1 heads are described");
  expect(with([](Spec& s, Head&) { s.num_sink_tokens = 0; }), "num_sink_tokens is 0");
  expect(with([](Spec&, Head& h) { h.sink_mass = -.1; }), "sink mass is -0.1");
  expect(with([](Spec&, Head& h) { h.sink_mass = NAN; }), "sink mass is nan");
  expect(with([](Spec&, Head& h) { h.sink_mass = .95; }), "masses sum to 1.07");
  expect(with([](Spec&, Head& h) { h.window = 0; }), "window is 0");
  expect(with([](Spec&, Head& h) { h.sigma = 5; }), "sigma is 5");
  expect(with([](Spec&, Head& h) { h.drift = 2; }), "drift is 2");
  expect(with([](Spec&, Head& h) { h.slashes = {{2000, .1}}; }), "slash distance is 2000");
  expect(with([](Spec&, Head& h) { h.slashes = {{100, .1}, {110, .1}}; }), "overlap");
  expect(with([](Spec&, Head& h) { h.needles = {{2046, 4, .1, {}}}; }), "outside the 2048 keys");
  expect(with([](Spec&, Head& h) {
           h.needles = {{1990, 4, .1, {}}};
         }),
         "must end before query 1920");
  expect(with([](Spec&, Head& h) { h.needles = {{2, 4, .1, {}}}; }), "lies on the 4 sink tokens");
  expect(with([](Spec&, Head& h) { h.needles = {{500, 4, .1, {}}, {502, 4, .1, {}}}; }), "overlap");
  expect(with([](Spec&, Head& h) { h.needles = {{500, 4, .1, {900, 800}}}; }), "needle rows");
  expect(with([](Spec& s, Head&) { s.head_dim = 8; }), "has 2");
  expect(with([](Spec& s, Head& h) { h.cluster_mass = .1, s.cluster_blocks = 20; }),
         "clusters need at least 20 blocks");
  // One pair of dimensions for positions cannot tell near from far.
  expect(
      with([](Spec& s, Head& h) { h = {"custom", 0, .9, 16, {}, {}, 0, .5, 0}, s.head_dim = 8; }),
      "cannot be reached");
  LayerSpec none;
  EXPECT_THROW(apply_preset("local", none), Error);
  none.num_tokens = 128;
  try {
    apply_preset("loca", none);
    FAIL();
  } catch (const Error& error) {
    expect(error.what(), "preset is 'loca', must be one of llama-like");
  }
}

}  // namespace
}  // namespace crisp::synth
