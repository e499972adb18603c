// qkv.h - the tensors of one attention call in files: q, k, v in, block masks in and out.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "crisp/crisp.h"
#include "files/mapped_file.h"
#include "files/safetensors.h"

namespace crisp::files {

// Post-RoPE attention inputs. The tensors are head-major views of the mapped files (head_stride =
// num_tokens * head_dim) and live as long as this object; only a tensor that the file stores
// misaligned is copied.
struct QkvFile {
  std::string name;           // the paths, comma-separated
  ConstTensor q;              // [q_len, num_q_heads, head_dim]
  ConstTensor k, v;           // [kv_len, num_kv_heads, head_dim]
  float softmax_scale = 0.f;  // metadata `scale`, else 1 / sqrt(head_dim)
  bool scale_in_file = false;
  std::map<std::string, std::string, std::less<>> metadata;

  std::vector<MappedFile> files;               // what the views borrow
  std::vector<std::vector<std::byte>> copies;  // misaligned tensors
};

// `paths` is one .safetensors with `q` [num_q_heads, q_len, head_dim], `k` and `v` [num_kv_heads,
// kv_len, head_dim], or three .npy of these shapes, in the order q, k, v. F32, F16 or BF16, the
// same for all three. Throws FileError unless the shapes fit each other: num_kv_heads divides
// num_q_heads, 1 <= q_len <= kv_len. Values are not read.
QkvFile load_qkv(std::span<const std::string> paths);

// Splits arguments into what load_qkv takes: each .npy run in threes, every other path alone.
std::vector<std::vector<std::string>> group_inputs(std::span<const std::string> paths);

struct NonFinite {
  int64_t head = 0, token = 0, dim = 0;
  bool is_nan = false;  // else an infinity
};
// The first NaN or infinity in head-major order.
std::optional<NonFinite> find_non_finite(const ConstTensor& tensor);
// Reads all of q, k and v. Throws FileError naming tensor and position.
void refuse_non_finite(const QkvFile& qkv);

// A mask whose words live in this object or its mapping. The words are read-only: UserMask and
// attend only read them.
struct MaskFile {
  BlockMask mask;
  std::optional<MappedFile> file;
  std::vector<uint64_t> copy;  // used when the file stores the words misaligned
};

// Tensor `mask`, U32 [num_heads, num_q_blocks, words_per_row]. Throws FileError unless it has the
// shape of `expected` (as mask_for gives it) and, if the file says its block_size, that one.
MaskFile load_mask(const std::string& path, const BlockMask& expected);

// The same, written with block_size and num_kv_blocks as metadata; the caller commits.
void save_mask(AtomicFile& file, const BlockMask& mask);

}  // namespace crisp::files
