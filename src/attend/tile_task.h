// tile_task.h - the unit of attend's work on the CPU: one q_block of one query head.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

// Scratch of one worker, floats. Panels are [num_panels][head_dim][panel], see core/tile-inl.h.
struct TileScratch {
  float* q_panels = nullptr;  // block_size * head_dim
  float* o_panels = nullptr;  // block_size * head_dim
  float* row_max = nullptr;   // block_size, in log2 units
  float* row_sum = nullptr;   // block_size
  float* scores = nullptr;    // block_size * kMaxPanel
  float* k_block = nullptr;   // block_size * head_dim, used when K cannot be read in place
  float* v_block = nullptr;
};

struct TileTask {
  SegmentShape segment;
  HeadRows q, k, v;
  int64_t block_size = 0;
  int64_t row = 0;                  // of the segment's mask rows
  const uint32_t* words = nullptr;  // that row of the mask, for this head
  float softmax_scale = 0;
  bool causal = true;
  std::byte* out = nullptr;  // first query of the segment, this head
  int64_t out_token_stride = 0;
  float* lse = nullptr;  // likewise; null: unwanted
};

inline constexpr int64_t kMaxPanel = 32;  // of any compiled target: two AVX-512 vectors

// attend_cpu.cc: the same function for every compiled instruction set, and the one to use here.
using AttendTile = void (*)(const TileTask& task, const TileScratch& scratch);
AttendTile attend_tile_for_this_machine();

}  // namespace crisp
