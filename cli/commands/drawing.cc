#include "commands/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace crisp::cli {

namespace {

constexpr int kBarColumns = 50;
constexpr double kSmallestMass = 1e-6;  // left edge of the log scale, whose right edge is 1

// Column of a mass on the log scale, 0 to kBarColumns.
int bar_column(double mass) {
  if (!(mass > kSmallestMass)) return 0;
  const double share = 1 - std::log(mass) / std::log(kSmallestMass);
  return std::clamp(static_cast<int>(std::lround(share * kBarColumns)), 1, kBarColumns);
}

std::string bar(double mass, double threshold) {
  const int length = bar_column(mass);
  const int mark = threshold > 0 ? bar_column(threshold) : -1;
  std::string text;
  for (int column = 0; column <= kBarColumns; ++column) {
    if (column == mark) {
      text += column < length ? "┃" : "┊";
    } else {
      text += column < length ? "█" : " ";
    }
  }
  return text;
}

}  // namespace

std::string draw_masses(const MassChart& chart, int64_t max_lines) {
  const auto num_blocks = static_cast<int64_t>(chart.mass.size());
  const int64_t group = (num_blocks + max_lines - 1) / max_lines;
  std::string text;
  for (int64_t begin = 0; begin < num_blocks; begin += group) {
    const int64_t end = std::min(begin + group, num_blocks);
    double largest = 0;
    int64_t num_kept = 0;
    bool any_forced = false;
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      largest = std::max(largest, chart.mass[at]);
      num_kept += chart.kept[at];
      any_forced = any_forced || chart.forced[at];
    }
    std::string kept;
    if (num_kept > 0) kept = group == 1 ? " kept" : fmt::format(" kept {}", num_kept);
    text += fmt::format("{:>6} {} {:.6f}{}{}\n", begin, bar(largest, chart.threshold), largest,
                        kept, any_forced ? " (forced)" : "");
  }
  return text;
}

MaskDrawing draw_mask(const reference::BlockSet& blocks, int64_t max_columns) {
  MaskDrawing drawing;
  const int64_t step = std::max<int64_t>(1, (blocks.cols + max_columns - 1) / max_columns);
  drawing.blocks_per_mark = step;
  const auto is_set = [&](int64_t mark_row, int64_t mark_col) {
    for (int64_t r = mark_row * step; r < std::min((mark_row + 1) * step, blocks.rows); ++r) {
      for (int64_t c = mark_col * step; c < std::min((mark_col + 1) * step, blocks.cols); ++c) {
        if (blocks.at(r, c)) return true;
      }
    }
    return false;
  };
  for (int64_t row = 0; row * step < blocks.rows; row += 2) {
    std::string line;
    for (int64_t col = 0; col * step < blocks.cols; ++col) {
      const bool upper = is_set(row, col), lower = is_set(row + 1, col);
      line += upper ? (lower ? "█" : "▀") : (lower ? "▄" : " ");
    }
    drawing.lines.push_back(line);
  }
  return drawing;
}

}  // namespace crisp::cli
