#include <algorithm>
#include <numeric>

#include "synth/plan.h"
#include "synth/random.h"
#include "synth/synth.h"

namespace crisp::synth {
namespace {

// Four needles of 4 keys, spread over the prompt and off the block borders.
std::vector<Needle> four_needles(int64_t n, double mass, RowRange rows = {}) {
  std::vector<Needle> needles;
  for (const int64_t percent : {12, 37, 55, 81})
    needles.push_back({n * percent / 100 + 5, 4, mass, rows});
  return needles;
}

// 0.3 of the prompt, halfway between two block diagonals: the average case of a cover by blocks.
int64_t far_distance(int64_t n) { return n * 3 / 10 / kBlock * kBlock + kBlock / 2; }

HeadSpec dormant(int64_t) { return {"dormant", .9, .07, 128, {}, {}, 0, 1.0, 0}; }
HeadSpec local(int64_t) { return {"local", .45, .45, 128, {}, {}, 0, 1.0, 0}; }
HeadSpec retrieval(int64_t n) {
  return {"retrieval", .5, .28, 128, {}, four_needles(n, .03), 0, 1.0, 0};
}
HeadSpec sink_collapse(int64_t n) {
  return {"sink-collapse", .955, .02, 128, {}, four_needles(n, .004), 0, .5, 0};
}
HeadSpec sink_needle(int64_t n) {
  return {"sink-needle", .6, 0, 128, {}, four_needles(n, .03), 0, .5, 0};
}
HeadSpec slash_near(int64_t) { return {"slash-near", .35, .15, 128, {{700, .4}}, {}, 0, 1.0, 0}; }
HeadSpec slash_far(int64_t n) {
  return {"slash-far", .35, .15, 128, {{far_distance(n), .4}}, {}, 0, 1.0, 0};
}
HeadSpec pooled_clustered(int64_t) { return {"pooled-clustered", 0, 0, 128, {}, {}, .8, .5, 0}; }
HeadSpec pooled_diffuse(int64_t) { return {"pooled-diffuse", 0, 0, 128, {}, {}, 0, .5, 0}; }
HeadSpec hybrid(int64_t) { return {"hybrid", .2, .1, 128, {}, {}, .55, .5, 0}; }
HeadSpec sink_free_needle(int64_t n) {
  return {"sink-free-needle", 0, 0, 128, {}, four_needles(n, .2), 0, .5, 0};
}
HeadSpec spread_sink(int64_t) { return {"spread-sink", .3, 0, 128, {}, {}, 0, .5, 0}; }
// The needles are looked up in the first three quarters only: nothing in the last queries tells.
HeadSpec early_needle(int64_t n) {
  const Needle early{n * 12 / 100 + 5, 4, .2, {n / 4, n * 3 / 4}};
  return {"early-needle", .5, .28, 128, {}, {early}, 0, 1.0, 0};
}

using MakeHead = HeadSpec (*)(int64_t num_tokens);

struct Share {
  MakeHead make;
  double share;
};

// Largest remainders, then dealt to the heads in random order.
void mix(LayerSpec& spec, const std::vector<Share>& shares) {
  std::vector<int64_t> counts;
  std::vector<std::pair<double, size_t>> remainders;
  int64_t given = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double exact = shares[i].share * static_cast<double>(spec.num_q_heads);
    counts.push_back(static_cast<int64_t>(exact + 1e-9));
    given += counts.back();
    remainders.push_back({static_cast<double>(counts.back()) - exact, i});
  }
  std::stable_sort(remainders.begin(), remainders.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first - 1e-9; });
  for (size_t i = 0; given < spec.num_q_heads; ++i, ++given) ++counts[remainders[i].second];

  spec.heads.clear();
  for (size_t i = 0; i < shares.size(); ++i)
    for (int64_t j = 0; j < counts[i]; ++j) spec.heads.push_back(shares[i].make(spec.num_tokens));
  const uint64_t key = stream_key(spec.seed, Stream::kMix, 0);
  for (size_t i = spec.heads.size(); i > 1; --i)
    std::swap(spec.heads[i - 1],
              spec.heads[static_cast<size_t>(random_bits(key, static_cast<int64_t>(i)) % i)]);

  // No two heads of a kind are quite alike: a tenth of the mass outside the sink moves.
  for (size_t h = 0; h < spec.heads.size(); ++h) {
    const uint64_t jitter_key = stream_key(spec.seed, Stream::kJitter, static_cast<int64_t>(h));
    HeadSpec& head = spec.heads[h];
    const double factor = .9 + .2 * uniform(jitter_key, 0);
    head.sink_mass = head.sink_mass > 0 ? 1 - (1 - head.sink_mass) * factor : 0;
    head.local_mass *= factor;
    for (Slash& slash : head.slashes) slash.mass *= factor;
    for (Needle& needle : head.needles) needle.mass *= factor;
  }
}

void llama_like(LayerSpec& spec) {
  mix(spec,
      {{dormant, .15}, {local, .3}, {slash_far, .3}, {retrieval, .2}, {pooled_clustered, .05}});
}

void early_layer(LayerSpec& spec) { mix(spec, {{pooled_diffuse, .6}, {pooled_clustered, .4}}); }

template <MakeHead kMake>
void all_heads(LayerSpec& spec) {
  spec.heads.assign(static_cast<size_t>(spec.num_q_heads), kMake(spec.num_tokens));
}

void spread_sink_heads(LayerSpec& spec) {
  all_heads<spread_sink>(spec);
  spec.num_sink_tokens = 128;
}

struct Preset {
  PresetInfo info;
  void (*apply)(LayerSpec& spec);
};

const std::vector<Preset>& table() {
  static const std::vector<Preset> kTable = {
      {{"llama-like",
        "a deep layer: 15 % dormant, 30 % local, 30 % local and far slash, 20 % "
        "retrieval, 5 % pooled-clustered heads"},
       llama_like},
      {{"early-layer", "one of the first layers: pooled-diffuse and pooled-clustered heads"},
       early_layer},
      {{"dormant", "sink .9, nearest keys .07"}, all_heads<dormant>},
      {{"local", "sink .45, nearest keys .45"}, all_heads<local>},
      {{"retrieval", "sink .5, nearest keys .28, four needles of .03"}, all_heads<retrieval>},
      {{"sink-collapse", "sink .955, nearest keys .02, four needles of .004"},
       all_heads<sink_collapse>},
      {{"sink-needle", "sink .6, four needles of .03, flat background"}, all_heads<sink_needle>},
      {{"slash-near", "sink .35, nearest keys .15, slash .4 at 700 tokens"}, all_heads<slash_near>},
      {{"slash-far", "sink .35, nearest keys .15, slash .4 at about 0.3 of the prompt"},
       all_heads<slash_far>},
      {{"pooled-clustered", "one key block in 16 shares the query block's topic and holds .8"},
       all_heads<pooled_clustered>},
      {{"pooled-diffuse", "content noise only, no structure"}, all_heads<pooled_diffuse>},
      {{"hybrid", "sink .2, nearest keys .1, clusters .55"}, all_heads<hybrid>},
      {{"sink-free-needle", "four needles of .2 and no sink"}, all_heads<sink_free_needle>},
      {{"spread-sink", "sink .3 spread over 128 tokens, flat background"}, spread_sink_heads},
      {{"early-needle", "a needle only queries before the last quarter look up: an expected miss"},
       all_heads<early_needle>},
  };
  return kTable;
}

}  // namespace

const std::vector<PresetInfo>& presets() {
  static const std::vector<PresetInfo> kInfos = [] {
    std::vector<PresetInfo> infos;
    for (const Preset& preset : table()) infos.push_back(preset.info);
    return infos;
  }();
  return kInfos;
}

void apply_preset(std::string_view preset, LayerSpec& spec) {
  if (spec.num_q_heads < 1 || spec.num_tokens < 1)
    throw Error("a preset needs num_tokens and num_q_heads of at least 1");
  for (const Preset& known : table())
    if (known.info.name == preset) return known.apply(spec);
  std::string names;
  for (const PresetInfo& info : presets()) {
    if (!names.empty()) names += ", ";
    names += info.name;
  }
  throw Error("preset is '" + std::string(preset) + "', must be one of " + names);
}

}  // namespace crisp::synth
