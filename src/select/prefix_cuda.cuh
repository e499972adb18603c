// prefix_cuda.cuh - where a prefix of many masses, heaviest first, ends. Only .cu files include it.
//
// The bits of a float >= 0 are ordered like its value. They are cut into three digits; one pass
// over the masses per digit counts and sums, per bin of the digit, the masses whose digits before
// it are those found so far, and the bin in which the prefix ends gives the next digit. After the
// last, a bin is one value. No float is added by an atomic: a bin sums integers, the bits below its
// digit, so that the sums are exact and the same in every order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace crisp::select_cuda {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

inline constexpr int kDigits = 3, kMaxBins = 2048;
inline constexpr uint32_t kEndBits = 1u << 30;  // of the values in [0, 2)
// The first digit is short, two bins per power of two: the many like masses of a flat map fall into
// one or two bins, on which a warp's counts go as one. Only in the later digits do they spread.
__host__ __device__ constexpr int digit_width(int digit) { return digit == 0 ? 8 : 11; }
__host__ __device__ constexpr int digit_shift(int digit) { return 22 - 11 * digit; }

struct Histogram {
  uint32_t count[kMaxBins];
  uint32_t low[kMaxBins], carry[kMaxBins];  // sum of the bits below the digit: carry * 2^32 + low

  __device__ uint64_t low_sum(int bin) const {
    return (static_cast<uint64_t>(carry[bin]) << 32) + low[bin];
  }
};

__device__ inline void clear(Histogram& histogram) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kMaxBins;
       bin += static_cast<int>(blockDim.x)) {
    histogram.count[bin] = histogram.low[bin] = histogram.carry[bin] = 0;
  }
}

__device__ inline void add_to_bin(Histogram& histogram, uint32_t bin, uint32_t count,
                                  uint32_t low) {
  atomicAdd(&histogram.count[bin], count);
  const uint32_t before = atomicAdd(&histogram.low[bin], low);
  if (before + low < before) atomicAdd(&histogram.carry[bin], 1u);
}

// Adds `count` values, their lower bits adding up to `low`, of every lane whose count is not 0; the
// whole warp calls it. Neighbours of a flat map share a bin or two, on which 32 atomics would
// queue: those go as one.
__device__ inline void add(Histogram& histogram, uint32_t bin, uint32_t count, uint32_t low) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint32_t pending = __ballot_sync(kAllLanes, count != 0);
  for (int round = 0; round < 2 && pending != 0; ++round) {
    const uint32_t shared_bin = __shfl_sync(kAllLanes, bin, __ffs(static_cast<int>(pending)) - 1);
    const bool is_peer = count != 0 && bin == shared_bin;
    const uint32_t counts = __reduce_add_sync(kAllLanes, is_peer ? count : 0u);
    const uint32_t lows = __reduce_add_sync(kAllLanes, is_peer ? low : 0u);
    if (lane == 0) add_to_bin(histogram, shared_bin, counts, lows);
    if (is_peer) count = 0;
    pending = __ballot_sync(kAllLanes, count != 0);
  }
  if (count != 0) add_to_bin(histogram, bin, count, low);
}

// Adds the values bits[i] for which active[i], of every lane; the whole warp calls it.
template <int kCount>
__device__ __forceinline__ void add_values(Histogram& histogram, int digit,
                                           const uint32_t (&bits)[kCount],
                                           const bool (&active)[kCount]) {
  const int shift = digit_shift(digit);
  const uint32_t digits = (1u << digit_width(digit)) - 1, lows = (1u << shift) - 1;
  const uint32_t bin = bits[0] >> shift & digits;
  uint32_t count = 0, low = 0;  // of those in the first one's bin
  bool is_apart[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool joins = active[0] && active[i] && (bits[i] >> shift & digits) == bin;
    is_apart[i] = active[i] && !joins;
    count += joins ? 1 : 0;
    low += joins ? bits[i] & lows : 0;
  }
  if (__any_sync(kAllLanes, count != 0)) add(histogram, bin, count, low);
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    if (!__any_sync(kAllLanes, is_apart[i])) continue;
    add(histogram, bits[i] >> shift & digits, is_apart[i] ? 1 : 0, bits[i] & lows);
  }
}

// Neighbours of a flat map share a bin or two, on which the atomics of a warp would queue: a thread
// holds on to its values of the first digit until one of another bin comes.
struct HeldBin {
  uint32_t bin = 0, count = 0, low = 0;
  static constexpr uint32_t kMost = (1u << (32 - digit_shift(0))) - 1;  // low does not overflow

  __device__ __forceinline__ void add(Histogram& histogram, uint32_t bits) {
    if (bits >> digit_shift(0) != bin || count == kMost) {
      flush(histogram);
      bin = bits >> digit_shift(0);
    }
    ++count;
    low += bits & ((1u << digit_shift(0)) - 1);
  }
  __device__ __forceinline__ void flush(Histogram& histogram) {
    if (count != 0) add_to_bin(histogram, bin, count, low);
    count = low = 0;
  }
};

// The same for digits after the first, whose bins neighbours rarely share: every lane for itself.
// Sums of the lower bits do not carry, so at most kSpreadValues may be added between two clears.
inline constexpr int64_t kSpreadValues = int64_t{1} << (32 - digit_shift(1));
template <int kCount>
__device__ __forceinline__ void add_spread_values(Histogram& histogram, int digit,
                                                  const uint32_t (&bits)[kCount],
                                                  const bool (&active)[kCount]) {
  const int shift = digit_shift(digit);
  const uint32_t digits = (1u << digit_width(digit)) - 1, lows = (1u << shift) - 1;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!active[i]) continue;
    atomicAdd(&histogram.count[bits[i] >> shift & digits], 1u);
    if (lows != 0) atomicAdd(&histogram.low[bits[i] >> shift & digits], bits[i] & lows);
  }
}

// Sum of `count` values that agree with `bits` down to some digit, their bits below it, zero in
// `bits`, adding up to `low`.
__device__ inline double sum_of_bin(uint32_t bits, uint64_t count, uint64_t low) {
  const auto exponent = static_cast<int>(bits >> 23);
  const uint64_t mantissa = (bits & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
  const double unit = __hiloint2double(((exponent > 0 ? exponent : 1) - 150 + 1023) << 20, 0);
  return static_cast<double>(count * mantissa + low) * unit;
}

// What ends the prefix: the first bin from the top with covered + sums >= value (strictly: >
// value).
struct Target {
  double value;
  bool is_share;  // value is a share of all that the bins hold
  bool is_strict;
};

struct Crossing {
  uint32_t bin;    // where the prefix ends; where it does not, the lowest that is not empty
  double above;    // covered, and the sums of the bins above
  uint64_t count;  // of this bin
  uint64_t count_above;
  double target;
};

template <int kThreads>
struct CrossingScratch {
  double sums[kThreads / kWarp];
  uint64_t counts[kThreads / kWarp];
  int first, last;  // positions from the top: that crosses, that is not empty
  Crossing found;
};

// `bin_at(bin, count, sum)` gives what a bin holds. The whole block calls it; every thread gets the
// result. Sums go in a fixed order.
template <int kThreads, class BinAt>
__device__ Crossing find_crossing(int num_bins, BinAt bin_at, double covered, Target target,
                                  CrossingScratch<kThreads>& scratch) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  constexpr int kMostPerThread = kMaxBins / kThreads;
  const int per_thread = num_bins > kThreads ? num_bins / kThreads : 1;
  const int begin = thread * per_thread;
  const int end = begin < num_bins ? begin + per_thread : begin;
  double sum = 0, bin_sum[kMostPerThread];
  uint64_t count = 0, bin_count[kMostPerThread];
#pragma unroll
  for (int i = 0; i < kMostPerThread; ++i) {
    bin_sum[i] = 0, bin_count[i] = 0;
    if (begin + i < end) bin_at(num_bins - 1 - begin - i, bin_count[i], bin_sum[i]);
    sum += bin_sum[i];
    count += bin_count[i];
  }
  for (int step = 1; step < kWarp; step *= 2) {
    const double sum_before = __shfl_up_sync(kAllLanes, sum, step);
    const uint64_t count_before = __shfl_up_sync(kAllLanes, count, step);
    if (lane >= step) sum += sum_before, count += count_before;
  }
  if (lane == kWarp - 1) scratch.sums[warp] = sum, scratch.counts[warp] = count;
  if (thread == 0) scratch.first = num_bins, scratch.last = -1;
  __syncthreads();

  double above = covered, total = covered;
  uint64_t count_above = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) above += scratch.sums[w], count_above += scratch.counts[w];
    total += scratch.sums[w];
  }
  const double sum_before = __shfl_up_sync(kAllLanes, sum, 1);
  const uint64_t count_before = __shfl_up_sync(kAllLanes, count, 1);
  if (lane > 0) above += sum_before, count_above += count_before;
  const double goal = target.is_share ? target.value * total : target.value;

  int mine = -1;  // the position that crosses, else the last that is not empty
  bool crosses = false;
  Crossing crossing = {0, above, 0, count_above, goal};
#pragma unroll
  for (int i = 0; i < kMostPerThread; ++i) {
    if (crosses || bin_count[i] == 0) continue;
    mine = begin + i;
    crossing = {static_cast<uint32_t>(num_bins - 1 - mine), above, bin_count[i], count_above, goal};
    above += bin_sum[i];
    count_above += bin_count[i];
    crosses = target.is_strict ? above > goal : above >= goal;
  }
  if (crosses) atomicMin(&scratch.first, mine);
  if (mine >= 0) atomicMax(&scratch.last, mine);
  __syncthreads();
  const int chosen = scratch.first < num_bins ? scratch.first : scratch.last;
  if (mine >= 0 ? mine == chosen : chosen < 0 && thread == 0) scratch.found = crossing;
  __syncthreads();
  const Crossing found = scratch.found;
  __syncthreads();
  return found;
}

// The least k with k * mass >= need, or count if there is none up to it.
__device__ inline uint64_t least_reaching(double mass, uint64_t count, double need) {
  if (need <= 0) return 0;
  const double guess = ceil(need / mass);  // infinite where mass is 0
  if (!(guess < static_cast<double>(count))) return count;
  auto k = static_cast<uint64_t>(guess);
  if (k > 0 && static_cast<double>(k - 1) * mass >= need) return k - 1;
  return static_cast<double>(k) * mass < need ? k + 1 : k;
}

// The largest k <= count with k * mass <= need.
__device__ inline uint64_t most_within(double mass, uint64_t count, double need) {
  if (need < 0) return 0;
  const double guess = floor(need / mass);  // infinite or NaN where mass is 0
  if (!(guess < static_cast<double>(count))) return count;
  auto k = static_cast<uint64_t>(guess);
  if (k > 0 && static_cast<double>(k) * mass > need) return k - 1;
  return static_cast<double>(k + 1) * mass <= need ? k + 1 : k;
}

}  // namespace crisp::select_cuda
