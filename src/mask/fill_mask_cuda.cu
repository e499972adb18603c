// fill_mask_cuda.cu - vertical and slash sets -> rows of the mask.
//
// Going up one row shifts the slash set by one bit. So a thread takes one 64-bit column of kRows
// consecutive rows: one word of the vertical set and 96 bits of the slash set in registers serve
// them all, and the rows cost their stores. Neighbouring threads take neighbouring columns.
//
// The report is started by a kernel of its own, then every CTA adds the bits it has set: sums of
// integers, so their order does not show, and a replayed graph starts over.
#include <limits>

#include "core/block_sum.cuh"
#include "core/cuda.h"
#include "mask/mask.h"

namespace crisp {
namespace {

constexpr float kNotComputed = std::numeric_limits<float>::quiet_NaN();
constexpr int kThreads = 256;
constexpr int kRows = 16;  // of one thread; at most 32, so that 96 bits of the slash set suffice

struct FillCall {
  // The first row of the batch's first head; heads are head_stride apart. In words of 64 bits.
  uint64_t* words;
  int64_t head_stride;
  int words_per_row;
  int num_rows, first_q_block, num_blocks;  // of the segment
  bool causal;
  const Pattern* pattern;             // [num_heads]
  const uint32_t *vertical, *slash;   // [num_heads, kept_words]
  int kept_words;                     // of 32 bits
  const float *structural_mass, *js;  // [num_heads]; js null: not computed
  HeadReport* report;                 // [num_heads], or null
  unsigned ctas_per_head;
};

__device__ int count_bits(const uint32_t* words, int num_words) {
  int count = 0;
  for (int word = static_cast<int>(threadIdx.x); word < num_words; word += kWarpLanes) {
    count += __popc(words[word]);
  }
  return warp_sum(count);
}

// A warp per head: everything but num_blocks, which starts at 0.
__global__ void __launch_bounds__(kWarpLanes) start_report(const FillCall call) {
  const int64_t head = blockIdx.x;
  HeadReport report;
  report.pattern = call.pattern[head];
  if (report.pattern != Pattern::kDense) {
    report.num_vertical = count_bits(call.vertical + head * call.kept_words, call.kept_words);
    report.num_slash = count_bits(call.slash + head * call.kept_words, call.kept_words);
  }
  report.structural_mass = call.structural_mass[head];
  report.js_distance = call.js == nullptr ? kNotComputed : call.js[head];
  if (threadIdx.x == 0) call.report[head] = report;
}

struct Bits96 {
  uint32_t part[3];
  // 64 of them from bit `shift` in [0, 32).
  __device__ uint64_t from(int shift) const {
    const uint64_t high = __funnelshift_r(part[1], part[2], shift);
    return high << 32 | __funnelshift_r(part[0], part[1], shift);
  }
};

// Bits [first, first + 96) of a set; zero behind its end.
__device__ Bits96 bits_at(const uint32_t* words, int num_words, int first) {
  uint32_t part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = first / 32 + i;
    part[i] = word < num_words ? words[word] : 0;
  }
  Bits96 bits;
#pragma unroll
  for (int i = 0; i < 3; ++i) bits.part[i] = __funnelshift_r(part[i], part[i + 1], first % 32);
  return bits;
}

// The lowest `count` bits, clamped to a word.
__device__ uint64_t low_bits(int count) {
  if (count >= 64) return ~uint64_t{0};
  return count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

// Writes word `word` of kRows rows from first_row on, and returns how many bits it has set.
__device__ int write_column(const FillCall& call, int64_t head, int word, int first_row) {
  const Pattern pattern = call.pattern[head];
  const int num_rows = min(kRows, call.num_rows - first_row), last_row = first_row + num_rows - 1;
  const int last_q_block = call.first_q_block + last_row;
  uint64_t vertical = ~uint64_t{0};
  Bits96 slash = {};
  if (pattern != Pattern::kDense) {
    const int64_t kept = head * call.kept_words;
    const int first = word * 64;
    vertical = bits_at(call.vertical + kept, call.kept_words, first).from(0);
    slash = bits_at(call.slash + kept, call.kept_words, first + call.num_blocks - 1 - last_q_block);
  }
  uint64_t* last = call.words + head * call.head_stride +
                   static_cast<int64_t>(last_row) * call.words_per_row + word;

  uint64_t pooled[kRows];  // read together, so that the loads overlap
#pragma unroll
  for (int up = 0; up < kRows; ++up) {
    const bool is_there = pattern == Pattern::kPooled && up < num_rows;
    pooled[up] = is_there ? last[-static_cast<int64_t>(up) * call.words_per_row] : 0;
  }
  int num_set = 0;
#pragma unroll
  for (int up = 0; up < kRows; ++up) {
    if (up >= num_rows) break;
    const int limit = call.causal ? min(last_q_block - up + 1, call.num_blocks) : call.num_blocks;
    const uint64_t bits = (vertical | slash.from(up) | pooled[up]) & low_bits(limit - word * 64);
    last[-static_cast<int64_t>(up) * call.words_per_row] = bits;
    num_set += __popcll(bits);
  }
  return num_set;
}

__global__ void __launch_bounds__(kThreads) write_rows(const FillCall call) {
  const int64_t head = blockIdx.x / call.ctas_per_head;
  // Columns of one head, kRows rows high: fewer than 2^31, or its mask would be 256 GiB.
  const unsigned column = blockIdx.x % call.ctas_per_head * kThreads + threadIdx.x;
  const unsigned words_per_row = static_cast<unsigned>(call.words_per_row);
  const int first_row = static_cast<int>(column / words_per_row) * kRows;
  int num_set = 0;
  if (first_row < call.num_rows) {
    num_set = write_column(call, head, static_cast<int>(column % words_per_row), first_row);
  }
  if (call.report == nullptr) return;
  num_set = block_sum<kThreads>(num_set);
  if (threadIdx.x == 0 && num_set > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&call.report[head].num_blocks),
              static_cast<unsigned long long>(num_set));
  }
}

}  // namespace

void fill_mask_cuda(const MaskJob& job, const ProxyMap& map, const Routes& routes, const Kept& kept,
                    CUstream_st* stream) {
  const HeadBatch& batch = job.batch;
  const SegmentShape& segment = batch.segment;
  FillCall call = {};
  call.words_per_row = static_cast<int>(job.mask.words_per_row() / 2);
  call.head_stride = job.mask.num_q_blocks * call.words_per_row;
  call.words = reinterpret_cast<uint64_t*>(job.mask.words) + batch.first_head * call.head_stride +
               segment.first_mask_row * call.words_per_row;
  call.num_rows = static_cast<int>(segment.num_q_blocks);
  call.first_q_block = static_cast<int>(segment.first_q_block);
  call.num_blocks = static_cast<int>(kept.num_blocks);
  call.causal = batch.attention->causal;
  call.pattern = routes.pattern;
  call.vertical = kept.vertical;
  call.slash = kept.slash;
  call.kept_words = static_cast<int>(kept.words());
  call.structural_mass = map.structural_mass;
  call.js = routes.js_distance;
  call.report = job.report;
  if (call.report != nullptr) {
    start_report<<<static_cast<unsigned>(batch.num_heads), kWarpLanes, 0, stream>>>(call);
    CRISP_CUDA_CHECK(cudaGetLastError());
  }
  const int64_t columns = ceil_div(segment.num_q_blocks, kRows) * call.words_per_row;
  if (columns == 0) return;
  call.ctas_per_head = static_cast<unsigned>(ceil_div(columns, kThreads));
  const auto num_ctas = static_cast<unsigned>(batch.num_heads * call.ctas_per_head);
  write_rows<<<num_ctas, kThreads, 0, stream>>>(call);
  CRISP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace crisp
