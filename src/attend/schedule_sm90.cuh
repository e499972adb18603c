// schedule_sm90.cuh - which tile comes next, and which key blocks it visits: what the scheduler
// warp of attend_sm90.cu works out, so that consumers only ever learn a WorkTile.
#pragma once

#include "attend/attend_cuda.h"
#include "core/sm90.cuh"

namespace crisp::attend_sm90 {

inline constexpr int kBlock = 128;  // queries and keys per tile side

struct Arguments {
  CudaAttend call;
  int32_t* counter;     // next tile; zero before launch
  int32_t* redo_count;  // tiles whose fixed-reference softmax was not safe; zero before launch
  uint32_t* redo_seen;  // one bit per tile; zero before launch
  uint32_t* redo_tiles;
  int32_t section;     // heads scheduled together
  int32_t piece_rows;  // tokens per copy: 128, or less where k and v are paged
  float scale_log2;
};

// What the scheduler tells about a tile. blocks == 0: no more work.
struct WorkTile {
  int64_t first_row;  // of q, out and lse: row r of the tile is token first_row + r
  int head, blocks;
  int rows_begin, rows_end;  // rows of the tile that are queries of its segment
  int first_keys;            // keys of the block visited first
  int on_diagonal;           // it is the diagonal block: row r sees its keys [0, r]
  int index;                 // for the redo list
};

CRISP_DEVICE WorkTile from_first_lane(const WorkTile& t) {
  const auto of_first = [](auto x) { return __shfl_sync(~0u, x, 0); };
  return {of_first(t.first_row),   of_first(t.head),     of_first(t.blocks),
          of_first(t.rows_begin),  of_first(t.rows_end), of_first(t.first_keys),
          of_first(t.on_diagonal), of_first(t.index)};
}

// ---- which key blocks does a tile visit?

// word(i) holds key blocks 64 i .. 64 i + 63 of one row, clipped to what the row may see.
struct KeptBlocks {
  const uint64_t* words;
  int limit;  // key blocks [0, limit) are visible

  CRISP_DEVICE uint64_t word(int i) const {
    uint64_t w = __ldg(words + i);
    if (i == (limit - 1) >> 6) w &= ~0ull >> (63 - ((limit - 1) & 63));
    return w;
  }
  CRISP_DEVICE int count(int lane) const {
    int c = 0;
    for (int i = lane; i < (limit + 63) >> 6; i += 32) c += __popcll(word(i));
    return __reduce_add_sync(~0u, c);
  }
  template <class Visit>
  CRISP_DEVICE void descend(Visit visit) const {
    int i = (limit - 1) >> 6;
    uint64_t w = word(i), ahead = i > 0 ? word(i - 1) : 0;
    while (true) {
      while (!w) {
        if (--i < 0) return;
        w = ahead;
        ahead = i > 0 ? word(i - 1) : 0;
      }
      const int bit = 63 - __clzll(w);
      w ^= 1ull << bit;
      visit(i * 64 + bit);
    }
  }
  CRISP_DEVICE int highest() const {
    int i = (limit - 1) >> 6;
    uint64_t w = word(i);
    while (!w) w = word(--i);
    return i * 64 + 63 - __clzll(w);
  }
};

// Tile t of the launch: heads in sections, rows of a section from the longest to the shortest.
struct TilePlace {
  int head, tile;
};
CRISP_DEVICE TilePlace place_of(const Arguments& p, int t) {
  const int per_section = p.section * p.call.num_tiles, section = t / per_section;
  const int rest = t - section * per_section, first_head = section * p.section;
  const int heads = min(p.section, p.call.num_q_heads - first_head), row = rest / heads;
  return {first_head + rest - row * heads, p.call.num_tiles - 1 - row};
}

// A tile without blocks: output 0, lse -inf, by the scheduler's own warp.
template <int kDim>
CRISP_DEVICE void write_empty(const CudaAttend& call, const WorkTile& tile, int lane) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes
  auto* out = static_cast<uint16_t*>(call.out.data) + tile.head * call.out.head_stride;
  for (int i = lane; i < kBlock * kChunks; i += 32) {
    const int row = i / kChunks;
    if (row < tile.rows_begin || row >= tile.rows_end) continue;
    uint16_t* to = out + (tile.first_row + row) * call.out.token_stride + i % kChunks * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  if (call.lse == nullptr) return;
  float* lse = call.lse + tile.head * call.num_q_tokens + tile.first_row;
  for (int row = tile.rows_begin + lane; row < tile.rows_end; row += 32) lse[row] = -INFINITY;
}

}  // namespace crisp::attend_sm90
