#include "files/error.h"

namespace crisp::files {

std::string printable(std::string_view text) {
  constexpr size_t kMaxBytes = 64;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kMaxBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (text.size() > kMaxBytes) out += "...";
  return out + "'";
}

}  // namespace crisp::files
