// attend_sm90.cu - block-sparse attention forward for Hopper (sm_90a).
//
// A work tile is 128 queries of one head against the 128-key blocks its row of the mask keeps,
// visited from the diagonal downwards. One CTA per multiprocessor takes tiles until none are left;
// three warpgroups:
//   warpgroup 0   warp 0 takes tiles from a global counter, walks the bits of each row and copies K
//                 and V; warp 1 copies Q; warps 2 and 3 idle
//   warpgroups 1, 2   64 query rows each: S = Q K^T, softmax, O += P V
//
// Hand-offs (mbarriers, "full" = data is there, "empty" = slot may be overwritten):
//   tile  scheduler -> everyone   which tile comes next, and how many blocks it has
//   q     warp 1 -> one consumer  its 64 query rows
//   k, v  warp 0 -> consumers     one block each, in rings of kStages slots
// and named barriers: two with which the consumers take turns on the tensor cores, one with which
// they agree that the values past a segment's last key are cleared.
//
// A consumer never drains at a tile boundary: the first Q K^T of the next tile is issued together
// with the last P V of this one, and the finished tile is written while the next one already runs.
// docs/attend-sm90.md has the figures and what was tried.
#include <algorithm>

#include "attend/attend_cuda.h"
#include "attend/schedule_sm90.cuh"
#include "attend/tile_sm90.cuh"
#include "core/cuda.h"
#include "core/sm90.cuh"
#include "core/tensor_map.h"

namespace crisp::attend_sm90 {
namespace {

constexpr int kRows = 64;      // query rows per consumer warpgroup
constexpr int kTileSlots = 2;  // work tiles in flight between scheduler and consumers
constexpr int kThreads = 384;
constexpr int kHalfColumns = 64;  // what 128 swizzled bytes hold
// 40 x 128 + 2 x 232 x 128 = 504 x 128: what 168 per thread at entry leave to share out.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <int kDim>
struct alignas(1024) SharedMemoryPlan {
  static constexpr int kStages = kDim == 128 ? 3 : 6;
  static constexpr int kHalves = kDim / kHalfColumns;
  static constexpr uint32_t kHalfTile = kBlock * 128, kHalfQuery = kRows * 128;  // bytes
  static constexpr uint32_t kTileBytes = kHalves * kHalfTile, kQueryBytes = kHalves * kHalfQuery;

  uint8_t q[2][kQueryBytes];       // per consumer: [column half][row][64], 128-byte swizzle
  uint8_t k[kStages][kTileBytes];  // [column half][key][64], 128-byte swizzle
  uint8_t v[kStages][kTileBytes];
  WorkTile tile[kTileSlots];
  Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
  Barrier q_full[2], q_empty[2];
  Barrier k_full[kStages], k_empty[kStages];
  Barrier v_full[kStages], v_empty[kStages];
};
template <int kDim>
constexpr size_t kSharedBytes = sizeof(SharedMemoryPlan<kDim>) + 1024;  // + slack to align it
static_assert(kSharedBytes<128> <= 232448 && kSharedBytes<64> <= 232448);

enum NamedBarrier { kTurn = 1, kOtherTurn = 2, kCleared = 3 };

// ---- the second product; the first is issue_scores of sm90.cuh

template <class Element, int kDim>
CRISP_DEVICE void issue_output(float (&o)[kDim / 2], const uint32_t (&p)[32], uint64_t v) {
  wgmma_fence();  // o += P V
#pragma unroll
  for (int i = 0; i < 8; ++i)  // 16 keys at a time
    wgmma_register_a<Element>(o, p + 4 * i, v + descriptor_step(i * 2048));
  wgmma_commit();
}

// ---- one finished 64-row tile: normalise, write, and list it if its softmax was not safe

template <class Element, int kDim, Softmax kSoftmax>
CRISP_DEVICE void store_tile(const float (&o)[kDim / 2], const float (&shift)[2],
                             const float (&partial)[2], const Arguments& p, const WorkTile& tile,
                             int my_row, int lane) {
  constexpr float kLn2 = 0.69314718055994531f;
  const CudaAttend& call = p.call;
  const int quad = lane & 3;
  const float sums[2] = {quad_sum(partial[0]), quad_sum(partial[1])};
  const bool wanted[2] = {my_row >= tile.rows_begin && my_row < tile.rows_end,
                          my_row + 8 >= tile.rows_begin && my_row + 8 < tile.rows_end};
  if constexpr (kSoftmax == Softmax::kFixed) {
    const bool unsafe = (wanted[0] && !(sums[0] < kLargestSum<Element>)) ||  // also a NaN
                        (wanted[1] && !(sums[1] < kLargestSum<Element>));
    if (__any_sync(~0u, unsafe) && lane == 0) {
      const uint32_t bit = 1u << (tile.index & 31);
      if (!(atomicOr(p.redo_seen + (tile.index >> 5), bit) & bit))
        p.redo_tiles[atomicAdd(p.redo_count, 1)] = static_cast<uint32_t>(tile.index);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = tile.first_row + my_row + 8 * h;
    Element* out = static_cast<Element*>(call.out.data) + row * call.out.token_stride +
                   tile.head * call.out.head_stride;
    store_row<Element, kDim>(o + 2 * h, 1.f / sums[h], out, quad, wanted[h]);
    if (call.lse != nullptr && quad == 0 && wanted[h])
      call.lse[tile.head * call.num_q_tokens + row] = shift[h] * kLn2 + logf(sums[h]);
  }
}

template <class Element, int kDim, Softmax kSoftmax>
__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Plan = SharedMemoryPlan<kDim>;
  constexpr int kStages = Plan::kStages;
  extern __shared__ uint8_t raw[];
  Plan& shared =
      *reinterpret_cast<Plan*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const CudaAttend& call = p.call;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) & 3;
  const int lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kTileSlots; ++i) {
      init(shared.tile_full[i], 1);
      init(shared.tile_empty[i], 9);  // 8 consumer warps and warp 1
    }
    for (int i = 0; i < 2; ++i) init(shared.q_full[i], 1), init(shared.q_empty[i], 1);
    for (int i = 0; i < kStages; ++i) {
      init(shared.k_full[i], 1), init(shared.k_empty[i], 2);
      init(shared.v_full[i], 1), init(shared.v_empty[i], 2);
    }
    fence_barrier_init();
  }
  __syncthreads();
  // The launch that redoes tiles gets ready while the first one ends.
  if constexpr (kSoftmax == Softmax::kFixed)
    allow_next_kernel();
  else
    wait_for_previous_kernel();

  Ring<kTileSlots> tiles;
  auto next_tile = [&]() -> WorkTile {  // one lane reads the current work tile, for its warp
    WorkTile t;
    if (lane == 0) {
      wait(shared.tile_full[tiles.slot], tiles.parity);
      t = shared.tile[tiles.slot];
      arrive(shared.tile_empty[tiles.slot]);
    }
    tiles.advance();
    return from_first_lane(t);
  };

  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (warp == 0) {  // ---- scheduler, K and V
      Ring<kStages> ks, vs;
      const uint64_t policy = keep_in_l2();
      constexpr bool kRedo = kSoftmax == Softmax::kOnline;
      const int tile_count = kRedo ? *p.redo_count : call.num_tiles * call.num_q_heads;
      auto take = [&] { return lane == 0 ? atomicAdd(p.counter, 1) : 0; };
      auto publish = [&](const WorkTile& t) {
        wait(shared.tile_empty[tiles.slot], tiles.parity ^ 1);
        if (lane == 0) {
          shared.tile[tiles.slot] = t;
          arrive(shared.tile_full[tiles.slot]);
        }
        tiles.advance();
      };
      int t = __shfl_sync(~0u, take(), 0);
      while (t < tile_count) {
        const int later = take();  // consumed after this tile, so its latency is hidden
        TilePlace place;
        if constexpr (kRedo) {
          const int index = static_cast<int>(p.redo_tiles[t]);
          place = {index / call.num_tiles, index % call.num_tiles};
        } else {
          place = place_of(p, t);
        }
        const CudaSegment segment = segment_of_tile(call, place.tile);
        const int row_in_segment = place.tile - segment.first_tile;
        const int q_block = segment.first_q_block + row_in_segment;
        const int q_offset = max(segment.kv_len - segment.q_len, 0);
        const int first_query = q_block * kBlock - q_offset;  // of the segment; < 0 in a short row
        const int kv_blocks = (segment.kv_len + kBlock - 1) / kBlock;
        const int64_t mask_row = static_cast<int64_t>(place.head) * call.num_mask_rows +
                                 segment.first_mask_row + row_in_segment;
        const KeptBlocks kept{call.mask + mask_row * call.words_per_row,
                              call.causal ? min(q_block + 1, kv_blocks) : kv_blocks};
        WorkTile tile;
        tile.first_row = segment.q_start + first_query;
        tile.head = place.head;
        tile.blocks = kept.count(lane);
        tile.rows_begin = max(-first_query, 0);
        tile.rows_end = min(segment.q_len - first_query, kBlock);
        tile.index = place.head * call.num_tiles + place.tile;
        if (tile.blocks == 0) {
          write_empty<kDim>(call, tile, lane);
          t = __shfl_sync(~0u, later, 0);
          continue;
        }
        const int first_block = kept.highest();
        tile.first_keys = min(segment.kv_len - first_block * kBlock, kBlock);
        tile.on_diagonal = call.causal && first_block == q_block;
        publish(tile);

        const int kv_head = place.head / call.group_size;
        auto copy = [&](const CUtensorMap& map, uint8_t* to, Barrier& full, Barrier& empty,
                        uint32_t parity, int block) {
          wait(empty, parity ^ 1);
          if (lane == 0) arrive_expecting(full, Plan::kTileBytes);
          const int64_t first_key = segment.kv_start + static_cast<int64_t>(block) * kBlock;
          if (call.block_table == nullptr) {
            if (lane == 0)
              load_box(map, full, to, static_cast<int>(first_key), 0, kv_head, 0, policy);
          } else {  // one piece per lane; pieces never straddle a page
            const int pieces = kBlock / p.piece_rows;
            const int half = lane & (Plan::kHalves - 1), piece = lane / Plan::kHalves;
            if (piece < pieces) {
              const int row = piece * p.piece_rows;
              const int64_t key = first_key + row;
              // Past the last key lies no page: such a piece reads as NaN, like a bad page id. Its
              // scores are hidden and its values cleared.
              const int page =
                  block * kBlock + row < segment.kv_len
                      ? __ldg(call.block_table + segment.page_row * call.table_row_stride +
                              key / call.page_size)
                      : -1;
              load_box(map, full, to + half * Plan::kHalfTile + row * 128,
                       static_cast<int>(key % call.page_size), half, kv_head, page, policy);
            }
          }
          __syncwarp();
        };
        auto copy_k = [&](int j) {
          copy(k_map, shared.k[ks.slot], shared.k_full[ks.slot], shared.k_empty[ks.slot], ks.parity,
               j);
          ks.advance();
        };
        auto copy_v = [&](int j) {
          copy(v_map, shared.v[vs.slot], shared.v_full[vs.slot], shared.v_empty[vs.slot], vs.parity,
               j);
          vs.advance();
        };
        int waiting_v = -1;  // K runs one block ahead of V, as the consumers need it
        kept.descend([&](int j) {
          copy_k(j);
          if (waiting_v >= 0) copy_v(waiting_v);
          waiting_v = j;
        });
        copy_v(waiting_v);
        t = __shfl_sync(~0u, later, 0);
      }
      WorkTile end{};
      publish(end);
    } else if (warp == 1) {  // ---- Q
      const uint64_t policy = stream_through_l2();
      for (uint32_t parity = 0;; parity ^= 1) {
        const WorkTile t = next_tile();
        if (t.blocks == 0) break;
        if (lane == 0) {
          const int row = static_cast<int>(t.first_row);
          prefetch_box(q_map, row, t.head);
          prefetch_box(q_map, row + kRows, t.head);
          for (int c = 0; c < 2; ++c) {
            wait(shared.q_empty[c], parity ^ 1);
            arrive_expecting(shared.q_full[c], Plan::kQueryBytes);
            load_box(q_map, shared.q_full[c], shared.q[c], row + c * kRows, 0, t.head, 0, policy);
          }
        }
        __syncwarp();
      }
    }
  } else {  // ---- consumers
    acquire_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const bool leader = (threadIdx.x & 127) == 0;
    const int my_turn = kTurn + consumer, other_turn = kOtherTurn - consumer;
    const int my_row = consumer * kRows + warp * 16 + (lane >> 2);  // within the tile
    const uint64_t q_desc = matrix_descriptor(shared_address(shared.q[consumer]), 16, 1024);
    const uint64_t k_desc = matrix_descriptor(shared_address(shared.k[0]), 16, 1024);
    const uint64_t v_desc = matrix_descriptor(shared_address(shared.v[0]), Plan::kHalfTile, 1024);
    Ring<kStages> ks, vs;
    uint32_t q_parity = 0;

    float s[64], o[kDim / 2], top[2], shift[2], sum[2];
    uint32_t probability[32];

    auto wait_k = [&] { wait(shared.k_full[ks.slot], ks.parity); };
    auto wait_v = [&] { wait(shared.v_full[vs.slot], vs.parity); };
    auto scores = [&] {
      issue_scores<Element, kDim>(s, q_desc, k_desc + descriptor_step(Plan::kTileBytes) * ks.slot);
    };
    auto output = [&] {
      issue_output<Element, kDim>(o, probability,
                                  v_desc + descriptor_step(Plan::kTileBytes) * vs.slot);
    };
    auto take_q = [&] { wait(shared.q_full[consumer], q_parity); };
    auto release_q = [&] {
      if (leader) arrive(shared.q_empty[consumer]);
      q_parity ^= 1;
    };
    auto release_k = [&] {
      if (leader) arrive(shared.k_empty[ks.slot]);
      ks.advance();
    };
    auto release_v = [&] {
      if (leader) arrive(shared.v_empty[vs.slot]);
      vs.advance();
    };
    auto begin_turn = [&] { named_sync<256>(my_turn); };
    auto end_turn = [&] { named_arrive<256>(other_turn); };
    auto set_shift = [&] {  // a row that has seen nothing but -inf subtracts 0
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shift[h] = top[h] * p.scale_log2;
        if constexpr (kSoftmax == Softmax::kFixed)
          shift[h] += kReferenceBias<Element>;
        else if (top[h] == -INFINITY)
          shift[h] = 0.f;
      }
    };
    auto first_softmax = [&](const WorkTile& t) {  // its block alone may hold hidden keys
      if (t.on_diagonal || t.first_keys < kBlock) {
        int limit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          limit[h] = t.on_diagonal ? min(my_row + 8 * h + 1, t.first_keys) : t.first_keys;
        hide_columns(s, limit, (lane & 3) * 2);
      }
      row_maxima(s, top);
      set_shift();
      exponentiate(s, shift, p.scale_log2, sum);
    };
    // Rows of V past the segment's last key belong to somebody else: 0 x NaN would be NaN.
    auto clear_values = [&](const WorkTile& t) {
      if (t.first_keys == kBlock) return;
      wait_v();
      uint8_t* v = shared.v[vs.slot];
      const int per_half = (kBlock - t.first_keys) * 8;  // 16-byte chunks
      for (int i = threadIdx.x - 128; i < per_half * Plan::kHalves; i += 256) {
        const int half = i >= per_half, chunk = i - half * per_half;
        *reinterpret_cast<uint4*>(v + half * Plan::kHalfTile + t.first_keys * 128 + chunk * 16) =
            make_uint4(0, 0, 0, 0);
      }
      fence_async_proxy();
      named_sync<256>(kCleared);
    };

    WorkTile tile = next_tile();
    if (tile.blocks) {
      if (consumer == 1) named_arrive<256>(kTurn);  // consumer 0 goes first
      take_q();
      wait_k();
      scores();
      wgmma_wait<0>();
      results_ready(s);
      release_k();
      first_softmax(tile);
      clear_values(tile);
      pack_probabilities<Element>(probability, s);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] = 0.f;

      while (true) {
#pragma unroll 1
        for (int left = tile.blocks - 1; left > 0; --left) {
          wait_k();
          begin_turn();
          scores();  // block j
          wait_v();
          output();  // block j - 1
          end_turn();
          wgmma_wait<1>();
          results_ready(s);
          release_k();
          float alpha[2], part[2];
          bool moved = false;
          if constexpr (kSoftmax == Softmax::kFixed) {
            exponentiate(s, shift, p.scale_log2, part);
            sum[0] += part[0], sum[1] += part[1];
          } else {
            const float old_shift[2] = {shift[0], shift[1]}, old_top[2] = {top[0], top[1]};
            row_maxima(s, top);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              top[h] = fmaxf(old_top[h], top[h]);
              moved |= top[h] != old_top[h];
            }
            set_shift();
#pragma unroll
            for (int h = 0; h < 2; ++h)  // nothing seen before: nothing to keep
              alpha[h] = old_top[h] == -INFINITY ? 0.f : exp2_fast(old_shift[h] - shift[h]);
            exponentiate(s, shift, p.scale_log2, part);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              sum[h] = top[h] == old_top[h] ? sum[h] + part[h] : fmaf(sum[h], alpha[h], part[h]);
          }
          finish_before_wait(sum[0] + sum[1], &shared.tile[0]);
          wgmma_wait<0>();
          results_ready(o);
          release_v();
          pack_probabilities<Element>(probability, s);
          if constexpr (kSoftmax == Softmax::kOnline) {
            if (__any_sync(~0u, moved)) {
#pragma unroll
              for (int i = 0; i < kDim / 2; ++i) {
                const int h = (i >> 1) & 1;
                if (alpha[h] != 1.f) o[i] *= alpha[h];
              }
            }
          }
        }
        release_q();

        const WorkTile done = tile;
        tile = next_tile();
        if (tile.blocks == 0) {
          wait_v();
          output();
          wgmma_wait<0>();
          results_ready(o);
          release_v();
          store_tile<Element, kDim, kSoftmax>(o, shift, sum, p, done, my_row, lane);
          break;
        }
        take_q();
        wait_k();
        begin_turn();
        scores();  // first block of the next tile
        wait_v();
        output();  // last block of this tile
        end_turn();
        wgmma_wait<1>();
        results_ready(s);
        release_k();
        const float done_shift[2] = {shift[0], shift[1]}, done_sum[2] = {sum[0], sum[1]};
        first_softmax(tile);
        finish_before_wait(sum[0] + sum[1] + done_sum[0], &shared.tile[0]);
        wgmma_wait<0>();
        results_ready(o);
        release_v();
        clear_values(tile);
        pack_probabilities<Element>(probability, s);
        store_tile<Element, kDim, kSoftmax>(o, done_shift, done_sum, p, done, my_row, lane);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] = 0.f;
      }
    }
  }
#endif  // __CUDA_ARCH_FEAT_SM90_ALL
}

// ---- host

// Tokens per copy: a block, or where keys are paged the largest power of two that never straddles
// a page.
int piece_rows_of(const CudaAttend& call) {
  if (call.block_table == nullptr) return kBlock;
  return std::min({call.page_size & -call.page_size, call.kv_start_alignment, kBlock});
}

int multiprocessors() {
  int device = 0, count = 0;
  CRISP_CUDA_CHECK(cudaGetDevice(&device));
  CRISP_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Heads that are scheduled together: whole kv groups whose keys and values fit in L2 side by side,
// or one head after the other where not even one group's do.
int heads_per_section(const CudaAttend& call) {
  constexpr int64_t kL2Bytes = int64_t{32} << 20;
  const int64_t kv_bytes = int64_t{call.words_per_row} * 64 * kBlock * call.head_dim * 2 * 2;
  const int64_t kv_heads = kL2Bytes / kv_bytes;
  if (kv_heads == 0) return 1;
  return static_cast<int>(std::min<int64_t>(kv_heads * call.group_size, call.num_q_heads));
}

// The tensors of a call as maps see them.
struct MapTensors {
  MapTensor q, k, v, out;
};
MapTensors map_tensors(const CudaAttend& call) {
  const bool paged = call.block_table != nullptr;
  const auto see = [&](const CudaTensor& tensor, int64_t tokens, int64_t heads, int64_t pages) {
    return MapTensor{
        tensor.data, tensor.token_stride, tensor.head_stride, tensor.page_stride, tokens, heads,
        pages,       call.head_dim,       call.dtype};
  };
  const int64_t q_heads = call.num_q_heads, kv_heads = q_heads / call.group_size;
  const int64_t kv_tokens = paged ? call.page_size : call.num_kv_tokens;
  const int64_t pages = paged ? call.num_pages : 1;
  return {see(call.q, call.num_q_tokens, q_heads, 1), see(call.k, kv_tokens, kv_heads, pages),
          see(call.v, kv_tokens, kv_heads, pages), see(call.out, call.num_q_tokens, q_heads, 1)};
}

template <class Element, int kDim>
void launch(const CudaAttend& call, Arguments arguments, cudaStream_t stream) {
  constexpr int kHalves = SharedMemoryPlan<kDim>::kHalves;
  const bool paged = call.block_table != nullptr;
  const MapTensors tensors = map_tensors(call);
  const auto kv_map = [&](const MapTensor& tensor) {
    return make_tensor_map(tensor, arguments.piece_rows, paged ? 1 : kHalves, paged);
  };
  const CUtensorMap q_map = make_tensor_map(tensors.q, kRows, kHalves, false);
  const CUtensorMap k_map = kv_map(tensors.k), v_map = kv_map(tensors.v);
  const int64_t tiles = int64_t{call.num_tiles} * call.num_q_heads;
  const int ctas = static_cast<int>(std::min<int64_t>(multiprocessors(), tiles));
  const auto run = [&](auto kernel, bool may_start_early) {
    CRISP_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(kSharedBytes<kDim>)));
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes<kDim>;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = may_start_early ? 1 : 0;
    CRISP_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, q_map, k_map, v_map, arguments));
    ++arguments.counter;  // each launch has its own
  };
  run(attend_kernel<Element, kDim, Softmax::kFixed>, false);
  run(attend_kernel<Element, kDim, Softmax::kOnline>, true);
}

}  // namespace

Scratch carve(Workspace& workspace, int64_t num_tiles, int64_t num_q_heads) {
  const int64_t tiles = num_tiles * num_q_heads, seen_words = (tiles + 31) / 32;
  Scratch scratch;
  scratch.counter_bytes = (4 + seen_words) * static_cast<int64_t>(sizeof(int32_t));
  scratch.counters = workspace.take<int32_t>(4 + seen_words);
  scratch.redo_tiles = workspace.take<uint32_t>(tiles);
  return scratch;
}

const char* why_not(const CudaAttend& call) {
  constexpr int64_t kMaxCoordinate = (int64_t{1} << 31) - 256;
  if (call.head_dim != 64 && call.head_dim != 128) return "head_dim is neither 64 nor 128";
  if (call.block_size != kBlock) return "block_size is not 128";
  if (call.num_q_tokens > kMaxCoordinate || call.num_kv_tokens > kMaxCoordinate)
    return "there are more than 2^31 - 256 tokens";
  if (call.num_kv_tokens == 0) return "there are no keys";
  const MapTensors tensors = map_tensors(call);
  for (const MapTensor& tensor : {tensors.q, tensors.k, tensors.v, tensors.out}) {
    if (!is_mappable(tensor)) return "rows are not all multiples of 16 bytes apart";
  }
  if (piece_rows_of(call) < 16)
    return "pages, or where segments start in them, are no multiples of 16 tokens";
  return nullptr;
}

void enqueue(const CudaAttend& call, const Scratch& scratch, cudaStream_t stream) {
  if (call.num_tiles == 0) return;
  constexpr float kLog2E = 1.4426950408889634f;
  Arguments arguments{};
  arguments.call = call;
  arguments.counter = scratch.counters;
  arguments.redo_count = scratch.counters + 2;
  arguments.redo_seen = reinterpret_cast<uint32_t*>(scratch.counters + 4);
  arguments.redo_tiles = scratch.redo_tiles;
  arguments.section = heads_per_section(call);
  arguments.piece_rows = piece_rows_of(call);
  arguments.scale_log2 = call.softmax_scale * kLog2E;
  const bool half = call.dtype == DType::kFloat16;
  if (call.head_dim == 128) {
    half ? launch<__half, 128>(call, arguments, stream)
         : launch<__nv_bfloat16, 128>(call, arguments, stream);
  } else {
    half ? launch<__half, 64>(call, arguments, stream)
         : launch<__nv_bfloat16, 64>(call, arguments, stream);
  }
}

}  // namespace crisp::attend_sm90
