// validate.h - everything a public function checks at the door, before anything is written.
//
// Limits and their reasons:
//   head_dim in [8, 512], a multiple of 8: a row is whole 128-bit vectors of the 16-bit dtypes, and
//   a
//     worker's tiles (q, k, v and the accumulator) stay within its cache. On CUDA up to 256, what
//     the accumulator of a tile has registers for.
//   q_len, kv_len <= 2^31 - 1 and heads <= 65536: products of counts then fit int64_t everywhere.
//   softmax_scale > 0: 0 is a field that was not set, and no model uses a negative one.
#pragma once

#include <span>

#include "core/device.h"
#include "core/problem.h"
#include "crisp/crisp.h"

namespace crisp {

inline constexpr int64_t kMinHeadDim = 8;
inline constexpr int64_t kMaxCudaHeadDim = 256;
inline constexpr int64_t kMinCudaTileRows = 64;  // queries; the smallest tile of any kernel
inline constexpr int64_t kMaxHeads = 65536;
inline constexpr int64_t kMaxLength = (int64_t{1} << 31) - 1;  // tokens of one segment
inline constexpr int64_t kMaxMaskRows = int64_t{1} << 24;      // q_blocks of one call
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;        // tokens of one tensor

// ---- Shapes; no data pointer is looked at.

// One tensor by itself: dtype, counts, strides, and a last byte that int64_t can address.
void check_tensor(const char* name, const ConstTensor& tensor);
// Rows of a tensor that is written must not share memory with each other.
void check_rows_apart(const char* name, const ConstTensor& tensor);
// q, k, v, scale, segments and pages.
void check_attention(const Attention& attention);
void check_block_size(int64_t block_size);
// `name` is "mask" or "policy.mask".
void check_mask_shape(const char* name, const BlockMask& mask, const Attention& attention);
// Scalars of the policy, and whether it accepts this attention and block size.
void check_policy(const Policy& policy, const Attention& attention, const BlockMask& mask);
void check_context(const Context& context);
// What holds on CUDA besides; the rest is already checked.
void check_cuda(const Attention& attention, const BlockMask& mask);

// ---- Data; shapes are already checked.

// The bytes a call reads and writes. add_* refuse null and misaligned pointers of things that are
// not empty; check() refuses a written range that overlaps any other. Two tensors whose tokens
// interleave in one packed buffer do not overlap.
class Footprint {
 public:
  explicit Footprint(Device device) : device_(device) {}

  void add_tensor(const char* name, const ConstTensor& tensor, bool written, int64_t page_size = 0);
  void add_bytes(const char* name, const void* data, int64_t bytes, size_t alignment, bool written);
  void add_mask(const char* name, const BlockMask& mask, bool written);
  // q and k (v if asked), segments, and the block table; on the CPU every used entry is checked, on
  // CUDA it lies where the host does not read.
  void add_attention(const Attention& attention, bool with_v);
  // Refuses less than `needed` bytes.
  void add_workspace(std::span<std::byte> workspace, size_t needed);
  void check() const;
  // On CUDA: refuses memory of the host, and memory of several devices. The device that owns it
  // all; the current one if the call reads and writes nothing.
  int cuda_device() const;

 private:
  struct Range {
    const char* name;
    const void* data;
    uintptr_t begin, end;         // bytes
    int64_t token_stride, slice;  // bytes; slice 0: not a tensor of interleavable tokens
    bool written;
    bool of_host = false;  // whatever the device
  };
  static bool overlap(const Range& a, const Range& b);
  void add(const Range& range);

  Device device_;
  static constexpr int kCapacity = 16;
  Range ranges_[kCapacity];
  int num_ranges_ = 0;
};

// Elements from the first to one past the last element of the tensor; 0 when it is empty.
int64_t tensor_extent(const ConstTensor& tensor, int64_t page_size = 0);

inline ConstTensor as_const(const Tensor& tensor) {
  return {tensor.data,     tensor.dtype,        tensor.num_tokens,  tensor.num_heads,
          tensor.head_dim, tensor.token_stride, tensor.head_stride, tensor.page_stride};
}

}  // namespace crisp
