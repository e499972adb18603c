#include "files/npy.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "files/atomic_file.h"
#include "files/error.h"

namespace crisp::files {

namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kMaxHeader = 1 << 20;  // bytes; numpy's own headers take about a hundred
constexpr size_t kMaxRank = 32;         // numpy's own limit

// A reader of the header's Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class DictReader {
 public:
  DictReader(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  struct Dict {
    std::optional<std::string> descr;
    std::optional<bool> fortran_order;
    std::optional<std::vector<int64_t>> shape;
  };

  Dict read() {
    Dict dict;
    expect('{');
    while (!take('}')) {
      const std::string key = read_string();
      expect(':');
      if (key == "descr") {
        set(dict.descr, key, read_descr());
      } else if (key == "fortran_order") {
        set(dict.fortran_order, key, read_bool());
      } else if (key == "shape") {
        set(dict.shape, key, read_shape());
      } else {
        fail(file_, "header: unknown key ", printable(key),
             ", expected descr, fortran_order, shape");
      }
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail(file_, "header: unexpected text at its byte ", at_);
    if (!dict.descr || !dict.fortran_order || !dict.shape) {
      fail(file_, "header: must have descr, fortran_order and shape");
    }
    return dict;
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t'))
      ++at_;
  }
  bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(file_, "header: expected '", c, "' at its byte ", at_);
  }
  template <class T>
  void set(std::optional<T>& field, const std::string& key, T value) {
    if (field) fail(file_, "header: key ", printable(key), " appears twice");
    field = std::move(value);
  }
  std::string read_string() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') fail(file_, "header: expected a string at its byte ", at_);
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) fail(file_, "header: a string does not end");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }
  std::string read_descr() {
    if (take('['))
      fail(file_, "header: descr is a list (a structured array), expected '<f4' or '<f2'");
    return read_string();
  }
  bool read_bool() {
    skip_space();
    for (const std::string_view word : {"False", "True"}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return word == "True";
      }
    }
    fail(file_, "header: fortran_order must be True or False");
  }
  std::vector<int64_t> read_shape() {
    std::vector<int64_t> shape;
    expect('(');
    while (!take(')')) {
      skip_space();
      int64_t size = 0;
      const auto [end, error] =
          std::from_chars(text_.data() + at_, text_.data() + text_.size(), size);
      if (error != std::errc() || size < 0) {
        fail(file_, "header: shape must hold counts from 0 to 2^63 - 1 (byte ", at_, ")");
      }
      at_ = static_cast<size_t>(end - text_.data());
      if (shape.size() >= kMaxRank) fail(file_, "header: shape has more than 32 numbers");
      shape.push_back(size);
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return shape;
  }

  std::string_view text_, file_;
  size_t at_ = 0;
};

ElementType element_type(std::string_view file, const std::string& descr) {
  if (descr == "<f4") return ElementType::kF32;
  if (descr == "<f2") return ElementType::kF16;
  if (descr == "<V2" || descr == "|V2") return ElementType::kBF16;
  const char* why = descr == "<f8"            ? " (float64): save it as float32"
                    : descr.starts_with('>')  ? " (big-endian): save it little-endian"
                    : descr.starts_with("|O") ? " (Python objects): never loaded"
                                              : "";
  fail(file, "dtype ", printable(descr), why, "; expected '<f4', '<f2' or, for bfloat16, '<V2'");
}

// The header's text; `bytes` is advanced to the data.
std::string_view header_text(std::span<const std::byte>& bytes, std::string_view file) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.size() < 10 || !text.starts_with(kMagic)) {
    fail(file, "does not begin with an npy header");
  }
  const int version = static_cast<unsigned char>(text[6]);
  if (version < 1 || version > 3 || text[7] != 0) {
    fail(file, "npy version ", version, ".", static_cast<int>(static_cast<unsigned char>(text[7])),
         ", expected 1.0, 2.0 or 3.0");
  }
  const size_t length_bytes = version == 1 ? 2 : 4;
  const size_t prefix = 8 + length_bytes;
  uint32_t length = 0;
  if (text.size() < prefix) fail(file, "ends within its header");
  std::memcpy(&length, text.data() + 8, length_bytes);
  if (length > kMaxHeader || length > text.size() - prefix) {
    fail(file, "the header length is ", length, " bytes, but ", text.size() - prefix,
         " follow (at most ", kMaxHeader, " accepted)");
  }
  bytes = bytes.subspan(prefix + length);
  return text.substr(prefix, length);
}

}  // namespace

TensorView parse_npy(std::span<const std::byte> bytes, std::string_view file) {
  const auto dict = DictReader(header_text(bytes, file), file).read();
  TensorView view{element_type(file, *dict.descr), *dict.shape, bytes};
  if (*dict.fortran_order && view.shape.size() > 1) {
    fail(file, "is stored in Fortran order, expected C order (numpy.ascontiguousarray)");
  }
  const std::optional<int64_t> needed = tensor_bytes(view.shape, view.type);
  if (!needed) fail(file, "shape ", shape_text(view.shape), " overflows 64 bits");
  if (static_cast<uint64_t>(*needed) != bytes.size()) {
    fail(file, "holds ", bytes.size(), " bytes of data, ", name(view.type), " ",
         shape_text(view.shape), " needs ", *needed);
  }
  return view;
}

NpyFile::NpyFile(const std::string& path) : file_(path), array_(parse_npy(file_.bytes(), path)) {}

void write_npy(const std::string& path, const TensorView& array) {
  const char* descr = array.type == ElementType::kF32    ? "<f4"
                      : array.type == ElementType::kF16  ? "<f2"
                      : array.type == ElementType::kBF16 ? "<V2"
                                                         : nullptr;
  if (descr == nullptr) fail(path, "cannot write ", name(array.type), " as npy");
  const std::optional<int64_t> bytes = tensor_bytes(array.shape, array.type);
  if (!bytes || static_cast<uint64_t>(*bytes) != array.data.size() ||
      array.shape.size() > kMaxRank) {
    fail(path, array.data.size(), " bytes given for ", name(array.type), " ",
         shape_text(array.shape), " (at most ", kMaxRank, " sizes)");
  }
  std::string shape;
  for (const int64_t size : array.shape) shape += std::to_string(size) + ", ";
  std::string dict =
      std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  dict.resize((10 + dict.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');  // data 64-byte aligned
  dict += '\n';
  const auto length = static_cast<uint16_t>(dict.size());  // at most 32 sizes: fits
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(length & 255), static_cast<char>(length >> 8)};
  header += dict;
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(header)));
  file.write(array.data);
  file.commit();
}

}  // namespace crisp::files
