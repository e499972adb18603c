// mask_cpu.cc - one task per head, whole words.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/mask_rows.h"
#include "core/parallel.h"
#include "mask/mask.h"

namespace crisp {
namespace {

constexpr float kNotComputed = std::numeric_limits<float>::quiet_NaN();

// The bits of word `word` that stand for blocks [0, limit).
uint32_t limit_bits(int64_t word, int64_t limit) {
  const int64_t count = std::clamp<int64_t>(limit - word * 32, 0, 32);
  return count == 32 ? ~0u : (uint32_t{1} << count) - 1;
}

// Writes every row of the head as bits_of(row, word) cut to the blocks attend visits; returns the
// number of bits set.
template <class BitsOf>
int64_t write_rows(const MaskJob& job, int64_t head, BitsOf&& bits_of) {
  const HeadBatch& batch = job.batch;
  const SegmentShape& segment = batch.segment;
  const int64_t words_per_row = job.mask.words_per_row();
  int64_t num_set = 0;
  for (int64_t row = 0; row < segment.num_q_blocks; ++row) {
    uint32_t* words = mask_row(job.mask, segment, batch.first_head + head, row);
    const int64_t limit = kv_block_limit(segment, row, batch.attention->causal);
    const int64_t num_words = ceil_div(limit, 32);
    for (int64_t word = 0; word < num_words; ++word) {
      const uint32_t bits = bits_of(row, word) & limit_bits(word, limit);
      words[word] = bits;
      num_set += std::popcount(bits);
    }
    std::fill(words + num_words, words + words_per_row, 0u);
  }
  return num_set;
}

int64_t count_bits(const uint32_t* words, int64_t num_words) {
  int64_t count = 0;
  for (int64_t word = 0; word < num_words; ++word) count += std::popcount(words[word]);
  return count;
}

// Word `word` of bits >> shift.
uint32_t shifted_word(const uint32_t* bits, int64_t num_words, int64_t shift, int64_t word) {
  const int64_t at = word + shift / 32, by = shift % 32;
  const uint32_t low = at < num_words ? bits[at] : 0;
  if (by == 0) return low;
  const uint32_t high = at + 1 < num_words ? bits[at + 1] : 0;
  return low >> by | high << (32 - by);
}

HeadReport fill_head(const MaskJob& job, const Routes& routes, const Kept& kept, int64_t head) {
  const SegmentShape& segment = job.batch.segment;
  const uint32_t* vertical = kept.vertical + head * kept.words();
  const uint32_t* slash = kept.slash + head * kept.words();
  HeadReport report;
  report.pattern = routes.pattern[head];
  if (report.pattern == Pattern::kDense) {
    report.num_blocks = write_rows(job, head, [](int64_t, int64_t) { return ~0u; });
    return report;
  }
  const bool has_pooled_rows = report.pattern == Pattern::kPooled;
  report.num_vertical = static_cast<int32_t>(count_bits(vertical, kept.words()));
  report.num_slash = static_cast<int32_t>(count_bits(slash, kept.words()));
  report.num_blocks = write_rows(job, head, [&](int64_t row, int64_t word) {
    const int64_t shift = kept.num_blocks - 1 - (segment.first_q_block + row);
    uint32_t bits = vertical[word] | shifted_word(slash, kept.words(), shift, word);
    if (has_pooled_rows) {
      bits |= mask_row(job.mask, segment, job.batch.first_head + head, row)[word];
    }
    return bits;
  });
  return report;
}

}  // namespace

void fill_mask_cpu(const MaskJob& job, const ProxyMap& map, const Routes& routes,
                   const Kept& kept) {
  parallel_for(job.num_threads, job.batch.num_heads, [&](int, int64_t head) {
    HeadReport report = fill_head(job, routes, kept, head);
    report.structural_mass = map.structural_mass[head];
    report.js_distance = routes.js_distance == nullptr ? kNotComputed : routes.js_distance[head];
    if (job.report != nullptr) job.report[head] = report;
  });
}

void fill_dense_cpu(const MaskJob& job) {
  parallel_for(job.num_threads, job.batch.num_heads, [&](int, int64_t head) {
    const int64_t num_blocks = write_rows(job, head, [](int64_t, int64_t) { return ~0u; });
    if (job.report == nullptr) return;
    job.report[head] = {Pattern::kDense, kNotComputed, kNotComputed, 0, 0, num_blocks};
  });
}

void copy_mask_cpu(const MaskJob& job, const BlockMask& source) {
  parallel_for(job.num_threads, job.batch.num_heads, [&](int, int64_t head) {
    const int64_t num_blocks = write_rows(job, head, [&](int64_t row, int64_t word) {
      return mask_row(source, job.batch.segment, job.batch.first_head + head, row)[word];
    });
    if (job.report == nullptr) return;
    job.report[head] = {Pattern::kUserMask, kNotComputed, kNotComputed, 0, 0, num_blocks};
  });
}

}  // namespace crisp
