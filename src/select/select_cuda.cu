// select_cuda.cu - one CTA per (head, direction), without sorting.
//
// A direction keeps its forced blocks and, of the others, a prefix by (mass descending, index
// ascending). The rules differ only in where the prefix ends, and topping up moves that end. So a
// rule gives a Cut, the end of a prefix; one pass over the blocks turns the final Cut into bits.
//
// Masses are finite and >= 0 here, so the order of their bits is that of their values, and a cut at
// a given number or mass of blocks is found digit by digit: each of the 16 warps weighs the prefix
// of one candidate for the next hexadecimal digit, and a barrier counts how many reach.
//
// Sets equal those of select_cpu.cc except where sums differ: noise floor and coverage add the same
// doubles in another, fixed, order. Sums of floats are exact in a double while the largest sum is
// less than 2^53 times the last place of the smallest mass, in any order. Beyond that both orders
// err by at most num_blocks * 2^-53 of the sum: a block's decision can differ only if its mass is
// that close to the floor, or the covered mass to its target, far below the rounding of the masses
// themselves.
#include <algorithm>
#include <type_traits>

#include "core/block_sum.cuh"
#include "core/cuda.h"
#include "select/select.h"

namespace crisp {
namespace {

constexpr int kDigitBits = 4, kWarps = 1 << kDigitBits, kThreads = kWarps * kWarpLanes;
constexpr int kMaxStaged = 8192;  // masses that go through shared memory: 32 KiB

__device__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

// The blocks heavier than the float with these bits, and those of just this mass before `end`.
struct Cut {
  uint32_t bits = ~0u;  // by default none
  int end = 0;
  __device__ bool contains(float mass, int block) const {
    const uint32_t its_bits = __float_as_uint(mass);
    return its_bits > bits || (its_bits == bits && block < end);
  }
};

// Blocks [begin, end) of a direction, among which a cut is searched.
struct Range {
  const float* mass;
  int begin, end;
};

// The number (int) or mass (double) of the range's blocks inside the cut. By one warp, the same
// bits in every lane of every warp. A lane meets its blocks in one order whatever the cut, so that
// a larger prefix never weighs less, rounding included.
template <class Weight>
__device__ Weight weight_within(const Range& range, const Cut& cut) {
  Weight weight = 0;
  const auto add_if = [&](bool is_inside, float mass) {
    if constexpr (std::is_same_v<Weight, int>) {
      weight += is_inside;
    } else {
      weight += is_inside ? double{mass} : 0.0;
    }
  };
  const int ties_end = min(cut.end, range.end);
  int block = range.begin + lane_index();
#pragma unroll 4
  for (; block < ties_end; block += kWarpLanes) {
    add_if(__float_as_uint(range.mass[block]) >= cut.bits, range.mass[block]);
  }
#pragma unroll 4
  for (; block < range.end; block += kWarpLanes) {
    add_if(__float_as_uint(range.mass[block]) > cut.bits, range.mass[block]);
  }
  return warp_sum(weight);
}

// The largest number of num_digits digits that `holds`, which is true of 0 and false of everything
// above a number that it is false of. A warp calls it with a candidate of its own.
template <class Holds>
__device__ uint32_t search_digits(int num_digits, const Holds& holds) {
  uint32_t found = 0;
  for (int shift = (num_digits - 1) * kDigitBits; shift >= 0; shift -= kDigitBits) {
    const int warp = warp_index();
    const bool is_held = warp == 0 || holds(found | static_cast<uint32_t>(warp) << shift);
    const int num_held = __syncthreads_count(is_held && lane_index() == 0);
    found |= static_cast<uint32_t>(num_held - 1) << shift;
  }
  return found;
}

// Bits of the last mass in the smallest prefix that weighs at least `target`, which must be > 0 and
// no more than the whole range weighs.
template <class Weight>
__device__ uint32_t last_bits(const Range& range, Weight target) {
  return search_digits(32 / kDigitBits, [&](uint32_t bits) {
    return weight_within<Weight>(range, {bits, range.end}) >= target;
  });
}

// That prefix. Of the blocks that share its last mass the first are taken.
template <class Weight>
__device__ Cut smallest_prefix(const Range& range, Weight target) {
  const uint32_t bits = last_bits(range, target);
  int num_digits = 1;
  while (range.end > 1 << (num_digits * kDigitBits)) ++num_digits;
  const uint32_t last = search_digits(num_digits, [&](uint32_t end) {
    return weight_within<Weight>(range, {bits, static_cast<int>(end)}) < target;
  });
  return {bits, static_cast<int>(last) + 1};
}

// ---- the rules

// One direction of one head, blocks in the order of its index (key block, or Delta).
struct Direction {
  const float* mass;
  int num_blocks;
  int num_forced;      // blocks [0, num_forced) are kept
  int background_end;  // the floor is taken over [num_forced, background_end)

  __device__ Range all() const { return {mass, 0, num_blocks}; }
  __device__ Range not_forced() const { return {mass, num_forced, num_blocks}; }
  __device__ Range background() const { return {mass, num_forced, background_end}; }
};

__device__ double mean(const Range& range) {
  double sum = 0;
  for (int block = range.begin + static_cast<int>(threadIdx.x); block < range.end;
       block += kThreads) {
    sum += range.mass[block];
  }
  return block_sum<kThreads>(sum) / static_cast<double>(range.end - range.begin);
}

// Of an even number of masses the mean of the middle two.
__device__ double median(const Range& range) {
  const int count = range.end - range.begin;
  const int rank = count - count / 2;  // of the upper middle mass from the top, which has rank 1
  const double upper = __uint_as_float(last_bits(range, rank));
  if (count % 2 == 1) return upper;
  return (double{__uint_as_float(last_bits(range, rank + 1))} + upper) / 2;
}

__device__ Cut above_noise_floor(const Direction& d, float alpha, NoiseFloor kind) {
  const Range background = d.background();
  if (background.end <= background.begin) return {};
  const double floor = kind == NoiseFloor::kMean ? mean(background) : median(background);
  if (floor == 0) return {};  // nothing is there: the literal rule would keep every mass above 0
  // A float is above a double if and only if it is above the largest float not above that.
  return {__float_as_uint(__double2float_rd(double{alpha} * floor)), 0};
}

__device__ Cut coverage(const Direction& d, float gamma) {
  const double total = weight_within<double>(d.all(), {0, d.num_blocks});
  const double target = double{gamma} * total;
  if (target > 0) return smallest_prefix(d.all(), target);
  return smallest_prefix(d.all(), 1);  // no mass at all: the prefix is never empty
}

// The cut, moved on until at least min(min_blocks, num_blocks) are kept, forced blocks included.
__device__ Cut topped_up(const Direction& d, const Cut& cut, int64_t min_blocks) {
  int num_kept = 0;
  for (int block = d.num_forced + static_cast<int>(threadIdx.x); block < d.num_blocks;
       block += kThreads) {
    num_kept += cut.contains(d.mass[block], block);
  }
  num_kept = block_sum<kThreads>(num_kept);
  const int num_wanted = static_cast<int>(min(min_blocks, int64_t{d.num_blocks})) - d.num_forced;
  return num_kept >= num_wanted ? cut : smallest_prefix(d.not_forced(), num_wanted);
}

// ---- the kernel

// The directions by number: 0 vertical, 1 slash.
struct SelectCall {
  const Pattern* pattern;    // [num_heads]
  const float* mass[2];      // [num_heads, num_blocks]
  const int64_t* budget[2];  // [num_heads] blocks of Vertical-Slash heads; null: min_blocks
  uint32_t* bits[2];         // [num_heads, num_words], written
  int num_blocks, num_words;
  int num_forced[2], background_end[2];
  int64_t min_blocks;
  bool pooled_keeps_budget;
  Rule rule;
  NoiseFloor noise_floor;
  float alpha, gamma;
};

__device__ Cut cut_of(const SelectCall& call, const Direction& d, Pattern pattern,
                      const int64_t* budget) {
  if (pattern == Pattern::kPooled) {
    return topped_up(d, {}, call.pooled_keeps_budget ? call.min_blocks : 0);
  }
  Cut cut;
  if (call.rule == Rule::kNoiseFloor) cut = above_noise_floor(d, call.alpha, call.noise_floor);
  if (call.rule == Rule::kCoverage) cut = coverage(d, call.gamma);
  return topped_up(d, cut, budget == nullptr ? call.min_blocks : *budget);
}

// Block b is bit b, or num_blocks - 1 - b if reversed. A word per warp.
__device__ void write_bits(const Direction& d, const Cut& cut, bool is_reversed, uint32_t* bits,
                           int num_words) {
  for (int word = warp_index(); word < num_words; word += kWarps) {
    const int bit = word * 32 + lane_index();
    const int block = is_reversed ? d.num_blocks - 1 - bit : bit;
    const bool is_kept =
        bit < d.num_blocks && (block < d.num_forced || cut.contains(d.mass[block], block));
    const uint32_t kept = __ballot_sync(~0u, is_kept);
    if (lane_index() == 0) bits[word] = kept;
  }
}

// kIsStaged: num_blocks <= kMaxStaged.
template <bool kIsStaged>
__global__ void __launch_bounds__(kThreads) select_direction(const SelectCall call) {
  __shared__ float staged[kIsStaged ? kMaxStaged : 1];
  const int64_t head = blockIdx.x / 2;
  const bool is_slash = blockIdx.x % 2 != 0;
  uint32_t* bits = (is_slash ? call.bits[1] : call.bits[0]) + head * call.num_words;
  const Pattern pattern = call.pattern[head];
  if (pattern == Pattern::kDense) {
    for (int word = static_cast<int>(threadIdx.x); word < call.num_words; word += kThreads) {
      bits[word] = 0;
    }
    return;
  }
  const float* mass = (is_slash ? call.mass[1] : call.mass[0]) + head * call.num_blocks;
  if constexpr (kIsStaged) {
#pragma unroll 4
    for (int block = static_cast<int>(threadIdx.x); block < call.num_blocks; block += kThreads) {
      staged[block] = mass[block];
    }
    __syncthreads();
    mass = staged;
  }
  const Direction d = {mass, call.num_blocks, is_slash ? call.num_forced[1] : call.num_forced[0],
                       is_slash ? call.background_end[1] : call.background_end[0]};
  const int64_t* budget = is_slash ? call.budget[1] : call.budget[0];
  const Cut cut = cut_of(call, d, pattern, budget == nullptr ? nullptr : budget + head);
  write_bits(d, cut, is_slash, bits, call.num_words);
}

SelectCall call_of(const SelectJob& job) {
  const int64_t num_blocks = job.kept.num_blocks;
  const auto sink = static_cast<int>(std::min(job.forced.sink_blocks, num_blocks));
  const auto recency = static_cast<int>(std::min(job.forced.recency_blocks, num_blocks));
  const bool by_tokens = job.rule == Rule::kTokenBudget;
  SelectCall call = {};
  call.pattern = job.routes.pattern;
  call.mass[0] = job.map.vertical;
  call.mass[1] = by_tokens ? job.budget.left_aligned_slash : job.map.slash;
  call.budget[0] = by_tokens ? job.budget.num_vertical : nullptr;
  call.budget[1] = by_tokens ? job.budget.num_slash : nullptr;
  call.bits[0] = job.kept.vertical;
  call.bits[1] = job.kept.slash;
  call.num_blocks = static_cast<int>(num_blocks);  // of 2^31 tokens there are 2^24
  call.num_words = static_cast<int>(job.kept.words());
  call.num_forced[0] = sink;
  call.num_forced[1] = recency;
  call.background_end[0] = call.num_blocks - recency;
  call.background_end[1] = call.num_blocks - sink;
  call.min_blocks = job.forced.min_blocks;
  call.pooled_keeps_budget = job.forced.pooled_keeps_budget;
  call.rule = job.rule;
  call.noise_floor = job.noise_floor;
  call.alpha = job.alpha;
  call.gamma = job.gamma;
  return call;
}

}  // namespace

void select_cuda(const SelectJob& job, CUstream_st* stream) {
  const SelectCall call = call_of(job);
  const auto num_ctas = static_cast<unsigned>(2 * job.batch.num_heads);
  if (call.num_blocks <= kMaxStaged) {
    select_direction<true><<<num_ctas, kThreads, 0, stream>>>(call);
  } else {
    select_direction<false><<<num_ctas, kThreads, 0, stream>>>(call);
  }
  CRISP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace crisp
