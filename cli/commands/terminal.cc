#include "commands/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace crisp::cli {

Progress::Progress() : on_terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::show(std::string_view text) {
  if (!on_terminal_) return;
  fmt::print(stderr, "\r\x1b[K{}", text);
  std::fflush(stderr);
  shown_ = true;
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      line += c == 0 ? fmt::format("{:<{}}", row[c], widths[c])
                     : fmt::format("  {:>{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string printable_name(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace crisp::cli
