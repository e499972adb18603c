// mask_test.cc - rows of the mask against the union written block by block.
#include "mask/mask.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "run.h"
#include "stage.h"

namespace crisp::test {
namespace {

// Segments without numbers: masks depend on shapes only.
struct Shapes {
  Inputs inputs;
  Attention attention;

  explicit Shapes(const Case& c) {
    inputs.config = c;
    int64_t q_tokens = 0, kv_tokens = 0;
    for (const Lengths& lengths : c.segments) {
      inputs.segments.push_back({q_tokens, lengths.q_len, kv_tokens, lengths.kv_len, 0});
      q_tokens += lengths.q_len;
      kv_tokens += lengths.kv_len;
    }
    const auto tensor = [&](int64_t tokens, int64_t heads) {
      return ConstTensor{nullptr, c.dtype, tokens, heads, 8, heads * 8, 8, 0};
    };
    attention.q = tensor(q_tokens, c.num_q_heads);
    attention.k = attention.v = tensor(kv_tokens, c.num_kv_heads);
    attention.softmax_scale = 1;
    attention.causal = c.causal;
    attention.segments = inputs.segments;
  }
  Shapes(const Shapes&) = delete;
};

// Owns what fill_mask reads, all of it random, for heads that are dense, vertical-slash, pooled in
// turn.
struct Choice {
  std::vector<Pattern> patterns;
  std::vector<float> structural, distance;
  std::vector<uint32_t> vertical, slash;
  std::vector<std::vector<bool>> is_vertical, is_slash;  // by key block, by Delta

  Choice(int64_t num_heads, int64_t num_blocks, double density, Random& random)
      : kept_blocks_(num_blocks) {
    const auto words = static_cast<size_t>(kept().words());
    vertical.assign(static_cast<size_t>(num_heads) * words, 0);
    slash = vertical;
    for (int64_t h = 0; h < num_heads; ++h) {
      patterns.push_back(static_cast<Pattern>(h % 3));
      structural.push_back(static_cast<float>(random.uniform()));
      distance.push_back(static_cast<float>(random.uniform()));
      is_vertical.emplace_back(num_blocks);
      is_slash.emplace_back(num_blocks);
      if (h % 3 == 0) continue;
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t reversed = num_blocks - 1 - b;
        const size_t at = static_cast<size_t>(h) * words;
        if (random.uniform() < density) {
          is_vertical.back()[static_cast<size_t>(b)] = true;
          vertical[at + static_cast<size_t>(b / 32)] |= 1u << (b % 32);
        }
        if (random.uniform() < density) {
          is_slash.back()[static_cast<size_t>(b)] = true;
          slash[at + static_cast<size_t>(reversed / 32)] |= 1u << (reversed % 32);
        }
      }
    }
  }
  Kept kept() { return {kept_blocks_, vertical.data(), slash.data()}; }
  Routes routes() { return {patterns.data(), distance.data()}; }

 private:
  int64_t kept_blocks_;
};

void fill(const HeadBatch& batch, Choice& choice, const BlockMask& mask, HeadReport* report,
          int num_threads) {
  ProxyMap map;
  map.structural_mass = choice.structural.data();
  Workspace none{std::span<std::byte>()};
  const Context context{.num_threads = num_threads};
  fill_mask(batch, map, choice.routes(), choice.kept(), mask, report, crisp::Run{context, none});
}

// Segments of q_len x kv_len tokens; heads of each are filled and compared with the definition.
void expect_union(const std::vector<Lengths>& segments, double density, uint64_t seed) {
  Case c;
  c.num_q_heads = 4;
  c.segments = segments;
  const Shapes call(c);
  const Inputs& inputs = call.inputs;
  OwnedMask mask(call.attention, 128);
  mask.memory().refill();
  const std::vector<MaskRows> all = mask_rows(inputs, 128);
  Random random(seed);
  for (size_t s = 0; s < segments.size(); ++s) {
    const MaskRows& rows = all[s];
    Choice choice(4, rows.num_kv_blocks, density, random);
    OwnedMask pooled(call.attention, 128);  // what select_pooled would have left in the rows
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      uint32_t* words = mask.mask.words + (2 * mask.mask.num_q_blocks + rows.first_row + row) *
                                              mask.mask.words_per_row();
      std::fill_n(words, mask.mask.words_per_row(), 0u);
      for (int64_t j = 0; j < rows.limit(row, true); ++j) {
        if (random.uniform() >= density) continue;
        mask.set(2, rows.first_row + row, j);
        pooled.set(2, rows.first_row + row, j);
      }
    }
    std::vector<HeadReport> report(4);
    fill(batch_of(call.attention, static_cast<int64_t>(s)), choice, mask.mask, report.data(), 2);
    for (int64_t h = 0; h < 4; ++h) {
      const auto& vertical = choice.is_vertical[static_cast<size_t>(h)];
      const auto& slash = choice.is_slash[static_cast<size_t>(h)];
      int64_t num_blocks = 0;
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        const int64_t i = rows.first_q_block + row;
        for (int64_t j = 0; j < 32 * mask.mask.words_per_row(); ++j) {
          const bool is_causal = j < rows.limit(row, true);
          const bool want = is_causal && (h % 3 == 0 || vertical[static_cast<size_t>(j)] ||
                                          slash[static_cast<size_t>(i - j)] ||
                                          (h == 2 && pooled.at(h, rows.first_row + row, j)));
          ASSERT_EQ(mask.at(h, rows.first_row + row, j), want)
              << "segment " << s << " head " << h << " row " << i << " block " << j << " of "
              << rows.num_kv_blocks;
          num_blocks += want;
        }
      }
      const HeadReport& got = report[static_cast<size_t>(h)];
      EXPECT_EQ(static_cast<int>(got.pattern), static_cast<int>(h % 3));
      EXPECT_EQ(got.num_blocks, num_blocks);
      EXPECT_EQ(got.num_vertical, std::count(vertical.begin(), vertical.end(), true));
      EXPECT_EQ(got.num_slash, std::count(slash.begin(), slash.end(), true));
      EXPECT_EQ(got.structural_mass, choice.structural[static_cast<size_t>(h)]);
      EXPECT_EQ(got.js_distance, choice.distance[static_cast<size_t>(h)]);
    }
  }
  EXPECT_TRUE(mask.memory().intact());
}

TEST(Mask, UnionForEveryNumberOfBlocks) {
  for (int64_t num_blocks = 1; num_blocks <= 130; ++num_blocks) {
    expect_union({{128 * num_blocks - 5, 128 * num_blocks - 5}}, 0.1, 11);
  }
}

TEST(Mask, ChunksAndSegmentsOfUnequalWidth) {
  expect_union({{300, 5000}, {1, 8200}, {700, 700}, {0, 400}, {128, 4224}, {129, 4225}}, 0.2, 12);
  expect_union({{1, 1}}, 1, 13);
  expect_union({{1000, 9000}}, 0, 14);
}

// The blocks that attend visits, for any block size and without causality.
void expect_all(Case c) {
  const Shapes call(c);
  const Inputs& inputs = call.inputs;
  OwnedMask mask(call.attention, c.block_size);
  mask.memory().refill();
  Workspace none{std::span<std::byte>()};
  const Context context;
  const crisp::Run run{context, none};
  const std::vector<MaskRows> all = mask_rows(inputs, c.block_size);
  for (size_t s = 0; s < all.size(); ++s) {
    std::vector<HeadReport> report(static_cast<size_t>(c.num_q_heads));
    const HeadBatch batch = batch_of(call.attention, static_cast<int64_t>(s), 0, -1, c.block_size);
    fill_dense(batch, mask.mask, report.data(), run);
    for (int64_t h = 0; h < c.num_q_heads; ++h) {
      int64_t num_blocks = 0;
      for (int64_t row = 0; row < all[s].num_rows; ++row) {
        const int64_t limit = all[s].limit(row, c.causal);
        num_blocks += limit;
        for (int64_t j = 0; j < 32 * mask.mask.words_per_row(); ++j) {
          ASSERT_EQ(mask.at(h, all[s].first_row + row, j), j < limit)
              << row << " " << j << " " << c;
        }
      }
      const HeadReport& got = report[static_cast<size_t>(h)];
      EXPECT_EQ(got.num_blocks, num_blocks) << c;
      EXPECT_EQ(got.pattern, Pattern::kDense);
      EXPECT_TRUE(std::isnan(got.structural_mass) && std::isnan(got.js_distance));
      EXPECT_EQ(got.num_vertical + got.num_slash, 0);
    }
  }
}

TEST(Mask, Dense) {
  Case c;
  c.num_q_heads = 2;
  for (const bool causal : {true, false}) {
    for (const int64_t block_size : {64, 128}) {
      c.causal = causal;
      c.block_size = block_size;
      c.segments = {{700, 700}, {130, 4200}, {0, 300}, {1, 1}};
      expect_all(c);
      c.segments = {{5, 0}, {64, 64}};
      expect_all(c);
    }
  }
}

TEST(Mask, CopiesWhatAttendVisits) {
  for (const bool causal : {true, false}) {
    Case c;
    c.num_q_heads = 3;
    c.causal = causal;
    c.segments = {{700, 900}, {130, 4200}, {40, 40}};
    const Shapes call(c);
    const Inputs& inputs = call.inputs;
    OwnedMask source(call.attention, 128), mask(call.attention, 128);
    Random random(21);
    for (uint32_t& word : source.memory().as<uint32_t>()) {
      word = static_cast<uint32_t>(random.bits());
    }
    mask.memory().refill();
    Workspace none{std::span<std::byte>()};
    const Context context;
    const crisp::Run run{context, none};
    const std::vector<MaskRows> all = mask_rows(inputs, 128);
    for (size_t s = 0; s < all.size(); ++s) {
      std::vector<HeadReport> report(3);
      copy_mask(batch_of(call.attention, static_cast<int64_t>(s)), source.mask, mask.mask,
                report.data(), run);
      for (int64_t h = 0; h < 3; ++h) {
        for (int64_t row = 0; row < all[s].num_rows; ++row) {
          for (int64_t j = 0; j < 32 * mask.mask.words_per_row(); ++j) {
            const int64_t at = all[s].first_row + row;
            ASSERT_EQ(mask.at(h, at, j), j < all[s].limit(row, causal) && source.at(h, at, j));
          }
        }
        EXPECT_EQ(report[static_cast<size_t>(h)].pattern, Pattern::kUserMask);
        EXPECT_EQ(report[static_cast<size_t>(h)].num_blocks,
                  mask.count(h, all[s].first_row, all[s].num_rows));
      }
    }
    // In place: the source is cut to the same blocks.
    for (size_t s = 0; s < all.size(); ++s) {
      copy_mask(batch_of(call.attention, static_cast<int64_t>(s)), source.mask, source.mask,
                nullptr, run);
    }
    EXPECT_TRUE(source == mask);
  }
}

}  // namespace
}  // namespace crisp::test
