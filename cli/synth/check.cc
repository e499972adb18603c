#include "core/check.h"

#include <algorithm>

#include "synth/plan.h"
#include "synth/synth.h"

namespace crisp::synth {
namespace {

void check_shape(const LayerSpec& spec) {
  CRISP_CHECK(spec.num_tokens >= 1, "num_tokens is ", spec.num_tokens, ", must be at least 1");
  CRISP_CHECK(spec.head_dim >= 8 && spec.head_dim % 8 == 0 && spec.head_dim <= 1024, "head_dim is ",
              spec.head_dim, ", must be a multiple of 8 from 8 to 1024");
  CRISP_CHECK(
      spec.num_kv_heads >= 1 && spec.num_q_heads >= 1 && spec.num_q_heads % spec.num_kv_heads == 0,
      "num_q_heads is ", spec.num_q_heads,
      ", must be a positive multiple of num_kv_heads, which is ", spec.num_kv_heads);
  CRISP_CHECK(spec.num_q_heads <= (int64_t{1} << 20), "num_q_heads is ", spec.num_q_heads,
              ", must be at most 1048576");
  CRISP_CHECK(spec.num_tokens <= (int64_t{1} << 30), "num_tokens is ", spec.num_tokens,
              ", must be at most 2^30: RoPE angles lose accuracy beyond");
  CRISP_CHECK(static_cast<int64_t>(spec.heads.size()) == spec.num_q_heads, spec.heads.size(),
              " heads are described, num_q_heads is ", spec.num_q_heads);
  CRISP_CHECK(spec.num_sink_tokens >= 0, "num_sink_tokens is ", spec.num_sink_tokens,
              ", must not be negative");
  CRISP_CHECK(spec.cluster_blocks >= 0, "cluster_blocks is ", spec.cluster_blocks,
              ", must not be negative");
  CRISP_CHECK(spec.cluster_spread >= 0 && spec.cluster_spread <= 1, "cluster_spread is ",
              spec.cluster_spread, ", must be from 0 to 1");
  CRISP_CHECK(spec.massive >= 0 && spec.massive <= 1000, "massive is ", spec.massive,
              ", must be from 0 to 1000");
  CRISP_CHECK(spec.sink_value_scale >= 0 && spec.sink_value_scale <= 100, "sink_value_scale is ",
              spec.sink_value_scale, ", must be from 0 to 100");
  CRISP_CHECK(spec.value_mean >= 0 && spec.value_mean <= 100, "value_mean is ", spec.value_mean,
              ", must be from 0 to 100");
}

void check_mass(int64_t head, const char* what, double mass) {
  CRISP_CHECK(mass >= 0 && mass < 1, "head ", head, ": ", what, " mass is ", mass,
              ", must be at least 0 and below 1");
}

void check_slashes(const LayerSpec& spec, int64_t head, const HeadSpec& from) {
  for (size_t i = 0; i < from.slashes.size(); ++i) {
    const Slash& slash = from.slashes[i];
    check_mass(head, "slash", slash.mass);
    CRISP_CHECK(slash.distance >= 1 && slash.distance + kBlock <= spec.num_tokens, "head ", head,
                ": slash distance is ", slash.distance,
                ", must be from 1 to num_tokens - 128 = ", spec.num_tokens - kBlock,
                ", so that all of the last 128 queries have it");
    for (size_t j = 0; j < i; ++j) {
      const int64_t gap = std::abs(slash.distance - from.slashes[j].distance);
      CRISP_CHECK(gap > 2 * kSlashHalfWidth, "head ", head, ": slashes at ",
                  from.slashes[j].distance, " and ", slash.distance,
                  " overlap, distances must differ by more than ", 2 * kSlashHalfWidth);
    }
  }
}

void check_needles(const LayerSpec& spec, int64_t head, const HeadSpec& from) {
  for (size_t i = 0; i < from.needles.size(); ++i) {
    const Needle& needle = from.needles[i];
    check_mass(head, "needle", needle.mass);
    CRISP_CHECK(needle.width >= 1 && needle.position >= 0 && needle.width <= spec.num_tokens &&
                    needle.position <= spec.num_tokens - needle.width,
                "head ", head, ": needle at ", needle.position, " of width ", needle.width,
                " is outside the ", spec.num_tokens, " keys");
    const int64_t end = needle.rows.end < 0 ? spec.num_tokens : needle.rows.end;
    CRISP_CHECK(needle.rows.begin >= 0 && needle.rows.begin < end && end <= spec.num_tokens,
                "head ", head, ": needle rows [", needle.rows.begin, ", ", end,
                ") must be a non-empty part of [0, ", spec.num_tokens, ")");
    const int64_t last_block = std::max<int64_t>(spec.num_tokens - kBlock, 0);
    const int64_t measured =
        end > last_block ? last_block : std::max(needle.rows.begin, end - kBlock);
    CRISP_CHECK(needle.position + needle.width <= measured || needle.mass == 0, "head ", head,
                ": needle at ", needle.position, " must end before query ", measured,
                ", the first that is to see it");
    CRISP_CHECK(needle.position >= spec.num_sink_tokens || from.sink_mass == 0, "head ", head,
                ": needle at ", needle.position, " lies on the ", spec.num_sink_tokens,
                " sink tokens");
    for (size_t j = 0; j < i; ++j)
      CRISP_CHECK(needle.position != from.needles[j].position, "head ", head, ": two needles at ",
                  needle.position);
  }
}

void check_head(const LayerSpec& spec, int64_t head) {
  const HeadSpec& from = spec.heads[static_cast<size_t>(head)];
  check_mass(head, "sink", from.sink_mass);
  check_mass(head, "local", from.local_mass);
  check_mass(head, "cluster", from.cluster_mass);
  CRISP_CHECK(
      from.sink_mass == 0 || (spec.num_sink_tokens > 0 && spec.num_sink_tokens <= spec.num_tokens),
      "head ", head, ": num_sink_tokens is ", spec.num_sink_tokens,
      ", a sink needs from 1 to num_tokens, which is ", spec.num_tokens);
  CRISP_CHECK(from.window >= 1, "head ", head, ": window is ", from.window, ", must be at least 1");
  CRISP_CHECK(from.sigma >= 0 && from.sigma <= 4, "head ", head, ": sigma is ", from.sigma,
              " nats, must be from 0 to 4");
  CRISP_CHECK(from.drift >= 0 && from.drift <= 1, "head ", head, ": drift is ", from.drift,
              ", must be from 0 to 1");
  check_slashes(spec, head, from);
  check_needles(spec, head, from);
  double sum = from.sink_mass + from.local_mass + from.cluster_mass;
  for (const Slash& slash : from.slashes) sum += slash.mass;
  for (const Needle& needle : from.needles) sum += needle.mass;
  CRISP_CHECK(sum < 1, "head ", head, ": masses sum to ", sum, ", must leave some background");
}

void check_group(const LayerSpec& spec, int64_t kv_head) {
  const int64_t group_size = spec.num_q_heads / spec.num_kv_heads;
  const std::vector<GroupPlan::KeyNeedle> needles = group_needles(spec, kv_head);
  for (size_t i = 1; i < needles.size(); ++i)
    CRISP_CHECK(needles[i - 1].position + needles[i - 1].width <= needles[i].position, "kv head ",
                kv_head, ": needles at ", needles[i - 1].position, " and ", needles[i].position,
                " overlap, heads of a group must agree on them");
  bool drift = false, clusters = false;
  for (int64_t h = kv_head * group_size; h < (kv_head + 1) * group_size; ++h) {
    drift = drift || spec.heads[static_cast<size_t>(h)].drift > 0;
    clusters = clusters || spec.heads[static_cast<size_t>(h)].cluster_mass > 0;
  }
  const int64_t directions = 2 * pair_layout(spec.head_dim).content_pairs();
  const int64_t taken = static_cast<int64_t>(needles.size()) + (drift ? 1 : 0) + (clusters ? 1 : 0);
  CRISP_CHECK(taken <= directions, "kv head ", kv_head, ": ", needles.size(), " needles",
              drift ? " and drift" : "", clusters ? " and clusters" : "", " need ", taken,
              " directions, head_dim ", spec.head_dim, " has ", directions);
  const int64_t num_blocks = (spec.num_tokens + kBlock - 1) / kBlock;
  CRISP_CHECK(!clusters || topics_of_group(spec, kv_head) > 0, "kv head ", kv_head,
              ": clusters need at least ", blocks_per_topic(spec),
              " blocks besides the first and the last two, ", spec.num_tokens, " tokens have ",
              std::max<int64_t>(num_blocks - 3, 0));
}

}  // namespace

void check_spec(const LayerSpec& spec) {
  check_shape(spec);
  for (int64_t h = 0; h < spec.num_q_heads; ++h) check_head(spec, h);
  for (int64_t g = 0; g < spec.num_kv_heads; ++g) check_group(spec, g);
}

}  // namespace crisp::synth
