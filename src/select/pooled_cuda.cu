// pooled_cuda.cu - the pooled prefix in one cooperative launch. Which heads are pooled is known on
// the device only, so the kernel walks over them by itself, a few at a time, in phases that the
// whole grid finishes together; a layer without pooled heads costs one empty launch.
#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>

#include "core/cuda.h"
#include "core/mask_rows.h"
#include "select/pooled_map.cuh"

namespace crisp {
namespace {

using namespace pooled_map;  // NOLINT(google-build-using-namespace): the other half of this file

// ---- passes over the rows

// Calls visit(slot, row) warp by warp and flush(slot) with the whole block after its last row of a
// slot, and after kSpreadValues entries. A block takes a run of rows, long and short ones by turns,
// so that it meets few slots.
template <class Visit, class Flush>
__device__ void for_each_row(const Arguments& a, const Heads& list, Visit visit, Flush flush) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t groups = (a.num_rows + kWarps - 1) / kWarps, total = list.slots * groups;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
  const int64_t entries = static_cast<int64_t>(kWarps) * a.num_cols;  // of an item, at most
  int64_t unflushed = 0;
  for (int64_t item = total * blockIdx.x / gridDim.x; item < end; ++item) {
    const auto slot = static_cast<int>(item / groups);
    const int64_t at = item % groups;
    const int64_t group = at % 2 == 0 ? at / 2 : groups - 1 - at / 2;
    const auto row = static_cast<int>(group * kWarps + warp);
    if (row < a.num_rows) visit(slot, row);
    unflushed += entries;
    const bool is_full = unflushed + entries > kSpreadValues;
    if (item + 1 == end || (item + 1) / groups != slot || is_full) {
      flush(slot);
      unflushed = 0;
    }
  }
}

// Calls visit(col, quad) with the entries [col, col + 4) of a row, four of them loaded ahead. All
// lanes call it equally often; entries from `limit` on are to be ignored.
template <class Visit>
__device__ __forceinline__ void for_each_quad(const float* row, int limit, Visit visit) {
  constexpr int kAhead = 4, kStep = 4 * kWarp;
  const int first = static_cast<int>(threadIdx.x) % kWarp * 4;
  for (int base = 0; base < limit; base += kAhead * kStep) {
    float4 quads[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int col = base + i * kStep + first;
      quads[i] = col < limit ? *reinterpret_cast<const float4*>(row + col) : float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * kStep < limit) visit(base + i * kStep + first, quads[i]);
    }
  }
}

__device__ void flush_histogram(const Arguments& a, Histogram& histogram, int slot, int digit) {
  using Word = unsigned long long;
  auto* counts = reinterpret_cast<Word*>(a.bins_of(slot, digit));
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < kMaxBins; bin += kThreads) {
    if (histogram.count[bin] == 0) continue;
    atomicAdd(counts + bin, Word{histogram.count[bin]});
    const auto low = static_cast<Word>(histogram.low_sum(bin));
    if (low != 0) atomicAdd(counts + kMaxBins + bin, low);
    histogram.count[bin] = histogram.low[bin] = histogram.carry[bin] = 0;
  }
  __syncthreads();
}

// A row's maximum, and its sum of exp2(score - maximum), equal in all lanes.
__device__ float2 softmax_of(const float* row, int limit) {
  float max = -INFINITY, sum = 0;
  for_each_quad(row, limit, [&](int col, float4 x) {
    if (col + 1 >= limit) x.y = -INFINITY;
    if (col + 2 >= limit) x.z = -INFINITY;
    if (col + 3 >= limit) x.w = -INFINITY;
    if (col >= limit) x.x = -INFINITY;
    const float new_max = fmaxf(fmaxf(max, fmaxf(x.x, x.y)), fmaxf(x.z, x.w));
    if (new_max > max) sum *= exp2_flushed(max - new_max);
    max = new_max;
    if (max == -INFINITY) return;
    sum += (exp2_flushed(x.x - max) + exp2_flushed(x.y - max)) +
           (exp2_flushed(x.z - max) + exp2_flushed(x.w - max));
  });
  float row_max = max;
  for (int step = 1; step < kWarp; step *= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(kAllLanes, row_max, step));
  }
  sum *= exp2_flushed(max - row_max);
  for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return {row_max, sum};
}

// Scores become masses, which are counted by their first digit.
__device__ void normalise(const Arguments& a, const Heads& list, Shared& shared) {
  clear(shared.histogram);
  __syncthreads();
  const auto visit = [&](int slot, int row) {
    float* entries = a.map_row(slot, row);
    const int limit = a.limit_of(row);
    const float2 softmax = softmax_of(entries, limit);
    bool is_finite = true;
    HeldBin held;
    for_each_quad(entries, limit, [&](int col, const float4& x) {
      const auto mass = [&](float score) { return exp2_flushed(score - softmax.x) / softmax.y; };
      const float4 y = {mass(x.x), mass(x.y), mass(x.z), mass(x.w)};
      const uint32_t bits[4] = {__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z),
                                __float_as_uint(y.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i >= limit) continue;
        if (bits[i] < kEndBits) {
          held.add(shared.histogram, bits[i]);
        } else {
          is_finite = false;
        }
      }
      if (col < limit) *reinterpret_cast<float4*>(entries + col) = y;
    });
    held.flush(shared.histogram);
    if (!is_finite) a.scratch.prefixes[slot].is_not_finite = 1;
  };
  for_each_row(a, list, visit, [&](int slot) { flush_histogram(a, shared.histogram, slot, 0); });
}

__device__ void count_digit(const Arguments& a, const Heads& list, Shared& shared, int digit) {
  clear(shared.histogram);
  __syncthreads();
  const int above = digit_shift(digit - 1);
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (prefix.is_not_finite != 0) return;
    const uint32_t cut = prefix.cut;
    const int limit = a.limit_of(row);
    for_each_quad(a.map_row(slot, row), limit, [&](int col, const float4& x) {
      const uint32_t bits[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                                __float_as_uint(x.w)};
      bool matches[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) matches[i] = col + i < limit && bits[i] >> above == cut;
      add_spread_values(shared.histogram, digit, bits, matches);
    });
  };
  for_each_row(a, list, visit,
               [&](int slot) { flush_histogram(a, shared.histogram, slot, digit); });
}

// The next digit of every slot's cut, and after the last how many equal entries belong to it.
__device__ void choose_digit(const Arguments& a, const Heads& list, Shared& shared, int digit) {
  for (int slot = static_cast<int>(blockIdx.x); slot < list.slots;
       slot += static_cast<int>(gridDim.x)) {
    const PooledPrefix before = a.scratch.prefixes[slot];
    if (before.is_not_finite != 0) {
      if (threadIdx.x == 0) a.pattern[list.of_slot(slot)] = Pattern::kDense;
      continue;
    }
    const uint64_t* bins = a.bins_of(slot, digit);
    const uint32_t prefix = before.cut << digit_width(digit);
    const auto bin_at = [&](int bin, uint64_t& count, double& sum) {
      count = bins[bin];
      sum = sum_of_bin((prefix | static_cast<uint32_t>(bin)) << digit_shift(digit), count,
                       bins[kMaxBins + bin]);
    };
    const bool is_first = digit == 0;
    const Target target = {is_first ? double{a.gamma} : before.target, is_first, false};
    const Crossing crossing = find_crossing<kThreads>(1 << digit_width(digit), bin_at,
                                                      before.covered, target, shared.crossing);
    if (threadIdx.x != 0) continue;
    PooledPrefix after = {prefix | crossing.bin, 0, crossing.above, crossing.target};
    if (digit == kDigits - 1) {
      const double mass = __uint_as_float(after.cut), need = after.target - after.covered;
      after.num_equal = crossing.count;
      after.num_ties = least_reaching(mass, crossing.count, need);
      const bool overshoots = static_cast<double>(after.num_ties) * mass > need;
      if (!a.is_inclusive && overshoots && after.num_ties > 0) --after.num_ties;
    }
    a.scratch.prefixes[slot] = after;
  }
}

// ---- the mask

// Some, not all, of the entries equal to the cut are kept: which depends on the rows before.
__device__ bool is_split(const PooledPrefix& prefix) {
  return prefix.is_not_finite == 0 && prefix.num_ties > 0 && prefix.num_ties < prefix.num_equal;
}

__device__ void count_equals(const Arguments& a, const Heads& list) {
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (!is_split(prefix)) return;
    const float cut = __uint_as_float(prefix.cut);
    const int limit = a.limit_of(row);
    int count = 0;
    for_each_quad(a.map_row(slot, row), limit, [&](int col, float4 x) {
      count += static_cast<int>(col < limit && x.x == cut) +
               static_cast<int>(col + 1 < limit && x.y == cut) +
               static_cast<int>(col + 2 < limit && x.z == cut) +
               static_cast<int>(col + 3 < limit && x.w == cut);
    });
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x % kWarp == 0) {
      a.scratch.row_equals[static_cast<int64_t>(slot) * a.num_rows + row] = count;
    }
  };
  for_each_row(a, list, visit, [](int) {});
}

// How many entries of the row that are equal to the cut are kept; the first ones.
__device__ int equals_kept(const Arguments& a, const PooledPrefix& prefix, int slot, int row) {
  if (!is_split(prefix)) return prefix.num_ties > 0 ? INT32_MAX : 0;
  const int32_t* counts = a.scratch.row_equals + static_cast<int64_t>(slot) * a.num_rows;
  uint64_t before = 0;
  for (int r = static_cast<int>(threadIdx.x) % kWarp; r < row; r += kWarp) {
    before += static_cast<uint64_t>(counts[r]);
  }
  for (int step = 1; step < kWarp; step *= 2) {
    before += __shfl_xor_sync(kAllLanes, before, step);
  }
  if (before >= prefix.num_ties) return 0;
  const uint64_t left = prefix.num_ties - before;
  return left < INT32_MAX ? static_cast<int>(left) : INT32_MAX;
}

__device__ void write_row(const Arguments& a, const float* entries, int limit, uint32_t cut,
                          int equals, uint32_t* words) {
  constexpr int kAhead = 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int base = 0; base < a.words_per_row; base += kWarp) {
    uint32_t mine = 0;  // lane l ends up with word base + l
    for (int step = 0; step < kWarp && (base + step) * kWarp < limit; step += kAhead) {
      uint32_t bits[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int col = (base + step + i) * kWarp + lane;
        bits[i] = col < limit ? __float_as_uint(entries[col]) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool is_inside = (base + step + i) * kWarp + lane < limit;
        const bool is_equal = is_inside && bits[i] == cut;
        const uint32_t equal = __ballot_sync(kAllLanes, is_equal);
        const bool is_kept = (is_inside && bits[i] > cut) ||
                             (is_equal && __popc(equal & ((1u << lane) - 1)) < equals);
        const uint32_t kept = __ballot_sync(kAllLanes, is_kept);
        equals = max(equals - __popc(equal), 0);
        if (lane == step + i) mine = kept;
      }
    }
    if (base + lane < a.words_per_row) words[base + lane] = mine;
  }
}

__device__ void write_rows(const Arguments& a, const Heads& list) {
  const auto visit = [&](int slot, int row) {
    const PooledPrefix& prefix = a.scratch.prefixes[slot];
    if (prefix.is_not_finite != 0) return;
    uint32_t* words = a.mask + list.of_slot(slot) * a.mask_head_stride +
                      static_cast<int64_t>(row) * a.words_per_row;
    write_row(a, a.map_row(slot, row), a.limit_of(row), prefix.cut,
              equals_kept(a, prefix, slot, row), words);
  };
  for_each_row(a, list, visit, [](int) {});
}

// No phase reads what another block writes in it. There is no sync between the last phase of some
// heads and the first of the next ones: write_rows reads maps, prefixes and row_equals,
// compute_means writes means and bins.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_prefixes(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  __shared__ Heads list;
  list_heads(a, list);
  if (list.count == 0) return;  // in every block: nobody changes a pattern before the first sync
  const auto grid = cooperative_groups::this_grid();
  for (int first = 0; first < list.count; first += static_cast<int>(a.scratch.num_heads)) {
    __syncthreads();
    if (threadIdx.x == 0) {
      list.first = first;
      list.slots = min(list.count - first, static_cast<int>(a.scratch.num_heads));
    }
    __syncthreads();
    compute_means(a, list);
    grid.sync();
    compute_scores(a, list, shared);
    grid.sync();
    normalise(a, list, shared);
    grid.sync();
    choose_digit(a, list, shared, 0);
    grid.sync();
    count_digit(a, list, shared, 1);
    grid.sync();
    choose_digit(a, list, shared, 1);
    grid.sync();
    count_digit(a, list, shared, 2);
    grid.sync();
    choose_digit(a, list, shared, 2);
    grid.sync();
    count_equals(a, list);
    grid.sync();
    write_rows(a, list);
  }
}

Arguments arguments_of(const PooledJob& job, int64_t first_head, int64_t num_heads) {
  constexpr float kLog2E = 1.44269504f;  // of panels-inl.h
  const HeadBatch& batch = job.batch;
  const Attention& attention = *batch.attention;
  const SegmentShape& segment = batch.segment;
  const int64_t kv_head = batch.kv_head_of(first_head), group = group_size(attention);
  Arguments a = {};
  a.q = rows_from(q_rows(attention, segment, batch.first_head + first_head), attention.q);
  a.k = rows_from(k_rows(attention, segment, kv_head), attention.k);
  a.pattern = job.routes.pattern + first_head;
  a.mask = mask_row(job.mask, segment, batch.first_head + first_head, 0);
  a.mask_head_stride = job.mask.num_q_blocks * job.mask.words_per_row();
  a.num_cols = static_cast<int32_t>(segment.num_kv_blocks);
  a.head_dim = static_cast<int32_t>(attention.q.head_dim);
  a.key_means =
      job.map.key_means + (kv_head - batch.first_kv_head()) * segment.num_kv_blocks * a.head_dim;
  a.scratch = job.cuda;
  a.map_floats = PooledCudaScratch::floats_of_map(segment);
  a.q_offset = segment.q_offset;
  a.q_len = segment.q_len;
  a.kv_len = segment.kv_len;
  a.num_heads = static_cast<int32_t>(num_heads);
  a.group_size = static_cast<int32_t>(group);
  a.first_in_group = static_cast<int32_t>((batch.first_head + first_head) % group);
  a.num_kv_heads = static_cast<int32_t>(batch.kv_head_of(first_head + num_heads - 1) - kv_head + 1);
  a.num_rows = static_cast<int32_t>(segment.num_q_blocks);
  a.first_q_block = static_cast<int32_t>(segment.first_q_block);
  a.first_panel_tiles = static_cast<int32_t>(PooledCudaScratch::first_panel_tiles(segment));
  a.words_per_row = static_cast<int32_t>(job.mask.words_per_row());
  a.scale = attention.softmax_scale * kLog2E;
  a.gamma = job.rule.gamma;
  a.is_inclusive = job.rule.is_inclusive;
  return a;
}

}  // namespace

void pooled_cuda(const PooledJob& job, CUstream_st* stream) {
  if (job.batch.segment.num_q_blocks == 0) return;
  int device = 0, num_sms = 0, per_sm = 0;
  CRISP_CUDA_CHECK(cudaGetDevice(&device));
  CRISP_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  CRISP_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, select_prefixes, kThreads, 0));
  const dim3 grid(static_cast<unsigned>(num_sms * per_sm));
  for (int64_t first = 0; first < job.batch.num_heads; first += kMaxHeads) {
    Arguments a =
        arguments_of(job, first, std::min<int64_t>(kMaxHeads, job.batch.num_heads - first));
    void* arguments[] = {&a};
    CRISP_CUDA_CHECK(cudaLaunchCooperativeKernel(select_prefixes, grid, dim3(kThreads), arguments,
                                                 size_t{0}, stream));
  }
}

}  // namespace crisp
