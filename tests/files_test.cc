// Readers and writers of tensor files: round trips, fixtures laid out as Python's writers do, and
// every way a file can lie, each with the message that must name it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "crisp/crisp.h"
#include "files/atomic_file.h"
#include "files/error.h"
#include "files/npy.h"
#include "files/qkv.h"
#include "files/safetensors.h"

namespace crisp::files {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A folder of the test's own, removed with its content.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "crisp-files-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  size_t num_entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(path_), {}));
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void put(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}
std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::string safetensors(const std::string& json, size_t data_bytes) {
  const uint64_t length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json + std::string(data_bytes, '\x01');
}

std::string npy(const std::string& dict, size_t data_bytes, char version = 1) {
  std::string out("\x93NUMPY", 6);
  out += {version, '\0'};
  const auto length = static_cast<uint32_t>(dict.size());
  out.append(reinterpret_cast<const char*>(&length), version == 1 ? 2 : 4);
  return out + dict + std::string(data_bytes, '\x01');
}

template <class Read>
std::string message_of(Read read) {
  try {
    read();
  } catch (const FileError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string refusal(const std::string& content) {
  return message_of(
      [&] { parse_safetensors(std::as_bytes(std::span(content)), "file.safetensors"); });
}
std::string npy_refusal(const std::string& content) {
  return message_of([&] { parse_npy(std::as_bytes(std::span(content)), "file.npy"); });
}

TEST(Safetensors, ReadsBackWhatItWrites) {
  const Folder folder;
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<uint32_t> b = {7, 8};
  const NamedTensor tensors[] = {{"b", {ElementType::kU32, {2}, bytes_of(b)}},
                                 {"a", {ElementType::kF32, {1, 2, 3}, bytes_of(a)}},
                                 {"none", {ElementType::kF64, {0, 9}, {}}}};
  const std::string path = folder.file("t.safetensors");
  write_safetensors(path, tensors, {{"scale", "0.125"}, {"note", "\"quotes\" and \xc3\xa9"}});
  const SafetensorsFile file(path);
  ASSERT_EQ(file.contents().tensors.size(), 3u);
  EXPECT_EQ(file.contents().metadata.at("scale"), "0.125");
  EXPECT_EQ(file.contents().metadata.at("note"), "\"quotes\" and \xc3\xa9");
  const TensorView& view = file.tensor("a");
  EXPECT_EQ(view.type, ElementType::kF32);
  EXPECT_EQ(view.shape, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(std::memcmp(view.data.data(), a.data(), view.data.size()), 0);
  EXPECT_EQ(file.tensor("none").shape, (std::vector<int64_t>{0, 9}));
  // Data begins at a multiple of 64: the first tensor of the file is "b".
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor("b").data.data()) % 64, 0u);
  EXPECT_EQ(folder.num_entries(), 1u) << "a temporary file was left";
}

// Byte for byte what Python's safetensors 0.8.0 writes for {"x": float16 [1, 2]} with metadata: the
// JSON is padded with spaces so that the data is 8-byte aligned.
TEST(Safetensors, ReadsAFileOfThePythonWriter) {
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"x":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]}} )";
  const std::string content = safetensors(json, 4);
  ASSERT_EQ(content.size() % 8, 4u);
  const Safetensors contents = parse_safetensors(std::as_bytes(std::span(content)), "x");
  EXPECT_EQ(contents.metadata.at("format"), "pt");
  EXPECT_EQ(contents.tensors.at("x").type, ElementType::kF16);
  EXPECT_EQ(contents.tensors.at("x").data.size(), 4u);
}

TEST(Safetensors, RefusesABadHeaderLength) {
  EXPECT_THAT(refusal("abc"), HasSubstr("file.safetensors: is 3 bytes long, expected at least 8"));
  EXPECT_THAT(refusal(std::string(16, '\xff')),
              HasSubstr("header length is 18446744073709551615 bytes, expected at most 100000000"));
  std::string content = safetensors("{}", 0);
  content[0] = 3;
  EXPECT_THAT(refusal(content), HasSubstr("header length is 3 bytes, but only 2 follow"));
  const uint64_t limit = kMaxHeaderBytes + 1;
  std::memcpy(content.data(), &limit, 8);
  EXPECT_THAT(refusal(content), HasSubstr("is 100000001 bytes, expected at most"));
}

TEST(Safetensors, RefusesBadJson) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"{} x", "not valid JSON"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[NaN],\"data_offsets\":[0,4]}}", "not valid JSON"},
      {"{\"a\\ud800\":1}", "not valid JSON"},
      {"[]", "header is a list, expected a JSON object"},
      {"3", "header is 3, expected a JSON object"},
      {"null", "header is null, expected a JSON object"},
      {"{\"a\":5}", "tensor 'a': is 5, expected an object"},
      {"{\"a\":[[[[[[[[]]]]]]]]}", "tensor 'a': is a list, expected an object"},
      {"{\"a\":{\"dtype\":{}}}", "tensor 'a': dtype is an object, expected a string"},
      {"{\"__metadata__\":[]}", "tensor '__metadata__': is a list, expected an object"},
      {"{\"__metadata__\":{\"scale\":1}}", "metadata 'scale' is 1, expected a string"},
      {"{\"__metadata__\":{\"s\":\"1\",\"s\":\"2\"}}", "metadata 's' appears twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "'__metadata__' appears twice"},
  };
  for (const auto& [json, expected] : cases) {
    EXPECT_THAT(refusal(safetensors(json, 0)), HasSubstr(expected)) << json;
  }
  // A deep nest must cost neither stack nor time.
  EXPECT_THAT(refusal(safetensors("{\"a\":" + std::string(1 << 20, '['), 0)),
              HasSubstr("is a list, expected an object"));
}

TEST(Safetensors, RefusesBadTensors) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]})", "unknown dtype 'F31'"},
      {R"("a":{"dtype":1,"shape":[1],"data_offsets":[0,4]})", "dtype is 1, expected a string"},
      {R"("a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]})",
       "tensor 'a': shape holds -1, expected a list of counts >= 0"},
      {R"("a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", "shape holds '1.0'"},
      {R"("a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]})", "shape holds the string '1'"},
      {R"("a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]})", "shape holds true"},
      {R"("a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})", "shape holds a list"},
      {R"("a":{"dtype":"F32","shape":1,"data_offsets":[0,4]})", "shape is 1, expected a list"},
      {R"("a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})",
       "size 18446744073709551615 is too large"},
      {R"("a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]})",
       "shape [4294967296, 4294967296] overflows 64 bits"},
      {R"("a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})",
       "overflows 64 bits"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]})",
       "data_offsets [0, 8] do not lie in order within the 4 bytes of data"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]})", "data_offsets [4, 0]"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551615,3]})",
       "data_offsets [18446744073709551615, 3]"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]})", "data_offsets holds -4"},
      {R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]})",
       "data_offsets span 4 bytes, F32 [2] needs 8"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,2,4]})",
       "data_offsets has 3 numbers, expected 2"},
      {R"("a":{"dtype":"F32","shape":[1]})", "must have dtype, shape and data_offsets"},
      {R"("a":{})", "must have dtype, shape and data_offsets"},
      {R"("a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})",
       "field 'dtype' appears twice"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})", "unknown field 'x'"},
      {R"("a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
       R"("a":{"dtype":"F16","shape":[1],"data_offsets":[2,4]})",
       "tensor 'a' appears twice"},
      {R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"F16","shape":[1],"data_offsets":[2,4]})",
       "tensor 'b' overlaps another tensor"},
      {R"("a":{"dtype":"F16","shape":[1],"data_offsets":[2,4]})",
       "tensor 'a': 2 bytes before it belong to no tensor"},
      {R"("a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]})",
       "2 bytes at the end belong to no tensor"},
      {R"("\u001b[31m":{"dtype":"F32","shape":[2],"data_offsets":[0,4]})", "tensor '\\x1b[31m'"},
      {R"("a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,)"
       R"(1,1,1],"data_offsets":[0,4]})",
       "shape has more than 32 numbers"},
  };
  for (const auto& [tensors, expected] : cases) {
    EXPECT_THAT(refusal(safetensors(std::string("{") + tensors + "}", 4)), HasSubstr(expected))
        << tensors;
  }
}

TEST(Safetensors, EveryCutOfAFileIsRefused) {
  const std::string whole =
      safetensors(R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})", 16);
  EXPECT_EQ(refusal(whole), "nothing was thrown");
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(refusal(whole.substr(0, length)), "nothing was thrown") << length;
  }
}

TEST(Safetensors, TensorNotThereNamesWhatIs) {
  const Folder folder;
  const std::string path = folder.file("t.safetensors");
  put(path, safetensors(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
  EXPECT_EQ(message_of([&] { SafetensorsFile(path).tensor("q"); }),
            path + ": has no tensor 'q'; it holds 'x'");
}

TEST(Safetensors, WriterRefusesWhatDoesNotFit) {
  const Folder folder;
  const std::vector<float> a = {1, 2};
  const NamedTensor twice[] = {{"a", {ElementType::kF32, {2}, bytes_of(a)}},
                               {"a", {ElementType::kF32, {2}, bytes_of(a)}}};
  const std::string path = folder.file("t.safetensors");
  EXPECT_THAT(message_of([&] { write_safetensors(path, twice); }), HasSubstr("appears twice"));
  const NamedTensor wrong[] = {{"a", {ElementType::kF32, {3}, bytes_of(a)}}};
  EXPECT_THAT(message_of([&] { write_safetensors(path, wrong); }),
              HasSubstr("8 bytes given for F32 [3]"));
  EXPECT_EQ(folder.num_entries(), 0u);
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const Folder folder;
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("none")); }),
              HasSubstr("none: cannot be opened: No such file"));
  EXPECT_THAT(message_of([&] { MappedFile(folder.path().string()); }),
              HasSubstr("is not a regular file"));
  put(folder.file("empty"), "");
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("empty")); }), HasSubstr("is empty"));
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("pipe")); }),
              HasSubstr("is not a regular file"));
}

TEST(AtomicFile, ReplacesAsAWholeOrNotAtAll) {
  const Folder folder;
  const std::string path = folder.file("out");
  put(path, "old");
  {
    AtomicFile file(path);
    file.write(std::as_bytes(std::span("new", 3)));
    EXPECT_EQ(get(path), "old");
  }
  EXPECT_EQ(get(path), "old");
  EXPECT_EQ(folder.num_entries(), 1u);
  AtomicFile file(path);
  file.write(std::as_bytes(std::span("new", 3)));
  file.commit();
  EXPECT_EQ(get(path), "new");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(AtomicFile, FollowsASymbolicLink) {
  const Folder folder;
  put(folder.file("real"), "old");
  fs::create_symlink("real", folder.file("link"));
  AtomicFile file(folder.file("link"));
  file.write(std::as_bytes(std::span("new", 3)));
  file.commit();
  EXPECT_TRUE(fs::is_symlink(folder.file("link")));
  EXPECT_EQ(get(folder.file("real")), "new");
}

TEST(AtomicFile, RefusesImpossibleTargets) {
  const Folder folder;
  EXPECT_THAT(message_of([&] { check_writable(folder.file("no/such/out")); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(message_of([&] { check_writable(folder.path().string()); }),
              HasSubstr("not a regular file"));
  EXPECT_THAT(message_of([&] { check_writable(""); }), HasSubstr("name of the file"));
  put(folder.file("plain"), "x");
  EXPECT_THAT(message_of([&] { check_writable(folder.file("plain/out")); }),
              HasSubstr("cannot be written"));
}

// A file-size limit makes write() fail as a full disk does.
TEST(AtomicFile, FullDiskLeavesNothing) {
  const Folder folder;
  put(folder.file("out"), "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::vector<float> values(1000, 1.f);
  const NamedTensor tensor{"a", {ElementType::kF32, {1000}, bytes_of(values)}};
  const std::string message = message_of([&] {
    write_safetensors(folder.file("out"), {&tensor, 1});
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("out: cannot be written: File too large"));
  EXPECT_EQ(get(folder.file("out")), "old");
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(Npy, ReadsBackWhatItWrites) {
  const Folder folder;
  const std::vector<uint16_t> values = {1, 2, 3, 4, 5, 6};
  for (const ElementType type : {ElementType::kF16, ElementType::kBF16}) {
    write_npy(folder.file("a.npy"), {type, {3, 2}, bytes_of(values)});
    const NpyFile file(folder.file("a.npy"));
    EXPECT_EQ(file.array().type, type);
    EXPECT_EQ(file.array().shape, (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(std::memcmp(file.array().data.data(), values.data(), 12), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.array().data.data()) % 64, 0u);
  }
  EXPECT_THAT(message_of([&] {
                write_npy(folder.file("b.npy"), {ElementType::kU32, {3}, bytes_of(values)});
              }),
              HasSubstr("cannot write U32 as npy"));
  EXPECT_EQ(folder.num_entries(), 1u);
}

TEST(Npy, ReadsTheHeadersOfNumpy) {
  // As numpy writes them: versions 1 to 3, a single size with its comma, a scalar.
  const std::tuple<std::string, size_t, std::vector<int64_t>> cases[] = {
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }         \n", 24, {2, 3}},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n", 8, {2}},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", 4, {}},
      {"{'shape': (0, 3), 'fortran_order': False, 'descr': '<f4'}\n", 0, {0, 3}},
  };
  for (const auto& [dict, size, shape] : cases) {
    for (const char version : {'\1', '\2', '\3'}) {
      const std::string content = npy(dict, size, version);
      EXPECT_EQ(parse_npy(std::as_bytes(std::span(content)), "x").shape, shape) << dict;
    }
  }
}

TEST(Npy, RefusesByName) {
  const std::string tail = ", 'fortran_order': False, 'shape': (1,), }\n";
  const std::pair<std::string, const char*> cases[] = {
      {"", "does not begin with an npy header"},
      {"PK\x03\x04 a zip archive", "does not begin with an npy header"},
      {npy("{'descr': '<f4'" + tail, 4, 4), "npy version 4.0, expected 1.0, 2.0 or 3.0"},
      {npy("{'descr': '<f8'" + tail, 8), "dtype '<f8' (float64): save it as float32"},
      {npy("{'descr': '>f4'" + tail, 4), "dtype '>f4' (big-endian)"},
      {npy("{'descr': '|O'" + tail, 4), "dtype '|O' (Python objects): never loaded"},
      {npy("{'descr': '<i4'" + tail, 4), "dtype '<i4'; expected '<f4', '<f2'"},
      {npy("{'descr': [('a', '<f4')]" + tail, 4), "descr is a list (a structured array)"},
      {npy("{'descr': '<f4'" + tail, 5), "holds 5 bytes of data, F32 [1] needs 4"},
      {npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", 16), "Fortran order"},
      {npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,), }", 4), "must be True or False"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", 4), "shape must hold"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1e3,), }", 4), "expected ')'"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,), }", 4),
       "shape must hold counts from 0 to 2^63 - 1"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 4),
       "overflows 64 bits"},
      {npy("{'descr': '<f4', 'descr': '<f4'" + tail, 4), "key 'descr' appears twice"},
      {npy("{'descr': '<f4', 'x': 1" + tail, 4), "unknown key 'x'"},
      {npy("{'descr': '<f4', 'fortran_order': False, }", 4), "must have descr"},
      {npy("{'descr': '<f4" + tail, 4), "header:"},
      {npy("{'descr': '<f4'" + tail + "import os", 4), "unexpected text"},
      {npy("{'descr': '<f4'" + tail, 4).substr(0, 20), "the header length is"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::string(99, '1') + ")}", 4),
       "shape must hold"},
  };
  for (const auto& [content, expected] : cases) {
    EXPECT_THAT(npy_refusal(content), HasSubstr(expected)) << content;
  }
}

// ---- q, k, v

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
  save_mask(path, mask);
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
