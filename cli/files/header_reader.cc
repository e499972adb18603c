#include "files/header_reader.h"

#include <nlohmann/json.hpp>

#include "files/error.h"

namespace crisp::files {

namespace {

using Json = nlohmann::json;

// Depths: 1 the header, 2 one tensor or the metadata, 3 a shape or offsets list.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}
  Header take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (depth_ >= 2) unexpected("an object");
    ++depth_;
    if (depth_ == 2 && !in_metadata_) entry_ = {};
    if (depth_ == 2) seen_ = 0;
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) {
      if (seen_ != (kDtype | kShape | kOffsets)) {
        fail(file_, where(), "must have dtype, shape and data_offsets");
      }
      header_.tensors.emplace(name_, std::move(entry_));
    }
    if (depth_ == 2) in_metadata_ = false;
    --depth_;
    return true;
  }

  bool key(string_t& key) override {
    if (depth_ == 1) {
      in_metadata_ = key == "__metadata__";
      name_ = key;
      if ((in_metadata_ && seen_metadata_) || header_.tensors.contains(key)) {
        fail(file_, "tensor ", printable(key), " appears twice");
      }
      seen_metadata_ = seen_metadata_ || in_metadata_;
    } else if (in_metadata_) {
      if (header_.metadata.contains(key))
        fail(file_, "metadata ", printable(key), " appears twice");
    } else {
      const unsigned field = key == "dtype"          ? kDtype
                             : key == "shape"        ? kShape
                             : key == "data_offsets" ? kOffsets
                                                     : 0u;
      if (field == 0) {
        fail(file_, where(), "unknown field ", printable(key),
             ", expected dtype, shape, data_offsets");
      }
      if ((seen_ & field) != 0) fail(file_, where(), "field ", printable(key), " appears twice");
      seen_ |= field;
    }
    key_ = key;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ == 2 && !in_metadata_ && list_ == nullptr && key_ == "shape") {
      list_ = &entry_.shape;
    } else if (depth_ == 2 && !in_metadata_ && list_ == nullptr && key_ == "data_offsets") {
      list_ = &entry_.data_offsets;
    } else {
      unexpected("a list");
    }
    return true;
  }

  bool end_array() override {
    if (key_ == "data_offsets" && list_->size() != 2) {
      fail(file_, where(), "data_offsets has ", list_->size(), " numbers, expected 2 (begin, end)");
    }
    list_ = nullptr;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (list_ == nullptr) unexpected(std::to_string(value));
    if (list_->size() >= kMaxRank) fail(file_, where(), key_, " has more than 32 numbers");
    list_->push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      header_.metadata.emplace(key_, value);
    } else if (depth_ == 2 && list_ == nullptr && key_ == "dtype") {
      entry_.dtype = value;
    } else {
      unexpected("the string " + printable(value));
    }
    return true;
  }

  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { unexpected(printable(text)); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    fail(file_, "the header is not valid JSON at its byte ", position);
  }

 private:
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4;
  static constexpr size_t kMaxRank = 32;

  std::string where() const { return "tensor " + printable(name_) + ": "; }

  [[noreturn]] void unexpected(const std::string& what) const {
    if (depth_ == 0) fail(file_, "the header is ", what, ", expected a JSON object");
    if (depth_ == 1) fail(file_, where(), "is ", what, ", expected an object");
    if (in_metadata_)
      fail(file_, "metadata ", printable(key_), " is ", what, ", expected a string");
    fail(file_, where(), key_, list_ != nullptr ? " holds " : " is ", what, ", expected ",
         key_ == "dtype"   ? "a string"
         : key_ == "shape" ? "a list of counts >= 0"
                           : "two byte offsets >= 0");
  }

  std::string_view file_;
  Header header_;
  HeaderEntry entry_;
  std::string name_, key_;
  std::vector<uint64_t>* list_ = nullptr;  // the list being filled
  int depth_ = 0;
  unsigned seen_ = 0;  // fields of the current tensor
  bool in_metadata_ = false, seen_metadata_ = false;
};

}  // namespace

Header read_header(std::string_view json, std::string_view file) {
  HeaderReader reader(file);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return reader.take();
}

}  // namespace crisp::files
