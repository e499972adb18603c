// mask_cuda.cu - rows as whole 64-bit words, a warp per row. Counts are sums of integers, so the
// order in which warps add them does not show.
#include <algorithm>
#include <cmath>

#include "core/cuda.h"
#include "mask/mask.h"

namespace crisp {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // a warp takes more rows where there are more

// The rows of one batch of heads.
struct Rows {
  uint64_t* words;         // of the mask
  const uint64_t* source;  // a mask to take the bits from, which may be `words`; null: every bit
  HeadReport* report;      // [num_heads], or null
  int64_t words_per_row;   // of 64 bits
  int64_t first_head, num_heads, rows_per_head, first_mask_row;  // rows_per_head: of the mask
  int64_t num_rows, first_q_block, num_kv_blocks;                // of the segment
  bool causal;
};

__global__ void start_report(HeadReport* report, int64_t num_heads, Pattern pattern) {
  constexpr float kNotComputed = NAN;
  const int64_t head = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (head < num_heads) report[head] = {pattern, kNotComputed, kNotComputed, 0, 0, 0};
}

// The bits of word `word` that stand for blocks [0, limit).
__device__ uint64_t limit_bits(int64_t word, int64_t limit) {
  const int64_t count = limit - word * 64;
  if (count >= 64) return ~uint64_t{0};
  return count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

__global__ void __launch_bounds__(kThreads) write_rows(Rows rows) {
  const int64_t num_warps = int64_t{gridDim.x} * (kThreads / kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t index = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (; index < rows.num_heads * rows.num_rows; index += num_warps) {
    const int64_t head = index / rows.num_rows, row = index % rows.num_rows;
    const int64_t mask_row =
        (rows.first_head + head) * rows.rows_per_head + rows.first_mask_row + row;
    // kv_block_limit of problem.h.
    const int64_t diagonal_end = rows.first_q_block + row + 1;
    const int64_t limit =
        rows.causal && diagonal_end < rows.num_kv_blocks ? diagonal_end : rows.num_kv_blocks;
    unsigned long long num_set = 0;
    for (int64_t word = lane; word < rows.words_per_row; word += kWarp) {
      const int64_t at = mask_row * rows.words_per_row + word;
      const uint64_t bits =
          limit_bits(word, limit) & (rows.source == nullptr ? ~uint64_t{0} : rows.source[at]);
      rows.words[at] = bits;
      num_set += static_cast<unsigned long long>(__popcll(bits));
    }
    if (rows.report != nullptr && num_set > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&rows.report[head].num_blocks), num_set);
    }
  }
}

void write(const MaskJob& job, const uint32_t* source, Pattern pattern, cudaStream_t stream) {
  const HeadBatch& batch = job.batch;
  const SegmentShape& segment = batch.segment;
  if (job.report != nullptr) {
    CRISP_CUDA_CHECK(launch_blocks(start_report, ceil_div(batch.num_heads, kThreads), kThreads,
                                   stream, job.report, batch.num_heads, pattern));
  }
  const Rows rows = {reinterpret_cast<uint64_t*>(job.mask.words),
                     reinterpret_cast<const uint64_t*>(source),
                     job.report,
                     job.mask.words_per_row() / 2,
                     batch.first_head,
                     batch.num_heads,
                     job.mask.num_q_blocks,
                     segment.first_mask_row,
                     segment.num_q_blocks,
                     segment.first_q_block,
                     segment.num_kv_blocks,
                     batch.attention->causal};
  const int64_t num_warps = batch.num_heads * segment.num_q_blocks;
  if (num_warps == 0 || rows.words_per_row == 0) return;
  const int64_t num_blocks = std::min(ceil_div(num_warps, kThreads / kWarp), kMaxBlocks);
  CRISP_CUDA_CHECK(launch_blocks(write_rows, num_blocks, kThreads, stream, rows));
}

}  // namespace

void fill_dense_cuda(const MaskJob& job, CUstream_st* stream) {
  write(job, nullptr, Pattern::kDense, stream);
}

void copy_mask_cuda(const MaskJob& job, const BlockMask& source, CUstream_st* stream) {
  write(job, source.words, Pattern::kUserMask, stream);
}

}  // namespace crisp
