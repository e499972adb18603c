// tile_sm80.cuh - what one CTA of attend_sm80.cu computes: which tile of queries, and which steps
// of keys. Knows nothing of how.
#pragma once

#include <cstdint>

#include "attend/attend_cuda.h"

namespace crisp::attend_sm80 {

constexpr int kStepKeys = 64;  // divides every block size

// What the kernel is launched with.
struct Launch {
  CudaAttend call;
  int32_t section_heads = 0;  // see find_tile
  bool aligned_in = false;    // every row of q, k and v starts at 16 bytes
  bool aligned_out = false;
};

// Key steps of a tile: step s is keys [64 s, 64 s + 64). A step is kept if a mask row of the tile
// keeps its block. Nothing but the step is remembered; the words come from L1.
struct KeptSteps {
  const uint64_t* row;  // first mask row of the tile
  int second;           // words to its second one: blocks of 64 under 128 queries; 0: none
  int shift;            // log2 of the steps of a block

  // The last kept step before `step`; -1: none.
  __device__ __forceinline__ int before(int step) const {
    int block = (step - 1) >> shift;
    if (block < 0) return -1;
    int word = block / 64;
    uint64_t bits = either(word) & (~uint64_t{0} >> (63 - block % 64));
    while (bits == 0) {
      if (--word < 0) return -1;
      bits = either(word);
    }
    block = word * 64 + 63 - __clzll(static_cast<long long>(bits));
    return min(step - 1, (block << shift) | shift);
  }
  // Whether the first or the second mask row keeps it.
  __device__ __forceinline__ bool keeps(bool in_second, int step) const {
    const int block = step >> shift;
    return (__ldg(row + (in_second ? second : 0) + block / 64) >> (block % 64)) & 1;
  }

 private:
  __device__ __forceinline__ uint64_t either(int word) const {
    return __ldg(row + word) | __ldg(row + word + second);
  }
};

// What one CTA computes, and from what. Rows count from `start`, a position among the segment's
// keys; rows of the segment's queries are [begin, end).
struct Tile {
  int head, start, begin, end, kv_len;
  int last_key;           // that any of its rows may see; -1: none
  int64_t first_row;      // row of q, out and lse that row 0 would be
  const uint16_t *k, *v;  // this head's; contiguous: of the segment's first token
  const int32_t* table;   // paged: entry of the page that holds the segment's first token
  uint32_t first_slot;    // and that token's place in the page
  KeptSteps steps;
};

// Sections of heads follow each other; within one, tiles run from the last, which has most keys in
// a causal call, to the first, each for every head of the section. A section holds whole kv groups,
// as many as the L2 cache can serve: few enough for their keys to be reused, and as many as
// possible, for the longest tiles of the last section to start early.
__device__ __forceinline__ Tile find_tile(const Launch& launch, uint32_t cta, int tile_rows) {
  const CudaAttend& call = launch.call;
  const uint32_t section_ctas = static_cast<uint32_t>(launch.section_heads) * call.num_tiles;
  const int first_head = static_cast<int>(cta / section_ctas) * launch.section_heads;
  const int heads = min(launch.section_heads, call.num_q_heads - first_head);
  const int place = static_cast<int>(cta % section_ctas);
  const int tile_index = call.num_tiles - 1 - place / heads;
  const CudaSegment segment = segment_of_tile(call, tile_index);

  Tile tile;
  tile.head = first_head + place % heads;
  tile.kv_len = segment.kv_len;
  const int first = (tile_index - segment.first_tile) * tile_rows;
  const int q_offset = max(segment.kv_len - segment.q_len, 0);
  tile.start = segment.first_q_block * call.block_size + first;
  tile.begin = max(q_offset - tile.start, 0);
  tile.end = min(q_offset + segment.q_len - tile.start, tile_rows);
  tile.first_row = segment.q_start + tile.start - q_offset;
  tile.last_key = tile.kv_len - 1;
  if (call.causal) tile.last_key = min(tile.last_key, tile.start + tile.end - 1);

  const int64_t mask_row =
      int64_t{tile.head} * call.num_mask_rows + segment.first_mask_row + first / call.block_size;
  tile.steps.row = call.mask + mask_row * call.words_per_row;
  tile.steps.second = tile.end > call.block_size ? call.words_per_row : 0;
  tile.steps.shift = call.block_size == 2 * kStepKeys ? 1 : 0;

  const int kv_head = tile.head / call.group_size;
  tile.k = static_cast<const uint16_t*>(call.k.data) + kv_head * call.k.head_stride;
  tile.v = static_cast<const uint16_t*>(call.v.data) + kv_head * call.v.head_stride;
  if (call.block_table == nullptr) {
    tile.k += segment.kv_start * call.k.token_stride;
    tile.v += segment.kv_start * call.v.token_stride;
  } else {
    tile.table = call.block_table + segment.page_row * call.table_row_stride +
                 segment.kv_start / call.page_size;
    tile.first_slot = static_cast<uint32_t>(segment.kv_start % call.page_size);
  }
  return tile;
}

}  // namespace crisp::attend_sm80
