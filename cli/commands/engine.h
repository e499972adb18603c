// engine.h - one input, and one policy run on it: what prefill, inspect, bench and check share.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crisp/crisp.h"
#include "files/qkv.h"

namespace crisp::cli {

// Uninitialised memory, aligned to 256 bytes. Throws std::runtime_error naming `purpose` and the
// bytes when there is none. Pages are taken when they are first written.
class Buffer {
 public:
  Buffer() = default;
  Buffer(int64_t bytes, const char* purpose);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A contiguous head-major tensor [num_heads, num_tokens, head_dim] over `data`.
Tensor head_major(void* data, DType dtype, int64_t num_heads, int64_t num_tokens, int64_t head_dim);
int64_t tensor_bytes(const ConstTensor& tensor);  // of its values, without gaps
ConstTensor as_const(const Tensor& tensor);

// One attention call read from files.
struct Input {
  files::QkvFile file;
  std::vector<Segment> segments;    // one per chunk; empty without chunks
  std::array<Buffer, 3> converted;  // q, k, v as float32, if asked for
  float softmax_scale = 0.f;
  Attention attention() const;

  ConstTensor q, k, v;
};

struct InputOptions {
  std::optional<float> softmax_scale;  // in place of the file's
  int64_t chunk_tokens = 0;            // 0: one shot
  bool as_float32 = false;             // convert the values, exactly, to float32
};

// Loads, checks for NaN and infinity. Throws FileError and UsageError.
Input load_input(std::span<const std::string> paths, const InputOptions& options);

inline constexpr int kNumStages = 5;
extern const char* const kStageNames[kNumStages];  // proxy, route, select, mask, attend

// Milliseconds per stage; NaN for a stage that did not run.
using StageTimes = std::array<double, kNumStages>;
double selection_ms(const StageTimes& ms);  // proxy + route + select + mask
double total_ms(const StageTimes& ms);

// The result of one policy on one input. Owns its memory.
struct Run {
  Policy policy;
  Buffer mask_words, out_values;
  BlockMask mask;
  Tensor out;                      // head-major
  std::vector<float> lse;          // [num_q_heads, num_q_tokens], or empty
  std::vector<HeadReport> report;  // [num_segments, num_q_heads]
  StageTimes ms{};                 // median over the repeats
  std::vector<StageTimes> repeats;
};

// Query heads of kv heads [first, first + count) alone, with those kv heads.
Attention kv_heads_of(const Attention& attention, int64_t first, int64_t count);
// Query head `head` of a call alone, with its kv head: a call of one head.
Attention head_of(const Attention& attention, int64_t head);

// Allocates mask, report, and, if wanted, lse and output for the input's shape; computes nothing.
Run make_run(const Attention& attention, const Policy& policy, bool with_lse = true,
             bool with_out = true);
// Fills run.ms from run.repeats.
void set_medians(Run& run);

// Runs select_blocks and attend `repeats` times into `run`, timing each stage through
// Context::on_stage; stops early once `max_seconds` have passed.
void execute(const Attention& attention, Run& run, int num_threads, int repeats,
             double max_seconds = 1e30);

// select_blocks alone, once, not timed.
void select_only(const Attention& attention, Run& run, int num_threads);

// Median, ascending order statistics: the mean of the middle two for an even count. NaN if any is.
double median(std::vector<double> values);

}  // namespace crisp::cli
