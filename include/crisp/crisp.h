// crisp.h - the whole public C++ interface.
//
// Nothing here prints, exits, reads the environment or keeps state between calls, and no data
// buffer is allocated outside the caller's workspace. Every function may be called from several
// threads at once as long as their outputs and workspaces do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <variant>

#if defined(_WIN32)
#define CRISP_API
#else
#define CRISP_API __attribute__((visibility("default")))
#endif

struct CUstream_st;  // cudaStream_t is CUstream_st*, so this file needs no CUDA header

namespace crisp {

enum class Device : uint8_t { kCpu, kCuda };
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

// Borrowed [num_tokens, num_heads, head_dim]. Strides count elements and are >= 0 (0 repeats a row
// of an input); head_dim has stride 1 and is a multiple of 8 in [8, 512], on CUDA in [8, 256].
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;  // aligned to the element size
  DType dtype = DType::kBFloat16;
  int64_t num_tokens = 0, num_heads = 0, head_dim = 0;
  int64_t token_stride = 0, head_stride = 0;
  int64_t page_stride = 0;  // paged k and v only: elements from one page to the next
};
using Tensor = BasicTensor<void*>;
using ConstTensor = BasicTensor<const void*>;

// A run of consecutive queries of one sequence and the keys it attends to. Covers batches, padding
// (kv_start skips the left pad), varlen (one segment per sequence) and chunked prefill (q_len <
// kv_len). Blocks are counted from the segment's own first key. Segments come in ascending order of
// q_start and do not share rows. kv_len == 0 is an empty state (out 0, lse -inf); a causal segment
// with 0 < kv_len < q_len is refused. Lengths are at most 2^31 - 1.
struct Segment {
  int64_t q_start = 0, q_len = 0;    // rows of q, out and lse
  int64_t kv_start = 0, kv_len = 0;  // rows of k and v; paged: tokens counted along the page row
  int64_t page_row = 0;              // paged: row of the block table
};

// A paged KV cache. Token t of block-table row r lies in page block_table[r * row_stride + t /
// page_size] of k and v, at slot t % page_size: k is then [num_pages, page_size, num_kv_heads,
// head_dim] with strides page_stride, token_stride, head_stride, and k.num_tokens = num_pages *
// page_size. page_size == 0 means contiguous k and v.
struct PagedKv {
  const int32_t* block_table = nullptr;  // borrowed, [num_rows, row_stride], same device as k
  int64_t num_rows = 0, row_stride = 0;  // row_stride in entries, >= pages of the longest segment
  int64_t page_size = 0;                 // tokens per page, >= 1
};

// One call. Causal means bottom-right aligned: query i of a segment sees keys j <= i + kv_len -
// q_len.
struct Attention {
  ConstTensor q;     // [num_q_tokens,  num_q_heads,  head_dim]
  ConstTensor k, v;  // [num_kv_tokens, num_kv_heads, head_dim]; q head h reads h / group_size
  float softmax_scale = 0.f;  // must be set, > 0, usually 1 / sqrt(head_dim)
  bool causal = true;
  std::span<const Segment> segments =
      {};  // borrowed, host memory; empty: all of q against all of k
  PagedKv pages = {};
};

// One bit per (head, q_block, kv_block): bit kv_block % 32 of word kv_block / 32 of the row. Row r
// of a segment is the absolute block (kv_len - q_len) / block_size + r, so a chunk's first q_block
// may be short. With several segments their rows follow each other, every row as wide as the
// widest. Nothing is forced into a user's mask: an empty row gives output 0 and lse -inf. Bits
// above the causal diagonal or past a segment's last kv_block are ignored by attend and never set
// by select.
struct BlockMask {
  uint32_t* words = nullptr;  // borrowed, bytes() long, 8-byte aligned
  int64_t num_heads = 0, num_q_blocks = 0, num_kv_blocks = 0;
  int64_t block_size = 128;
  constexpr int64_t words_per_row() const { return (num_kv_blocks + 63) / 64 * 2; }  // even
  constexpr int64_t bytes() const { return 4 * words_per_row() * num_heads * num_q_blocks; }
};

// ---- Policies: how a head chooses its blocks. Plain values whose defaults are the papers'.

struct Dense {};  // every causal block

enum class Routing : uint8_t { kStructuralMass, kJsDistance };
enum class Selection : uint8_t { kNoiseFloor, kCoverage };
enum class NoiseFloor : uint8_t { kMean, kMedian };

// CRISP (arXiv 2609.01925). Masses are of the proxy map, the attention of the last 128 queries.
struct Crisp {
  float tau_proxy = 0.2f;  // routing: structural mass at which a head becomes Vertical-Slash, >= 0
  float alpha = 1.0f;      // Vertical-Slash: keep blocks above alpha x background mass, > 0
  float gamma = 0.95f;     // pooled heads: coverage target, in (0, 1]
  int32_t sink_tokens = 128, recency_tokens = 128;  // windows of the structural mass, >= 1; their
                                                    // blocks are forced and left out of the floor
  int32_t min_budget_tokens = 1024;                 // per direction, rounded up to blocks
  int32_t dense_below_tokens = 1024;                // kv_len below which every causal block is kept
  NoiseFloor noise_floor = NoiseFloor::kMean;
  bool pooled_keeps_budget =
      true;  // pooled heads keep min_budget vertical and slash blocks as well
  // Ablations. kJsDistance routes like FlexPrefill (pooled when the distance is below tau_js);
  // kCoverage keeps, per direction, the smallest set of blocks that holds gamma of the mass.
  Routing routing = Routing::kStructuralMass;
  Selection selection = Selection::kNoiseFloor;
  float tau_js = 0.1f;
};

// FlexPrefill (arXiv 2502.20766). kOfficial reproduces the published code where it differs from the
// paper and changes the mask: a token count // 128 as block budget, left-aligned slash buckets,
// pooled heads that keep the budget, an exclusive pooled prefix. kPaper is the paper's form.
struct FlexPrefill {
  enum class Variant : uint8_t { kOfficial, kPaper };
  float tau = 0.1f;     // routing: Jensen-Shannon distance below which a head is pooled
  float gamma = 0.95f;  // coverage target, in (0, 1]
  int32_t min_budget_tokens = 1024;
  int32_t dense_below_tokens = 1024;
  Variant variant = Variant::kOfficial;
};

// The caller's own mask, of the shape mask_for gives; causal bits of it are copied.
struct UserMask {
  BlockMask mask;
};

using Policy = std::variant<Dense, Crisp, FlexPrefill, UserMask>;

// What happened to one head of one segment, for reports and tests.
enum class Pattern : uint8_t { kDense, kVerticalSlash, kPooled, kUserMask };
struct HeadReport {
  Pattern pattern = Pattern::kDense;
  float structural_mass = 0;  // C_struct; NaN where the policy or the gate did not compute it
  float js_distance = 0;      // NaN where not computed
  int32_t num_vertical = 0, num_slash = 0;  // kept key-block columns and block diagonals
  int64_t num_blocks = 0;                   // selected, over all q_blocks
};

// Where to run. All memory but the list of segments, workspace and report included, must belong to
// `device`; on CUDA to one device, of compute capability 8.0 or later, which need not be the
// current one. CUDA runs float16 and bfloat16; calls enqueue and return, may be captured into a
// graph, and read no entry of a block table on the host, so ids out of range are not refused: their
// keys read as NaN.
enum class Stage : uint8_t { kProxy, kRoute, kSelect, kMask, kAttend };
struct Context {
  Device device = Device::kCpu;
  CUstream_st* stream = nullptr;        // CUDA: work is enqueued here, in order
  int num_threads = 0;                  // CPU: 0 means all cores
  std::span<std::byte> workspace = {};  // at least workspace_bytes(), 256-byte aligned
  // If set, called on the calling thread after each part of a stage has run (CPU) or been enqueued
  // (CUDA); a stage may report several times.
  void (*on_stage)(Stage stage, void* user) = nullptr;
  void* on_stage_user = nullptr;
};

// Error: refused at the door, nothing written or enqueued. DeviceError: CUDA failed after that.
struct CRISP_API Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CRISP_API DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

CRISP_API const char* version() noexcept;  // "major.minor.patch"
// Instruction set the CPU kernels use on this machine, e.g. "AVX2".
CRISP_API const char* cpu_target() noexcept;

// ---- Shapes. These read shapes only: data pointers may be null.

// The mask a call needs, without words yet. Throws Error on impossible shapes.
CRISP_API BlockMask mask_for(const Attention& attention, int64_t block_size = 128);
// Blocks per head that a dense run visits: the denominator of density.
CRISP_API int64_t num_causal_blocks(const Attention& attention, int64_t block_size = 128);
// Bytes of workspace that any of the calls below needs; a pure function of shapes and num_threads.
CRISP_API size_t workspace_bytes(const Attention& attention, const Policy& policy,
                                 const BlockMask& mask, const Context& context);
// nullptr if the calls below would be accepted, else the reason in one sentence, valid until the
// next call on this thread.
CRISP_API const char* why_unsupported(const Attention& attention, const Policy& policy,
                                      const BlockMask& mask, const Context& context) noexcept;

// What to set dense_below_tokens to where speed counts more than having the same masks on every
// machine: the number of tokens from which a whole layer under `policy` was measured to be no
// slower than Dense on the device of `context` (on CUDA the current one). -1: not measured there.
// Throws DeviceError where there is no such device.
CRISP_API int32_t measured_gate(const Policy& policy, const Context& context);

// ---- Work.

// Q, K -> mask. `report`, if not empty, is [num_segments, num_q_heads]. Dense and UserMask accept
// what attend accepts; the other policies need causal attention and block_size 128.
CRISP_API void select_blocks(const Attention& attention, const Policy& policy,
                             const BlockMask& mask, const Context& context,
                             std::span<HeadReport> report = {});

// Q, K, V, mask -> out, lse. out is [num_q_tokens, num_q_heads, head_dim] in q's dtype; rows
// outside every segment are not written. lse is natural-log, [num_q_heads, num_q_tokens]; empty:
// unwanted. What is written (out, lse, mask, report, workspace) must not overlap anything else of
// the call; views of one packed buffer whose tokens alternate do not overlap.
CRISP_API void attend(const Attention& attention, const BlockMask& mask, const Tensor& out,
                      std::span<float> lse, const Context& context);

// select_blocks, then attend.
CRISP_API void prefill(const Attention& attention, const Policy& policy, const BlockMask& mask,
                       const Tensor& out, std::span<float> lse, const Context& context,
                       std::span<HeadReport> report = {});

// Merges two attention states over disjoint key sets (a prefix cache and a suffix, two ring steps):
//   lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
// All tensors have one shape, each its own dtype; lse arrays are [num_heads, num_tokens], the
// written one may be empty: unwanted. `out` and `lse` may be the arrays of a. A state with lse -inf
// is empty: its out is not read, and merging two of them gives out 0, lse -inf. Needs no workspace.
CRISP_API void merge_states(const ConstTensor& out_a, std::span<const float> lse_a,
                            const ConstTensor& out_b, std::span<const float> lse_b,
                            const Tensor& out, std::span<float> lse, const Context& context);

}  // namespace crisp
