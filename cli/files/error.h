// error.h - the one error of the readers and writers: names the file, the tensor where there is
// one, the value found and what was expected.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace crisp::files {

struct FileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `text` in single quotes, at most 64 bytes of it, unprintable bytes as \xNN: names in a hostile
// file must not reach a terminal raw.
std::string printable(std::string_view text);

template <class... Parts>
[[noreturn]] void fail(std::string_view file, const Parts&... parts) {
  std::ostringstream message;
  message << file << ": ";
  (message << ... << parts);
  throw FileError(message.str());
}

}  // namespace crisp::files
