// drawing.h - masses and masks drawn with characters (UTF-8).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/types.h"

namespace crisp::cli {

// Mass per block of one direction, with what the selection made of it.
struct MassChart {
  std::vector<double> mass;  // [num_blocks]
  std::vector<bool> kept;    // of this direction
  std::vector<bool> forced;  // kept whatever their mass
  double floor = 0;          // noise floor; 0: none to draw
  double threshold = 0;      // alpha x floor
};

// One line per block, or per group of blocks when there are more than max_lines: first block, bar
// of the largest mass in the group on a log scale, that mass, and how much of the group is kept.
// The column of the threshold is drawn in every line.
std::string draw_masses(const MassChart& chart, int64_t max_lines = 64);

// The mask in half-blocks: a character is two rows of one column, U+2580 upper, U+2584 lower,
// U+2588 both, space neither. Up to max_columns key blocks each block is one half character;
// beyond, a half character stands for a square of blocks and is set if any of them is kept.
struct MaskDrawing {
  int64_t blocks_per_mark = 1;
  std::vector<std::string> lines;
};
MaskDrawing draw_mask(const reference::BlockSet& blocks, int64_t max_columns = 96);

}  // namespace crisp::cli
