// Files of q, k, v and of masks: views, shapes that do not fit, NaN and infinities.
#include "files/qkv.h"

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "crisp/crisp.h"
#include "tensor_files.h"

namespace crisp::files {
namespace {

struct Shapes {
  std::vector<int64_t> q{4, 2, 8}, k{2, 3, 8}, v{2, 3, 8};
  ElementType q_type = ElementType::kF32, kv_type = ElementType::kF32;
};

void write_qkv(const std::string& path, const Shapes& shapes,
               const std::map<std::string, std::string, std::less<>>& metadata = {},
               float value = 1.f) {
  std::vector<float> data(4096, value);
  const auto view = [&](ElementType type, const std::vector<int64_t>& shape) {
    return TensorView{type, shape,
                      bytes_of(data).first(static_cast<size_t>(*tensor_bytes(shape, type)))};
  };
  const NamedTensor tensors[] = {{"q", view(shapes.q_type, shapes.q)},
                                 {"k", view(shapes.kv_type, shapes.k)},
                                 {"v", view(shapes.kv_type, shapes.v)}};
  write_safetensors(path, tensors, metadata);
}

QkvFile load(const std::string& path) { return load_qkv({&path, 1}); }

TEST(Qkv, ViewsAreHeadMajorAndNotCopied) {
  const Folder folder;
  const std::string path = folder.file("a.safetensors");
  write_qkv(path, {}, {{"scale", "0.25"}});
  const QkvFile qkv = load(path);
  EXPECT_EQ(qkv.q.num_heads, 4);
  EXPECT_EQ(qkv.q.num_tokens, 2);
  EXPECT_EQ(qkv.q.head_dim, 8);
  EXPECT_EQ(qkv.q.token_stride, 8);
  EXPECT_EQ(qkv.q.head_stride, 16);
  EXPECT_EQ(qkv.k.head_stride, 24);
  EXPECT_EQ(qkv.softmax_scale, 0.25f);
  EXPECT_TRUE(qkv.copies.empty());
  const std::span<const std::byte> file = qkv.files[0].bytes();
  EXPECT_GE(static_cast<const std::byte*>(qkv.v.data), file.data());
  EXPECT_LT(static_cast<const std::byte*>(qkv.v.data), file.data() + file.size());
}

TEST(Qkv, ScaleDefaultsToTheHeadDim) {
  const Folder folder;
  const std::string path = folder.file("a.safetensors");
  write_qkv(path, {});
  EXPECT_FLOAT_EQ(load(path).softmax_scale, 0.35355339f);
  for (const char* bad : {"", "x", "0", "-1", "nan", "inf", "1e99", "0.5 ", " 0.5"}) {
    write_qkv(path, {}, {{"scale", bad}});
    EXPECT_THAT(message_of([&] { load(path); }), HasSubstr("metadata 'scale' is '")) << bad;
  }
}

TEST(Qkv, RefusesShapesThatDoNotFit) {
  const Folder folder;
  const std::string path = folder.file("a.safetensors");
  const std::pair<Shapes, const char*> cases[] = {
      {{.q = {2, 8}}, "tensor 'q': shape is [2, 8], expected [heads, tokens, head_dim]"},
      {{.q = {4, 0, 8}}, "every size must be >= 1"},
      {{.q = {3, 2, 8}}, "q has 3 heads, expected a multiple of k's 2"},
      {{.q = {4, 4, 8}}, "q has 4 tokens, expected at most k's 3"},
      {{.q = {4, 2, 16}}, "tensor 'k': head_dim is 8, expected that of q, 16"},
      {{.v = {2, 4, 8}}, "tensor 'v': shape is [2, 4, 8], expected that of k, [2, 3, 8]"},
      {{.q_type = ElementType::kF64}, "tensor 'q': dtype is F64, expected F32, F16 or BF16"},
      {{.q_type = ElementType::kF16}, "q, k and v must have one dtype"},
  };
  for (const auto& [shapes, expected] : cases) {
    write_qkv(path, shapes);
    EXPECT_THAT(message_of([&] { load(path); }), HasSubstr(expected));
  }
  const std::vector<float> x = {1};
  const NamedTensor only{"x", {ElementType::kF32, {1}, bytes_of(x)}};
  write_safetensors(path, {&only, 1});
  EXPECT_THAT(message_of([&] { load(path); }), HasSubstr("has no tensor 'q'"));
}

TEST(Qkv, MisalignedTensorsAreCopied) {
  const Folder folder;
  const std::string path = folder.file("a.safetensors");
  // A header of odd length, as the format allows: every tensor is misaligned.
  std::string json = R"({"q":{"dtype":"F32","shape":[1,1,1],"data_offsets":[0,4]},)"
                     R"("k":{"dtype":"F32","shape":[1,1,1],"data_offsets":[4,8]},)"
                     R"("v":{"dtype":"F32","shape":[1,1,1],"data_offsets":[8,12]}})";
  json.resize((json.size() + 3) / 4 * 4 + 1, ' ');
  put(path, safetensors(json, 12));
  const QkvFile qkv = load(path);
  EXPECT_EQ(qkv.copies.size(), 3u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(qkv.q.data) % 4, 0u);
  EXPECT_EQ(*static_cast<const uint32_t*>(qkv.q.data), 0x01010101u);
}

TEST(Qkv, ReadsAnNpyTriple) {
  const Folder folder;
  const std::vector<float> data(48, 0.5f);
  const std::vector<std::string> paths = {folder.file("q.npy"), folder.file("k.npy"),
                                          folder.file("v.npy")};
  write_npy(paths[0], {ElementType::kF32, {2, 3, 8}, bytes_of(data)});
  write_npy(paths[1], {ElementType::kF32, {1, 6, 8}, bytes_of(data)});
  write_npy(paths[2], {ElementType::kF32, {1, 6, 8}, bytes_of(data)});
  const QkvFile qkv = load_qkv(paths);
  EXPECT_EQ(qkv.q.num_heads, 2);
  EXPECT_EQ(qkv.k.num_tokens, 6);
  EXPECT_FALSE(qkv.scale_in_file);
  EXPECT_THAT(message_of([&] { load_qkv(std::span(paths).first(2)); }),
              HasSubstr("expected one .safetensors file or three .npy files"));
}

TEST(Qkv, GroupsArguments) {
  using Paths = std::vector<std::string>;
  const Paths mixed = {"a.safetensors", "q.npy", "k.npy", "v.npy", "b.safetensors"};
  EXPECT_EQ(
      group_inputs(mixed),
      (std::vector<Paths>{{"a.safetensors"}, {"q.npy", "k.npy", "v.npy"}, {"b.safetensors"}}));
  const Paths two = {"q.npy", "k.npy"}, broken = {"q.npy", "a.safetensors"};
  EXPECT_THAT(message_of([&] { group_inputs(two); }), HasSubstr("come in threes (q, k, v), got 2"));
  EXPECT_THAT(message_of([&] { group_inputs(broken); }), HasSubstr("expected the k array"));
}

template <class T>
void expect_found(DType dtype, T clean, T bad, bool is_nan) {
  constexpr int64_t kHeads = 3, kTokens = 5, kDim = 40;
  std::vector<T> data(static_cast<size_t>(kHeads * kTokens * kDim), clean);
  const ConstTensor tensor{data.data(), dtype, kTokens, kHeads, kDim, kDim, kTokens * kDim};
  EXPECT_FALSE(find_non_finite(tensor));
  data[static_cast<size_t>(2 * kTokens * kDim + 3 * kDim + 37)] = bad;
  const auto found = find_non_finite(tensor);
  ASSERT_TRUE(found);
  EXPECT_EQ(std::tuple(found->head, found->token, found->dim), std::tuple(2, 3, 37));
  EXPECT_EQ(found->is_nan, is_nan);
}

TEST(Qkv, FindsNonFiniteValues) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  const float inf = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  expect_found<uint32_t>(DType::kFloat32, bits(-largest), bits(-inf), false);
  expect_found<uint32_t>(DType::kFloat32, bits(1e-40f), bits(std::nanf("")), true);
  expect_found<uint16_t>(DType::kFloat16, 0x7bff, 0x7c00, false);
  expect_found<uint16_t>(DType::kFloat16, 0x0001, 0xfe01, true);
  expect_found<uint16_t>(DType::kBFloat16, 0x7f7f, 0xff80, false);
  expect_found<uint16_t>(DType::kBFloat16, 0x8000, 0x7fc0, true);
}

TEST(Qkv, RefusalOfNaNNamesTensorAndPosition) {
  const Folder folder;
  const std::string path = folder.file("a.safetensors");
  write_qkv(path, {}, {}, std::nanf(""));
  EXPECT_EQ(message_of([&] { refuse_non_finite(load(path)); }),
            path + ": tensor 'q' holds NaN at head 0, token 0, dim 0, expected finite values");
  write_qkv(path, {});
  refuse_non_finite(load(path));
}

// ---- masks

TEST(Mask, ReadsBackWhatItWrites) {
  const Folder folder;
  const std::string path = folder.file("m.safetensors");
  BlockMask mask{nullptr, 2, 3, 70, 128};
  std::vector<uint64_t> words(static_cast<size_t>(mask.bytes() / 8));
  for (size_t i = 0; i < words.size(); ++i) words[i] = 0x123456789abcdefULL * (i + 1);
  mask.words = reinterpret_cast<uint32_t*>(words.data());
  AtomicFile written(path);
  save_mask(written, mask);
  written.commit();
  BlockMask expected = mask;
  expected.words = nullptr;
  const MaskFile file = load_mask(path, expected);
  EXPECT_EQ(file.mask.num_kv_blocks, 70);
  EXPECT_EQ(std::memcmp(file.mask.words, words.data(), static_cast<size_t>(mask.bytes())), 0);
  expected.num_q_blocks = 4;
  EXPECT_THAT(message_of([&] { load_mask(path, expected); }),
              HasSubstr("tensor 'mask': shape is [2, 3, 4], expected [2, 4, 4]"));
  expected.num_q_blocks = 3;
  expected.block_size = 64;
  EXPECT_THAT(message_of([&] { load_mask(path, expected); }),
              HasSubstr("metadata 'block_size' is '128', expected 64"));
}

TEST(Mask, RefusesOtherTensorsAndCopiesMisalignedWords) {
  const Folder folder;
  const std::string path = folder.file("m.safetensors");
  const BlockMask expected{nullptr, 1, 1, 1, 128};
  put(path, safetensors(R"({"mask":{"dtype":"I32","shape":[1,1,2],"data_offsets":[0,8]}})", 8));
  EXPECT_THAT(message_of([&] { load_mask(path, expected); }),
              HasSubstr("dtype is I32, expected U32"));
  put(path, safetensors(R"({"m":{"dtype":"U32","shape":[1,1,2],"data_offsets":[0,8]}})", 8));
  EXPECT_THAT(message_of([&] { load_mask(path, expected); }), HasSubstr("has no tensor 'mask'"));
  std::string json = R"({"mask":{"dtype":"U32","shape":[1,1,2],"data_offsets":[0,8]}})";
  json.resize((json.size() + 7) / 8 * 8 + 4, ' ');
  put(path, safetensors(json, 8));
  const MaskFile file = load_mask(path, expected);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.mask.words) % 8, 0u);
  EXPECT_EQ(file.mask.words[1], 0x01010101u);
}

}  // namespace
}  // namespace crisp::files
