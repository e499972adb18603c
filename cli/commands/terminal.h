// terminal.h - text output: progress on a terminal, tables, bars.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace crisp::cli {

// One line on stderr that is overwritten and, at the end, erased. Silent unless stderr is a
// terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(std::string_view text);

 private:
  bool on_terminal_;
  bool shown_ = false;
};

// Columns as wide as their widest cell; the first is aligned left, the others right. A cell's bytes
// count as its width, so cells are ASCII.
std::string table(const std::vector<std::vector<std::string>>& rows);

// A name for a terminal: control bytes as \xNN.
std::string printable_name(std::string_view text);

}  // namespace crisp::cli
