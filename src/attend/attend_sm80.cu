// attend_sm80.cu - attention over a block mask with mma.sync and cp.async: sm_80 and everything
// after it. One CTA of four warps computes one tile of queries of one head; a warp owns its rows
// from the scores to the output, so that the softmax never leaves it.
//
// Keys are walked downwards from the diagonal, 64 of them a step, over the union of the tile's mask
// rows. Their tiles K0 V0 K1 V1 ... pass through a ring of shared memory. A half-step uses one of
// them and refills the slot that the half-step before it has left:
//
//   half   waits for   then loads, ring of 3 (of 2)   and computes
//   K      K(i)        K(i+1)  (V(i))                 S = Q K(i), P = softmax(S)
//   V      V(i)        V(i+1)  (K(i+1))               O += P V(i)
//
// Three slots give a load two half-steps to arrive; 256 columns have room for two only.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attend/attend_cuda.h"
#include "attend/tile_sm80.cuh"
#include "core/cuda.h"
#include "core/sm80.cuh"

namespace crisp::attend_sm80 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 8;        // elements of 16 bytes; divides every head_dim
constexpr int kChunkBytes = 16;  // what one lane copies, and one row of an 8x8 matrix

// ---- tile sizes and shared memory

// Where a token of a paged tensor lies; negative page: nowhere.
struct Place {
  int32_t page, slot;
};

// kColumns: head_dim, rounded up to what an instance exists for.
template <class ElementType, int kColumns>
struct Config {
  using Element = ElementType;
  static constexpr int kCols = kColumns;
  static constexpr int kTileRows = kCols <= 128 ? 128 : 64;  // queries
  static constexpr int kWarpRows = kTileRows / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;  // m16 tiles of a warp
  static constexpr int kStages = kCols <= 128 ? 3 : 2;
  static constexpr int kCtasPerSm = kCols == 64 ? 3 : 2;

  // Everything in shared memory.
  struct Plan {
    alignas(128) uint16_t q[kTileRows][kCols];  // later the outputs, every warp in its own rows
    alignas(128) uint16_t ring[kStages][kStepKeys][kCols];
    Tile tile;                   // here, because the accumulators leave no registers for it
    Place places[2][kStepKeys];  // paged: of the keys of this step and the next, in turns
  };
  static_assert(sizeof(Plan) <= 99 * 1024, "must fit one CTA of sm_86, sm_89 and sm_120");
  static constexpr int kPitch = kCols * 2;  // bytes from row to row
  static constexpr uint32_t kSlotBytes = kStepKeys * kPitch;
  static constexpr uint32_t kLastSlot = (kStages - 1) * kSlotBytes;

  // Chunks of a row are permuted so that the same chunk of eight consecutive rows falls into all
  // eight 16-byte banks. A pitch of whole 128-byte lines needs eight permutations; at 192 bytes odd
  // and even rows differ already, and four are enough.
  static constexpr int kGroup = kCols % 64 == 0 ? 8 : 4;  // chunks permuted among themselves
  static __device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
    const int permutation = kGroup == 8 ? row % 8 : row / 2 % 4;
    return tile + row * kPitch + (chunk ^ permutation) * kChunkBytes;
  }
  // From the address of chunk 0 to that of chunk n, or from chunk 1 to n + 1 for even n: a lane
  // keeps one address per operand. NOTE: flips address bits, so tiles must be 128-byte aligned.
  static __device__ __forceinline__ uint32_t right_of(uint32_t address, int n) {
    return (address ^ (n % kGroup * kChunkBytes)) + n / kGroup * (kGroup * kChunkBytes);
  }

  // How the threads share a copy: kCopyChunks x kCopyRows of them a pass, one chunk each.
  static constexpr int kCopyChunks = kCols <= 128 ? kCols / kChunk : 16;
  static constexpr int kCopyRows = kThreads / kCopyChunks / 8 * 8;  // keeps the permutation
};

// ---- from global to shared memory

__device__ __forceinline__ uint4 all_of(uint32_t pair) {
  return make_uint4(pair, pair, pair, pair);
}

// cp_async for rows that do not start at 16 bytes; synchronous.
__device__ __forceinline__ void copy_chunk_by_elements(uint32_t to, const uint16_t* from,
                                                       bool present) {
  uint32_t pairs[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (present) pairs[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
  }
  sm80::store_shared(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
}

// Where the rows of a tile lie, of one head: the address of element `column` of row `row` + `more`,
// null if that is nowhere. Rows not `wanted` may be anywhere: they are not read.
struct ContiguousRows {
  static constexpr bool kMayMiss = false;
  const uint16_t* first_row;
  int64_t stride;
  __device__ __forceinline__ const uint16_t* operator()(int row, int more, int column, bool) const {
    return first_row + row * stride + column + more * stride;  // `more` is known when unrolled
  }
};
struct PagedRows {
  static constexpr bool kMayMiss = true;
  const Place* places;  // shared memory, of the tile's rows
  const uint16_t* head;
  int64_t page_stride, token_stride;
  __device__ __forceinline__ const uint16_t* operator()(int row, int more, int column,
                                                        bool wanted) const {
    const Place place = places[row + more];
    if (!wanted) return head;
    if (place.page < 0) return nullptr;
    return head + place.page * page_stride + place.slot * token_stride + column;
  }
};

// Looks up the keys of a step. The caller sees to it that everybody waits before reading them.
__device__ __forceinline__ void find_places(const CudaAttend& call, const Tile& tile, int step,
                                            Place (&places)[kStepKeys]) {
  const int row = threadIdx.x, key = step * kStepKeys;
  if (step < 0 || row >= kStepKeys || row >= tile.kv_len - key) return;
  const uint32_t page_size = static_cast<uint32_t>(call.page_size);
  const uint32_t token = tile.first_slot + key + row;  // first_slot and key + row are below 2^31
  const int page = __ldg(tile.table + token / page_size);
  places[row].page = page < call.num_pages ? page : -1;
  places[row].slot = static_cast<int32_t>(token % page_size);
}

// Copies rows [begin, end) of a tile of kRows rows, columns [0, head_dim) of it. The rest becomes
// zero; rows that lie nowhere become NaN.
template <class Cfg, int kRows, class Rows>
__device__ __forceinline__ void copy_tile(uint32_t s_tile, const Rows& rows, int begin, int end,
                                          const Launch& launch) {
  constexpr int kPasses = kRows / Cfg::kCopyRows;
  const int chunk = threadIdx.x % Cfg::kCopyChunks, first = threadIdx.x / Cfg::kCopyChunks;
  const int column = chunk * kChunk, head_dim = launch.call.head_dim;
  const uint32_t s_chunk = Cfg::chunk_address(s_tile, first, chunk);
  const auto find_row = [&](int more) {
    return rows(first, more, column, first + more >= begin && first + more < end);
  };
  const auto copy_row = [&](int more, const uint16_t* g_row, auto copy_chunk) {
#pragma unroll
    for (int right = 0; right < Cfg::kCols; right += Cfg::kCopyChunks * kChunk) {
      const uint32_t s_to = s_chunk + more * Cfg::kPitch + right * 2;
      if (Rows::kMayMiss && g_row == nullptr) {
        sm80::store_shared(s_to, all_of(Cfg::Element::kNanPair));
      } else {
        copy_chunk(s_to, g_row + right,
                   first + more >= begin && first + more < end && column + right < head_dim);
      }
    }
  };
  if (Cfg::kCopyRows * Cfg::kCopyChunks < kThreads && first >= Cfg::kCopyRows) return;  // idle
  if (launch.aligned_in) {
    const uint16_t* g_rows[kPasses];  // found first, so that look-ups wait together
#pragma unroll
    for (int i = 0; i < kPasses; ++i) g_rows[i] = find_row(i * Cfg::kCopyRows);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) copy_row(i * Cfg::kCopyRows, g_rows[i], sm80::cp_async);
  } else {
#pragma unroll 1
    for (int more = 0; more < kRows; more += Cfg::kCopyRows) {
      copy_row(more, find_row(more), copy_chunk_by_elements);
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void load_q(const Launch& launch, const Tile& tile, uint32_t s_q) {
  const CudaTensor& q = launch.call.q;
  const auto* g_head = static_cast<const uint16_t*>(q.data) + tile.head * q.head_stride;
  const ContiguousRows rows{g_head + tile.first_row * q.token_stride, q.token_stride};
  copy_tile<Cfg, Cfg::kTileRows>(s_q, rows, tile.begin, tile.end, launch);
}

// One step of k or v; g_head is tile.k or tile.v.
template <class Cfg>
__device__ __forceinline__ void load_step(const Launch& launch, const Tile& tile,
                                          const CudaTensor& tensor, const uint16_t* g_head,
                                          int step, const Place* places, uint32_t s_slot) {
  const int key = step * kStepKeys, num_keys = tile.kv_len - key;
  if (launch.call.block_table == nullptr) {
    const ContiguousRows rows{g_head + key * tensor.token_stride, tensor.token_stride};
    copy_tile<Cfg, kStepKeys>(s_slot, rows, 0, num_keys, launch);
  } else {
    const PagedRows rows{places, g_head, tensor.page_stride, tensor.token_stride};
    copy_tile<Cfg, kStepKeys>(s_slot, rows, 0, num_keys, launch);
  }
}

// ---- the math of one warp and one step

// s[m][n]: scores of rows 16 m + lane / 4 (+ 8 in elements 2 and 3) and keys 8 n + 2 * (lane % 4)
// (+ 1 in elements 1 and 3).
template <class Cfg>
using Scores = float[Cfg::kRowTiles][kStepKeys / 8][4];
// The same as A operands: p[m][k] covers keys 16 k to 16 k + 15.
template <class Cfg>
using Weights = uint32_t[Cfg::kRowTiles][kStepKeys / 16][4];

template <class Cfg>
__device__ __forceinline__ void multiply_qk(Scores<Cfg>& s, uint32_t q_lane, uint32_t k_lane) {
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
#pragma unroll
  for (int k = 0; k < Cfg::kCols / 16; ++k) {
    const uint32_t q_columns = Cfg::right_of(q_lane, 2 * k);
    const uint32_t k_columns = Cfg::right_of(k_lane, 2 * k);
    uint32_t q[Cfg::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Cfg::kRowTiles; ++m)
      sm80::ldmatrix_x4(q[m], q_columns + m * (16 * Cfg::kPitch));
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; n += 2) {
      uint32_t keys[4];
      sm80::ldmatrix_x4(keys, k_columns + n * (8 * Cfg::kPitch));
#pragma unroll
      for (int m = 0; m < Cfg::kRowTiles; ++m) {
        sm80::mma_m16n8k16(typename Cfg::Element(), s[m][n], q[m], keys[0], keys[1]);
        sm80::mma_m16n8k16(typename Cfg::Element(), s[m][n + 1], q[m], keys[2], keys[3]);
      }
    }
  }
}

// Keys that a row may not see score -inf. `num_keys`: of this step; `diagonal`: the key, counted
// from the step's first, at the position of the warp's first row.
template <class Cfg>
__device__ __forceinline__ void hide_unseen(Scores<Cfg>& s, int num_keys, bool causal,
                                            int diagonal) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = diagonal + 16 * m + 8 * half + lane / 4;
      const int last = (causal ? min(position, num_keys - 1) : num_keys - 1) - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kStepKeys / 8; ++n) {
        if (8 * n > last) s[m][n][2 * half] = -INFINITY;
        if (8 * n + 1 > last) s[m][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Like Scores; columns of head_dim instead of keys.
template <class Cfg>
using Output = float[Cfg::kRowTiles][Cfg::kCols / 8][4];

// The running softmax of a lane's rows: row 16 m + lane / 4 + 8 half.
template <class Cfg>
struct RowState {
  float max[Cfg::kRowTiles][2];  // of the scores, log2 units
  float sum[Cfg::kRowTiles][2];  // over this lane's keys only
};

// Scores -> weights. Moves the maxima, and rescales o and the sums if any of the warp's has moved.
template <class Cfg>
__device__ __forceinline__ void softmax_step(Scores<Cfg>& s, Output<Cfg>& o, RowState<Cfg>& state,
                                             Weights<Cfg>& p, float scale_log2) {
  // Find the new maxima. Scaling is monotone, so it can wait until the maximum is known.
  float base[Cfg::kRowTiles][2], shrink[Cfg::kRowTiles][2];
  bool moved = false;
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[m][0][2 * half];
#pragma unroll
      for (int n = 0; n < kStepKeys / 8; ++n) {
        top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float old = state.max[m][half];
      top = fmaxf(old, top * scale_log2);
      state.max[m][half] = top;
      moved |= top != old;
      // A row that has seen nothing but -inf: its keys weigh 2^(-inf - 0) = 0, not NaN.
      base[m][half] = top == -INFINITY ? 0.0f : top;
      shrink[m][half] = sm80::exp2_approx(old - base[m][half]);
    }
  }
  // Rescale. A maximum that stayed gives exactly 1, so that skipping changes nothing.
  if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
    for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.sum[m][half] *= shrink[m][half];
#pragma unroll
        for (int n = 0; n < Cfg::kCols / 8; ++n) {
          o[m][n][2 * half] *= shrink[m][half];
          o[m][n][2 * half + 1] *= shrink[m][half];
        }
      }
    }
  }
  // Weigh.
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = sm80::exp2_approx(fmaf(s[m][n][2 * half], scale_log2, -base[m][half]));
        const float high =
            sm80::exp2_approx(fmaf(s[m][n][2 * half + 1], scale_log2, -base[m][half]));
        state.sum[m][half] += low + high;
        p[m][n / 2][n % 2 * 2 + half] = sm80::pack(typename Cfg::Element(), low, high);
      }
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void multiply_pv(Output<Cfg>& o, const Weights<Cfg>& p,
                                            uint32_t v_lane) {
#pragma unroll
  for (int k = 0; k < kStepKeys / 16; ++k) {
#pragma unroll
    for (int n = 0; n < Cfg::kCols / 8; n += 2) {
      uint32_t values[4];
      sm80::ldmatrix_x4_trans(values, Cfg::right_of(v_lane, n) + k * (16 * Cfg::kPitch));
#pragma unroll
      for (int m = 0; m < Cfg::kRowTiles; ++m) {
        sm80::mma_m16n8k16(typename Cfg::Element(), o[m][n], p[m][k], values[0], values[1]);
        sm80::mma_m16n8k16(typename Cfg::Element(), o[m][n + 1], p[m][k], values[2], values[3]);
      }
    }
  }
}

// ---- results

// Normalises the warp's rows and writes out and lse. s_out: its rows of Plan::q, which only this
// warp has read.
template <class Cfg>
__device__ __forceinline__ void write_rows(const Launch& launch, const Tile& tile, int warp_row,
                                           const Output<Cfg>& o, const RowState<Cfg>& state,
                                           uint32_t s_out) {
  constexpr float kLn2 = 0.6931471805599453f;
  const CudaAttend& call = launch.call;
  const int lane = threadIdx.x % 32;
  // Normalise into shared memory, to gather whole chunks.
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);  // empty: o is 0 as well
      const int in_warp = 16 * m + 8 * half + lane / 4, row = warp_row + in_warp;
      const uint32_t s_row = Cfg::chunk_address(s_out, in_warp, 0) + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < Cfg::kCols / 8; ++n) {
        sm80::store_shared(Cfg::right_of(s_row, n),
                           sm80::pack(typename Cfg::Element(), o[m][n][2 * half] * inverse,
                                      o[m][n][2 * half + 1] * inverse));
      }
      if (call.lse != nullptr && lane % 4 == 0 && row >= tile.begin && row < tile.end) {
        // Empty: -inf + log2(0) = -inf.
        call.lse[tile.head * call.num_q_tokens + tile.first_row + row] =
            kLn2 * (state.max[m][half] + log2f(sum));
      }
    }
  }
  __syncwarp();
  // Write the rows that are queries, columns below head_dim.
  constexpr int kChunks = Cfg::kCols / kChunk;
  auto* const g_head = static_cast<uint16_t*>(call.out.data) + tile.head * call.out.head_stride;
#pragma unroll 1
  for (int i = lane; i < Cfg::kWarpRows * kChunks; i += 32) {
    const int in_warp = i / kChunks, chunk = i % kChunks, row = warp_row + in_warp;
    if (row < tile.begin || row >= tile.end || chunk * kChunk >= call.head_dim) continue;
    const uint4 value = sm80::load_shared(Cfg::chunk_address(s_out, in_warp, chunk));
    uint16_t* const g_out =
        g_head + (tile.first_row + row) * call.out.token_stride + chunk * kChunk;
    if (launch.aligned_out) {
      *reinterpret_cast<uint4*>(g_out) = value;
    } else {
      const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        g_out[2 * j] = static_cast<uint16_t>(pairs[j]);
        g_out[2 * j + 1] = static_cast<uint16_t>(pairs[j] >> 16);
      }
    }
  }
}

// ---- the kernel

template <class Cfg>
__global__ void __launch_bounds__(kThreads, Cfg::kCtasPerSm)
    attend_kernel(const __grid_constant__ Launch launch) {
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Cfg::Plan*>(shared_bytes);
  const CudaAttend& call = launch.call;
  const Tile& tile = shared.tile;

  // Find the tile. The first of a chunk may hold nothing but positions before its queries.
  if (threadIdx.x == 0) shared.tile = find_tile(launch, blockIdx.x, Cfg::kTileRows);
  __syncthreads();
  if (tile.begin >= tile.end) return;

  // Name what this warp owns: rows [warp_row, warp_end) of the tile, which see keys up to one.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warp_row = warp * Cfg::kWarpRows;
  const int warp_end = min(tile.end, warp_row + Cfg::kWarpRows);
  int warp_last_key = -1;
  if (max(tile.begin, warp_row) < warp_end) {
    warp_last_key = call.causal ? min(tile.kv_len, tile.start + warp_end) - 1 : tile.kv_len - 1;
  }

  // Name the views of shared memory; of q, k and v where this lane's first ldmatrix row begins.
  const uint32_t s_q = sm80::shared_address(shared.q), s_ring = sm80::shared_address(shared.ring);
  const uint32_t s_warp_rows = s_q + warp_row * Cfg::kPitch;
  const uint32_t q_lane = Cfg::chunk_address(s_warp_rows, lane % 16, lane / 16);
  const uint32_t k_lane = Cfg::chunk_address(s_ring, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const uint32_t v_lane = Cfg::chunk_address(s_ring, lane % 16, lane / 16);

  // Loads a step of k or v into a slot; no step: an empty group, so that the counts stay.
  const auto load = [&](const CudaTensor& tensor, const uint16_t* g_head, int step, int turn,
                        uint32_t slot) {
    if (step >= 0) {
      load_step<Cfg>(launch, tile, tensor, g_head, step, shared.places[turn], s_ring + slot);
    }
    sm80::cp_async_commit();
  };
  const auto slot_before = [](uint32_t slot) {
    return slot == 0 ? Cfg::kLastSlot : slot - Cfg::kSlotBytes;
  };
  const auto slot_after = [](uint32_t slot) {
    return slot == Cfg::kLastSlot ? 0 : slot + Cfg::kSlotBytes;
  };

  Output<Cfg> o = {};
  RowState<Cfg> state;
#pragma unroll
  for (int m = 0; m < Cfg::kRowTiles; ++m) {
    state.max[m][0] = state.max[m][1] = -INFINITY;
    state.sum[m][0] = state.sum[m][1] = 0.0f;
  }

  // Load q, and fill the ring but for one slot.
  const bool paged = call.block_table != nullptr;
  int step = tile.steps.before((tile.last_key >> 6) + 1);
  if (paged) {
    find_places(call, tile, step, shared.places[0]);
    __syncthreads();
  }
  if (step >= 0) {
    load_q<Cfg>(launch, tile, s_q);
    load(call.k, tile.k, step, 0, 0);
    if (Cfg::kStages == 3) load(call.v, tile.v, step, 0, Cfg::kSlotBytes);
  }

  uint32_t slot = 0;
  int turn = 0;  // of places: this step's
  while (step >= 0) {
    const int next = tile.steps.before(step);
    const bool kept =
        step * kStepKeys <= warp_last_key && tile.steps.keeps(warp_row >= call.block_size, step);
    if (paged) find_places(call, tile, next, shared.places[turn ^ 1]);
    Weights<Cfg> p;

    // K half. Wait until every warp's part of K is there and every warp is done with the last V.
    sm80::cp_async_wait<Cfg::kStages - 2>();
    __syncthreads();
    if (Cfg::kStages == 3)
      load(call.k, tile.k, next, turn ^ 1, slot_before(slot));
    else
      load(call.v, tile.v, step, turn, slot_before(slot));
    if (kept) {
      Scores<Cfg> s;
      multiply_qk<Cfg>(s, q_lane, k_lane + slot);
      const int num_keys = tile.kv_len - step * kStepKeys;
      const int diagonal = tile.start - step * kStepKeys + warp_row;
      if (num_keys < kStepKeys || (call.causal && diagonal < kStepKeys - 1)) {
        hide_unseen<Cfg>(s, num_keys, call.causal, diagonal);
      }
      softmax_step<Cfg>(s, o, state, p, call.softmax_scale * kLog2E);
    }
    slot = slot_after(slot);

    // V half. Wait until every warp's part of V is there and every warp is done with this K.
    sm80::cp_async_wait<Cfg::kStages - 2>();
    __syncthreads();
    if (Cfg::kStages == 3)
      load(call.v, tile.v, next, turn ^ 1, slot_before(slot));
    else
      load(call.k, tile.k, next, turn ^ 1, slot_before(slot));
    if (kept) multiply_pv<Cfg>(o, p, v_lane + slot);
    slot = slot_after(slot);
    step = next;
    turn ^= 1;
  }
  write_rows<Cfg>(launch, tile, warp_row, o, state, s_warp_rows);
}

// ---- launch

bool aligned(const CudaTensor& tensor, bool paged) {
  const int64_t strides =
      tensor.token_stride | tensor.head_stride | (paged ? tensor.page_stride : 0);
  return (reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0) && strides % kChunk == 0;
}

// Heads of one section: whole kv groups whose keys and values fit a large L2 cache.
int section_heads(const CudaAttend& call) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t longest = int64_t{call.words_per_row} * 64 * call.block_size;
  const int64_t group_bytes = std::max<int64_t>(longest * call.head_dim * 4, 1);
  const int64_t groups =
      std::clamp<int64_t>(kCacheBytes / group_bytes, 1, call.num_q_heads / call.group_size);
  return static_cast<int>(groups) * call.group_size;
}

template <class Cfg>
void launch_kernel(const CudaAttend& call, cudaStream_t stream) {
  const auto kernel = attend_kernel<Cfg>;
  constexpr int kSharedBytes = sizeof(typename Cfg::Plan);
  CRISP_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  CRISP_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  const bool paged = call.block_table != nullptr;
  const Launch launch{call, section_heads(call),
                      aligned(call.q, false) && aligned(call.k, paged) && aligned(call.v, paged),
                      aligned(call.out, false)};
  const int64_t num_ctas = int64_t{call.num_tiles} * call.num_q_heads;
  if (num_ctas > INT_MAX) throw DeviceError("attention has 2^31 tiles or more");
  kernel<<<static_cast<unsigned>(num_ctas), kThreads, kSharedBytes, stream>>>(launch);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

template <class Element>
void enqueue_as(const CudaAttend& call, cudaStream_t stream) {
  if (call.head_dim <= 64) return launch_kernel<Config<Element, 64>>(call, stream);
  if (call.head_dim <= 96) return launch_kernel<Config<Element, 96>>(call, stream);
  if (call.head_dim <= 128) return launch_kernel<Config<Element, 128>>(call, stream);
  return launch_kernel<Config<Element, 256>>(call, stream);
}

}  // namespace

int tile_rows(int64_t head_dim) {
  return head_dim <= 128 ? Config<sm80::Float16, 128>::kTileRows
                         : Config<sm80::Float16, 256>::kTileRows;
}

void enqueue(const CudaAttend& call, cudaStream_t stream) {
  if (call.num_tiles == 0 || call.num_q_heads == 0) return;
  if (call.dtype == DType::kFloat16)
    enqueue_as<sm80::Float16>(call, stream);
  else
    enqueue_as<sm80::BFloat16>(call, stream);
}

}  // namespace crisp::attend_sm80
