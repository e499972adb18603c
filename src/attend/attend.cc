// attend.cc - dispatch: which device, how many tiles, who takes the next one.
#include "attend/attend.h"

#include <algorithm>

#include "attend/tile_task.h"
#include "core/device.h"
#include "core/parallel.h"
#include "core/workspace.h"

namespace crisp {
namespace {

struct AttendScratch {
  int64_t* first_mask_row = nullptr;  // [num_segments + 1]
  float* tiles = nullptr;             // [num_threads][floats_per_worker]
  int64_t floats_per_worker = 0;
};

// Floats of one worker, whole cache lines, so that no two workers share one.
int64_t floats_per_worker(int64_t block_size, int64_t head_dim) {
  return 4 * block_size * head_dim + block_size * kMaxPanel + 2 * block_size;
}

AttendScratch carve(Workspace& workspace, const Attention& attention, int64_t block_size,
                    int num_threads) {
  AttendScratch scratch;
  scratch.first_mask_row = workspace.take<int64_t>(num_segments(attention) + 1);
  scratch.floats_per_worker = floats_per_worker(block_size, attention.q.head_dim);
  scratch.tiles = workspace.take<float>(scratch.floats_per_worker * num_threads);
  return scratch;
}

TileScratch tile_scratch(const AttendScratch& scratch, int worker, int64_t block_size,
                         int64_t head_dim) {
  float* next = scratch.tiles + worker * scratch.floats_per_worker;
  const auto take = [&next](int64_t count) {
    float* const begin = next;
    next += count;
    return begin;
  };
  TileScratch tile;
  tile.q_panels = take(block_size * head_dim);
  tile.o_panels = take(block_size * head_dim);
  tile.k_block = take(block_size * head_dim);
  tile.v_block = take(block_size * head_dim);
  tile.scores = take(block_size * kMaxPanel);
  tile.row_max = take(block_size);
  tile.row_sum = take(block_size);
  return tile;
}

// One attend() on the CPU: what a worker needs to turn a tile number into a TileTask.
struct CpuCall {
  const Attention& attention;
  const BlockMask& mask;
  const Tensor& out;
  float* lse;
  const int64_t* first_mask_row;  // [num_segments + 1]

  TileTask task(int64_t tile) const;
};

// Tiles are numbered head by head, so that a head's keys stay in cache, and within a head from the
// last row, the longest under the causal mask, to the first: long tiles never start last.
TileTask CpuCall::task(int64_t tile) const {
  const int64_t num_rows = mask.num_q_blocks;
  const int64_t head = tile / num_rows;
  const int64_t mask_row = num_rows - 1 - tile % num_rows;
  const int64_t* const end = first_mask_row + num_segments(attention) + 1;
  const int64_t index = std::upper_bound(first_mask_row, end, mask_row) - first_mask_row - 1;

  TileTask task;
  task.segment = segment_shape(segment_at(attention, index), mask.block_size);
  const int64_t kv_head = head / group_size(attention);
  task.q = q_rows(attention, task.segment, head);
  task.k = k_rows(attention, task.segment, kv_head);
  task.v = v_rows(attention, task.segment, kv_head);
  task.block_size = mask.block_size;
  task.row = mask_row - first_mask_row[index];
  task.words = mask.words + (head * num_rows + mask_row) * mask.words_per_row();
  task.softmax_scale = attention.softmax_scale;
  task.causal = attention.causal;
  task.out_token_stride = out.token_stride;
  const int64_t out_element = task.segment.q_start * out.token_stride + head * out.head_stride;
  task.out = static_cast<std::byte*>(out.data) + out_element * element_bytes(out.dtype);
  task.lse = lse == nullptr ? nullptr : lse + head * attention.q.num_tokens + task.segment.q_start;
  return task;
}

}  // namespace

size_t attend_workspace_bytes(const Attention& attention, int64_t block_size,
                              const Context& context) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda) return attend_workspace_bytes_cuda(attention, block_size);
  }
  Workspace workspace = Workspace::counting();
  carve(workspace, attention, block_size, resolve_num_threads(context.num_threads));
  return workspace.peak_bytes();
}

void attend_blocks(const Attention& attention, const BlockMask& mask, const Tensor& out, float* lse,
                   const Context& context) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda)
      return attend_blocks_cuda(attention, mask, out, lse, context);
  }
  const int num_threads = resolve_num_threads(context.num_threads);
  Workspace workspace(context.workspace);
  const AttendScratch scratch = carve(workspace, attention, mask.block_size, num_threads);
  scratch.first_mask_row[0] = 0;
  for (int64_t s = 0; s < num_segments(attention); ++s) {
    scratch.first_mask_row[s + 1] =
        scratch.first_mask_row[s] +
        segment_shape(segment_at(attention, s), mask.block_size).num_q_blocks;
  }

  const CpuCall call{attention, mask, out, lse, scratch.first_mask_row};
  const AttendTile attend_tile = attend_tile_for_this_machine();
  parallel_for(num_threads, mask.num_heads * mask.num_q_blocks, [&](int worker, int64_t tile) {
    attend_tile(call.task(tile),
                tile_scratch(scratch, worker, mask.block_size, attention.q.head_dim));
  });
  if (context.on_stage != nullptr) context.on_stage(Stage::kAttend, context.on_stage_user);
}

}  // namespace crisp
