#include "files/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "files/atomic_file.h"
#include "files/error.h"
#include "files/header_reader.h"

namespace crisp::files {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian");

namespace {

struct TypeEntry {
  ElementType type;
  const char* name;
  int64_t bytes;
};

constexpr TypeEntry kTypes[] = {
    {ElementType::kBool, "BOOL", 1},      {ElementType::kU8, "U8", 1},
    {ElementType::kI8, "I8", 1},          {ElementType::kF8E5M2, "F8_E5M2", 1},
    {ElementType::kF8E4M3, "F8_E4M3", 1}, {ElementType::kU16, "U16", 2},
    {ElementType::kI16, "I16", 2},        {ElementType::kF16, "F16", 2},
    {ElementType::kBF16, "BF16", 2},      {ElementType::kU32, "U32", 4},
    {ElementType::kI32, "I32", 4},        {ElementType::kF32, "F32", 4},
    {ElementType::kU64, "U64", 8},        {ElementType::kI64, "I64", 8},
    {ElementType::kF64, "F64", 8}};

const TypeEntry& entry_of(ElementType type) { return kTypes[static_cast<size_t>(type)]; }

TensorView check_entry(std::string_view file, const std::string& name, const HeaderEntry& entry,
                       std::span<const std::byte> data) {
  const std::string where = "tensor " + printable(name) + ": ";
  TensorView view;
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const TypeEntry& t) { return entry.dtype == t.name; });
  if (type == std::end(kTypes)) fail(file, where, "unknown dtype ", printable(entry.dtype));
  view.type = type->type;
  for (const uint64_t size : entry.shape) {
    if (size > static_cast<uint64_t>(INT64_MAX)) fail(file, where, "size ", size, " is too large");
    view.shape.push_back(static_cast<int64_t>(size));
  }
  const std::optional<int64_t> bytes = tensor_bytes(view.shape, view.type);
  if (!bytes) fail(file, where, "shape ", shape_text(view.shape), " overflows 64 bits");
  const uint64_t begin = entry.data_offsets[0], end = entry.data_offsets[1];
  if (begin > end || end > data.size()) {
    fail(file, where, "data_offsets [", begin, ", ", end, "] do not lie in order within the ",
         data.size(), " bytes of data");
  }
  if (end - begin != static_cast<uint64_t>(*bytes)) {
    fail(file, where, "data_offsets span ", end - begin, " bytes, ", entry.dtype, " ",
         shape_text(view.shape), " needs ", *bytes);
  }
  view.data = data.subspan(begin, end - begin);
  return view;
}

// The format demands that tensors follow each other without overlap or hole.
void check_cover(std::string_view file, const Safetensors& contents,
                 std::span<const std::byte> data) {
  struct Range {
    const std::byte *begin, *end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, view] : contents.tensors) {
    ranges.push_back({view.data.data(), view.data.data() + view.data.size(), &name});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  const std::byte* at = data.data();
  for (const Range& range : ranges) {
    if (range.begin < at) fail(file, "tensor ", printable(*range.name), " overlaps another tensor");
    if (range.begin > at) {
      fail(file, "tensor ", printable(*range.name), ": ", range.begin - at,
           " bytes before it belong to no tensor");
    }
    at = range.end;
  }
  if (at != data.data() + data.size()) {
    fail(file, data.data() + data.size() - at, " bytes at the end belong to no tensor");
  }
}

// Length and JSON of the header, padded so that the data begins at a multiple of 64.
std::string header_bytes(const std::string& path, std::span<const NamedTensor> tensors,
                         const std::map<std::string, std::string, std::less<>>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::set<std::string> names = {"__metadata__"};
  size_t offset = 0;
  for (const auto& [name, view] : tensors) {
    if (!names.insert(name).second) fail(path, "tensor ", printable(name), " appears twice");
    const auto bytes = tensor_bytes(view.shape, view.type);
    if (!bytes || static_cast<uint64_t>(*bytes) != view.data.size()) {
      fail(path, "tensor ", printable(name), ": ", view.data.size(), " bytes given for ",
           crisp::files::name(view.type), " ", shape_text(view.shape));
    }
    header[name] = {{"dtype", crisp::files::name(view.type)},
                    {"shape", view.shape},
                    {"data_offsets", {offset, offset + view.data.size()}}};
    offset += view.data.size();
  }
  std::string json = header.dump();
  json.resize((8 + json.size() + 63) / 64 * 64 - 8, ' ');
  if (json.size() > kMaxHeaderBytes) fail(path, "the header needs ", json.size(), " bytes");
  const uint64_t length = json.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + json;
}

}  // namespace

int64_t element_bytes(ElementType type) { return entry_of(type).bytes; }
const char* name(ElementType type) { return entry_of(type).name; }

std::optional<int64_t> tensor_bytes(std::span<const int64_t> shape, ElementType type) {
  // A zero anywhere makes the product zero, whatever the other sizes are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t bytes = element_bytes(type);
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Safetensors parse_safetensors(std::span<const std::byte> bytes, std::string_view file) {
  uint64_t header_length = 0;
  if (bytes.size() < sizeof header_length) {
    fail(file, "is ", bytes.size(), " bytes long, expected at least 8 (the header length)");
  }
  std::memcpy(&header_length, bytes.data(), sizeof header_length);
  bytes = bytes.subspan(sizeof header_length);
  if (header_length > kMaxHeaderBytes) {
    fail(file, "the header length is ", header_length, " bytes, expected at most ", kMaxHeaderBytes,
         "; is this a safetensors file?");
  }
  if (header_length > bytes.size()) {
    fail(file, "the header length is ", header_length, " bytes, but only ", bytes.size(),
         " follow");
  }
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()), header_length);
  const std::span<const std::byte> data = bytes.subspan(header_length);
  Header header = read_header(json, file);
  Safetensors contents;
  contents.metadata = std::move(header.metadata);
  for (const auto& [name, entry] : header.tensors) {
    contents.tensors.emplace(name, check_entry(file, name, entry, data));
  }
  check_cover(file, contents, data);
  return contents;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), contents_(parse_safetensors(file_.bytes(), path)) {}

const TensorView& SafetensorsFile::tensor(std::string_view name) const {
  const auto found = contents_.tensors.find(name);
  if (found != contents_.tensors.end()) return found->second;
  constexpr int kMaxListed = 8;
  std::string names;
  int listed = 0;
  for (const auto& [other, view] : contents_.tensors) {
    if (++listed > kMaxListed) break;
    names += (listed > 1 ? ", " : "") + printable(other);
  }
  if (listed > kMaxListed) names += ", ...";
  fail(path(), "has no tensor ", printable(name), "; it holds ", listed == 0 ? "none" : names);
}

void write_safetensors(AtomicFile& file, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string, std::less<>>& metadata) {
  const std::string header = header_bytes(file.path(), tensors, metadata);
  file.write(std::as_bytes(std::span(header)));
  for (const NamedTensor& named : tensors) file.write(named.tensor.data);
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string, std::less<>>& metadata) {
  AtomicFile file(path);
  write_safetensors(file, tensors, metadata);
  file.commit();
}

}  // namespace crisp::files
