#include "files/qkv.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>

#include "files/error.h"
#include "files/npy.h"

namespace crisp::files {

namespace {

constexpr const char* kNames[] = {"q", "k", "v"};

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

DType dtype_of(const std::string& file, const std::string& where, ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return DType::kFloat32;
    case ElementType::kF16:
      return DType::kFloat16;
    case ElementType::kBF16:
      return DType::kBFloat16;
    default:
      fail(file, where, "dtype is ", name(type), ", expected F32, F16 or BF16");
  }
}

// A file's view as tokens x heads; copies data that is not aligned to its elements.
ConstTensor tensor_of(const std::string& file, const char* tensor_name, const TensorView& view,
                      std::vector<std::vector<std::byte>>& copies) {
  const std::string where = "tensor " + printable(tensor_name) + ": ";
  ConstTensor tensor;
  tensor.dtype = dtype_of(file, where, view.type);
  if (view.shape.size() != 3) {
    fail(file, where, "shape is ", shape_text(view.shape), ", expected [heads, tokens, head_dim]");
  }
  for (const int64_t size : view.shape) {
    if (size < 1)
      fail(file, where, "shape is ", shape_text(view.shape), ", every size must be >= 1");
  }
  tensor.num_heads = view.shape[0];
  tensor.num_tokens = view.shape[1];
  tensor.head_dim = view.shape[2];
  tensor.token_stride = tensor.head_dim;
  tensor.head_stride = tensor.num_tokens * tensor.head_dim;
  tensor.data = view.data.data();
  const auto address = reinterpret_cast<uintptr_t>(view.data.data());
  if (address % static_cast<uintptr_t>(bytes_of(tensor.dtype)) != 0) {
    tensor.data = copies.emplace_back(view.data.begin(), view.data.end()).data();
  }
  return tensor;
}

std::string shape_of(const ConstTensor& tensor) {
  const int64_t shape[] = {tensor.num_heads, tensor.num_tokens, tensor.head_dim};
  return shape_text(shape);
}

void check_shapes(const QkvFile& qkv) {
  const ConstTensor &q = qkv.q, &k = qkv.k, &v = qkv.v;
  if (q.dtype != k.dtype || q.dtype != v.dtype) {
    fail(qkv.name, "q, k and v must have one dtype");
  }
  if (shape_of(k) != shape_of(v)) {
    fail(qkv.name, "tensor 'v': shape is ", shape_of(v), ", expected that of k, ", shape_of(k));
  }
  if (q.head_dim != k.head_dim) {
    fail(qkv.name, "tensor 'k': head_dim is ", k.head_dim, ", expected that of q, ", q.head_dim);
  }
  if (q.num_heads % k.num_heads != 0) {
    fail(qkv.name, "q has ", q.num_heads, " heads, expected a multiple of k's ", k.num_heads);
  }
  if (q.num_tokens > k.num_tokens) {
    fail(qkv.name, "q has ", q.num_tokens, " tokens, expected at most k's ", k.num_tokens);
  }
}

float parse_scale(const std::string& file, const std::string& text) {
  float scale = 0.f;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), scale);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(scale) ||
      scale <= 0.f) {
    fail(file, "metadata 'scale' is ", printable(text), ", expected a finite number above 0");
  }
  return scale;
}

bool is_npy(const std::string& path) { return path.ends_with(".npy"); }

// True if any of `count` values has all exponent bits set. Written without an early exit so that it
// vectorises.
template <class Word>
bool any_non_finite(const Word* words, int64_t count, Word exponent) {
  unsigned found = 0;
  for (int64_t i = 0; i < count; ++i) found |= (words[i] & exponent) == exponent ? 1u : 0u;
  return found != 0;
}

template <class Word>
std::optional<NonFinite> find_in(const ConstTensor& tensor, Word exponent, Word mantissa) {
  const Word* data = static_cast<const Word*>(tensor.data);
  for (int64_t head = 0; head < tensor.num_heads; ++head) {
    for (int64_t token = 0; token < tensor.num_tokens; ++token) {
      const Word* row = data + head * tensor.head_stride + token * tensor.token_stride;
      if (!any_non_finite(row, tensor.head_dim, exponent)) continue;
      int64_t dim = 0;
      while ((row[dim] & exponent) != exponent) ++dim;
      return NonFinite{head, token, dim, (row[dim] & mantissa) != 0};
    }
  }
  return std::nullopt;
}

}  // namespace

QkvFile load_qkv(std::span<const std::string> paths) {
  QkvFile qkv;
  for (const std::string& path : paths) qkv.name += (qkv.name.empty() ? "" : ",") + path;
  std::array<TensorView, 3> views;
  if (paths.size() == 1 && !is_npy(paths[0])) {
    SafetensorsFile file(paths[0]);
    for (size_t i = 0; i < 3; ++i) views[i] = file.tensor(kNames[i]);
    qkv.metadata = file.contents().metadata;
    qkv.files.push_back(std::move(file).take_file());
  } else if (paths.size() == 3) {
    for (size_t i = 0; i < 3; ++i) {
      qkv.files.emplace_back(paths[i]);
      views[i] = parse_npy(qkv.files[i].bytes(), paths[i]);
    }
  } else {
    fail(qkv.name, "expected one .safetensors file or three .npy files (q, k, v), got ",
         paths.size());
  }
  ConstTensor* const tensors[] = {&qkv.q, &qkv.k, &qkv.v};
  for (size_t i = 0; i < 3; ++i) {
    *tensors[i] = tensor_of(paths[paths.size() == 3 ? i : 0], kNames[i], views[i], qkv.copies);
  }
  check_shapes(qkv);
  const auto scale = qkv.metadata.find("scale");
  qkv.scale_in_file = scale != qkv.metadata.end();
  qkv.softmax_scale =
      qkv.scale_in_file ? parse_scale(qkv.name, scale->second)
                        : static_cast<float>(1.0 / std::sqrt(static_cast<double>(qkv.q.head_dim)));
  return qkv;
}

std::vector<std::vector<std::string>> group_inputs(std::span<const std::string> paths) {
  std::vector<std::vector<std::string>> groups;
  for (const std::string& path : paths) {
    const bool open = !groups.empty() && is_npy(groups.back()[0]) && groups.back().size() < 3;
    if (open && !is_npy(path)) {
      fail(path, "expected the ", groups.back().size() == 1 ? "k" : "v",
           " array (.npy) that follows ", printable(groups.back().back()));
    }
    if (open) {
      groups.back().push_back(path);
    } else {
      groups.push_back({path});
    }
  }
  if (!groups.empty() && is_npy(groups.back()[0]) && groups.back().size() != 3) {
    fail(groups.back()[0], "npy files come in threes (q, k, v), got ", groups.back().size());
  }
  return groups;
}

std::optional<NonFinite> find_non_finite(const ConstTensor& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return find_in<uint32_t>(tensor, 0x7f800000u, 0x007fffffu);
    case DType::kFloat16:
      return find_in<uint16_t>(tensor, 0x7c00, 0x03ff);
    case DType::kBFloat16:
      return find_in<uint16_t>(tensor, 0x7f80, 0x007f);
  }
  return std::nullopt;
}

void refuse_non_finite(const QkvFile& qkv) {
  const ConstTensor* const tensors[] = {&qkv.q, &qkv.k, &qkv.v};
  for (size_t i = 0; i < 3; ++i) {
    const auto found = find_non_finite(*tensors[i]);
    if (!found) continue;
    fail(qkv.files[qkv.files.size() == 3 ? i : 0].path(), "tensor '", kNames[i], "' holds ",
         found->is_nan ? "NaN" : "an infinity", " at head ", found->head, ", token ", found->token,
         ", dim ", found->dim, ", expected finite values");
  }
}

MaskFile load_mask(const std::string& path, const BlockMask& expected) {
  MaskFile out;
  SafetensorsFile file(path);
  const TensorView view = file.tensor("mask");
  const int64_t shape[] = {expected.num_heads, expected.num_q_blocks, expected.words_per_row()};
  if (view.type != ElementType::kU32) {
    fail(path, "tensor 'mask': dtype is ", name(view.type), ", expected U32");
  }
  if (!std::equal(view.shape.begin(), view.shape.end(), std::begin(shape), std::end(shape))) {
    fail(path, "tensor 'mask': shape is ", shape_text(view.shape), ", expected ", shape_text(shape),
         " ([heads, q_blocks, words_per_row] of this input)");
  }
  const auto& metadata = file.contents().metadata;
  const auto block_size = metadata.find("block_size");
  if (block_size != metadata.end() && block_size->second != std::to_string(expected.block_size)) {
    fail(path, "metadata 'block_size' is ", printable(block_size->second), ", expected ",
         expected.block_size);
  }
  out.mask = expected;
  out.file = std::move(file).take_file();
  if (reinterpret_cast<uintptr_t>(view.data.data()) % 8 == 0) {
    out.mask.words = reinterpret_cast<uint32_t*>(const_cast<std::byte*>(view.data.data()));
  } else {
    out.copy.resize((view.data.size() + 7) / 8);
    std::memcpy(out.copy.data(), view.data.data(), view.data.size());
    out.mask.words = reinterpret_cast<uint32_t*>(out.copy.data());
  }
  return out;
}

void save_mask(AtomicFile& file, const BlockMask& mask) {
  const NamedTensor tensor{
      "mask",
      {ElementType::kU32,
       {mask.num_heads, mask.num_q_blocks, mask.words_per_row()},
       {reinterpret_cast<const std::byte*>(mask.words), static_cast<size_t>(mask.bytes())}}};
  write_safetensors(file, {&tensor, 1},
                    {{"block_size", std::to_string(mask.block_size)},
                     {"num_kv_blocks", std::to_string(mask.num_kv_blocks)}});
}

}  // namespace crisp::files
