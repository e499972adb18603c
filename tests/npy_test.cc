// The npy reader and writer: round trips, numpy's headers, and every refusal by name.
#include "tensor_files.h"

namespace crisp::files {
namespace {

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

}  // namespace
}  // namespace crisp::files
