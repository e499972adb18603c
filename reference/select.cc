#include "reference/select.h"

#include <algorithm>

namespace crisp::reference {

std::vector<bool> forced_blocks(int64_t num_blocks, int64_t tokens) {
  std::vector<bool> forced(static_cast<size_t>(num_blocks), false);
  for (int64_t j = 0; j < num_blocks && j < ceil_div(tokens, kBlockSize); ++j) {
    forced[static_cast<size_t>(j)] = true;
  }
  return forced;
}

std::vector<bool> background_blocks(int64_t num_blocks, int64_t first_tokens, int64_t last_tokens) {
  std::vector<bool> background(static_cast<size_t>(num_blocks), false);
  const int64_t begin = ceil_div(first_tokens, kBlockSize);
  const int64_t end = num_blocks - ceil_div(last_tokens, kBlockSize);
  for (int64_t j = begin; j < end; ++j) background[static_cast<size_t>(j)] = true;
  return background;
}

double noise_floor(const std::vector<double>& mass, const std::vector<bool>& background,
                   NoiseFloor kind) {
  std::vector<double> masses;
  for (size_t j = 0; j < mass.size(); ++j) {
    if (background[j]) masses.push_back(mass[j]);
  }
  if (masses.empty()) return 0;
  if (kind == NoiseFloor::kMedian) {
    std::sort(masses.begin(), masses.end());
    const size_t middle = masses.size() / 2;
    return masses.size() % 2 == 1 ? masses[middle] : (masses[middle - 1] + masses[middle]) / 2;
  }
  double sum = 0;
  for (double m : masses) sum += m;
  return sum / static_cast<double>(masses.size());
}

std::vector<bool> select_above_noise_floor(const std::vector<double>& mass,
                                           const std::vector<bool>& background,
                                           const std::vector<bool>& forced, double alpha,
                                           NoiseFloor kind) {
  std::vector<bool> keep = forced;
  const double floor = noise_floor(mass, background, kind);
  if (floor == 0) return keep;
  for (size_t j = 0; j < mass.size(); ++j) {
    if (mass[j] > alpha * floor) keep[j] = true;
  }
  return keep;
}

std::vector<bool> top_up(const std::vector<double>& mass, std::vector<bool> keep, int64_t k_min) {
  int64_t num_kept = count(keep);
  for (int64_t j : descending(mass)) {
    if (num_kept >= k_min) break;
    if (keep[static_cast<size_t>(j)]) continue;
    keep[static_cast<size_t>(j)] = true;
    ++num_kept;
  }
  return keep;
}

std::vector<bool> select_coverage(const std::vector<double>& mass, const std::vector<bool>& forced,
                                  double gamma) {
  std::vector<bool> keep = forced;
  const std::vector<int64_t> order = descending(mass);
  double total = 0;
  for (int64_t j : order) total += mass[static_cast<size_t>(j)];
  double cumulative = 0;
  for (int64_t j : order) {
    keep[static_cast<size_t>(j)] = true;
    cumulative += mass[static_cast<size_t>(j)];
    if (cumulative >= gamma * total) break;
  }
  return keep;
}

int64_t token_count_budget(const std::vector<double>& token_mass, double gamma,
                           int64_t min_blocks) {
  const int64_t num_blocks = ceil_div(static_cast<int64_t>(token_mass.size()), kBlockSize);
  int64_t num_tokens = 1;
  double cumulative = 0;
  for (int64_t t : descending(token_mass)) {
    cumulative += token_mass[static_cast<size_t>(t)];
    if (cumulative > gamma) break;
    ++num_tokens;
  }
  return std::min(std::max(num_tokens / kBlockSize + 1, min_blocks), num_blocks);
}

}  // namespace crisp::reference
