// fill_mask.cc - rows of the mask and the report written on the GPU against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "mask/mask.h"
#include "on_device.h"
#include "values.h"

namespace crisp::test {
namespace {

using MaskCuda = Cuda;

struct Lengths {
  int64_t q_len, kv_len;
};

// A mask of several segments, all words random at first: of pooled heads those are pooled blocks.
struct MaskProblem {
  static constexpr int64_t kHeads = 8;
  Attention attention;
  std::vector<SegmentShape> segments;
  BlockMask mask;
  std::vector<uint32_t> words;

  MaskProblem(const std::vector<Lengths>& lengths, Random& random) {
    attention.q.num_heads = kHeads;
    attention.k.num_heads = 2;
    mask.num_heads = kHeads;
    for (const Lengths& length : lengths) {
      SegmentShape segment = segment_shape({0, length.q_len, 0, length.kv_len, 0}, kBlockSize);
      segment.first_mask_row = mask.num_q_blocks;
      mask.num_q_blocks += segment.num_q_blocks;
      mask.num_kv_blocks = std::max(mask.num_kv_blocks, segment.num_kv_blocks);
      segments.push_back(segment);
    }
    words.resize(at(mask.bytes() / 4));
    for (uint32_t& word : words) word = static_cast<uint32_t>(random.bits());
  }
};

std::vector<uint32_t> random_sets(int64_t num_heads, int64_t num_blocks, Random& random) {
  const int64_t num_words = ceil_div(num_blocks, 32);
  std::vector<uint32_t> words(at(num_heads * num_words));
  for (int64_t h = 0; h < num_heads; ++h) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (random.below(8) == 0) words[at(h * num_words + b / 32)] |= 1u << (b % 32);
    }
  }
  return words;
}

void expect_same_report(const std::vector<HeadReport>& got, const std::vector<HeadReport>& want) {
  for (size_t h = 0; h < want.size(); ++h) {
    SCOPED_TRACE(::testing::Message() << "report of head " << h);
    EXPECT_EQ(got[h].pattern, want[h].pattern);
    EXPECT_EQ(got[h].structural_mass, want[h].structural_mass);
    EXPECT_EQ(std::isnan(got[h].js_distance), std::isnan(want[h].js_distance));
    if (!std::isnan(want[h].js_distance)) {
      EXPECT_EQ(got[h].js_distance, want[h].js_distance);
    }
    EXPECT_EQ(got[h].num_vertical, want[h].num_vertical);
    EXPECT_EQ(got[h].num_slash, want[h].num_slash);
    EXPECT_EQ(got[h].num_blocks, want[h].num_blocks);
  }
}

// Fills heads [first, first + count) of a segment; twice on the GPU, as a replayed graph would.
void expect_filled_like_cpu(MaskProblem& p, size_t index, int64_t first, int64_t count,
                            bool has_distance, bool has_report, Random& random) {
  const HeadBatch batch{&p.attention, p.segments[index], static_cast<int64_t>(index), first, count};
  const int64_t num_blocks = batch.segment.num_kv_blocks;
  std::vector<Pattern> patterns = patterns_in_turn(count);
  std::vector<float> masses(at(count)), distances(at(count));
  for (float& mass : masses) mass = static_cast<float>(random.uniform());
  for (float& distance : distances) distance = static_cast<float>(random.uniform());
  std::vector<uint32_t> vertical = random_sets(count, num_blocks, random);
  std::vector<uint32_t> slash = random_sets(count, num_blocks, random);
  const OnDevice<uint32_t> device_words(p.words), device_vertical(vertical), device_slash(slash);
  std::vector<HeadReport> report(at(count));
  const OnDevice<HeadReport> device_report(report);
  ProxyMap map;
  map.structural_mass = masses.data();
  BlockMask mask = p.mask;
  mask.words = p.words.data();
  fill_mask_cpu({batch, mask, report.data(), 1}, map,
                {patterns.data(), has_distance ? distances.data() : nullptr},
                {num_blocks, vertical.data(), slash.data()});

  const OnDevice<Pattern> device_patterns(patterns);
  const OnDevice<float> device_masses(masses), device_distances(distances);
  map.structural_mass = device_masses.data();
  mask.words = device_words.data();
  for (int replay = 0; replay < 2; ++replay) {
    fill_mask_cuda({batch, mask, has_report ? device_report.data() : nullptr, 0}, map,
                   {device_patterns.data(), has_distance ? device_distances.data() : nullptr},
                   {num_blocks, device_vertical.data(), device_slash.data()}, nullptr);
    ASSERT_CUDA(cudaGetLastError());
    ASSERT_TRUE(device_words.read() == p.words) << "segment " << index << ", replay " << replay;
    if (has_report) expect_same_report(device_report.read(), report);
  }
}

TEST_F(MaskCuda, FillsLikeCpu) {
  Random random(46);
  const std::vector<std::vector<Lengths>> calls = {
      {{1, 1}},
      {{300, 300}, {0, 700}, {1, 9000}, {129, 129}},
      {{2048, 2048}, {2049, 2049}, {100, 8192}, {8200, 8300}},
      {{5000, 40000}, {40000, 40000}},
      {{65536, 65536}},
      {{3000, 524288}}};
  for (const std::vector<Lengths>& lengths : calls) {
    MaskProblem problem(lengths, random);
    for (size_t index = 0; index < lengths.size(); ++index) {
      expect_filled_like_cpu(problem, index, 0, 4, true, true, random);
      expect_filled_like_cpu(problem, index, 4, 3, false, true, random);
      expect_filled_like_cpu(problem, index, 7, 1, false, false, random);
    }
  }
}

}  // namespace
}  // namespace crisp::test
