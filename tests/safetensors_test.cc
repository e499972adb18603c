// The safetensors reader and writer: round trips, a file of the Python writer, and every way a
// header can lie, each with the message that must name it.
#include "tensor_files.h"

namespace crisp::files {
namespace {

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

}  // namespace
}  // namespace crisp::files
