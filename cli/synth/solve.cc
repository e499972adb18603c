#include "synth/solve.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "synth/numeric.h"

namespace crisp::synth {
namespace {

constexpr double kTolerance = 0.02, kRelativeTolerance = 0.25;  // what is accepted
constexpr double kGoal = 0.01;                                  // relative; where rounds stop
constexpr int kCoarseRounds = 40, kFineRounds = 8;
constexpr int64_t kCoarseStride = 8;  // queries of the coarse rounds
constexpr double kMaxAmplitude = 80;  // nats

bool is_position(const Component& component) {
  return component.kind == ComponentKind::kSlash || component.kind == ComponentKind::kLocal;
}

// First guess: with the rest at its mean, m keys of one amplitude hold p when
// amplitude = log(p / p_background) + log(Z_background / m).
double first_amplitude(const Component& component, double background, double sigma) {
  double keys = static_cast<double>(component.width);
  if (component.kind == ComponentKind::kCluster) keys *= kBlock;
  if (is_position(component)) keys = 5;  // about the width of the kernel's peak
  return log_double(component.target / background) +
         log_double(static_cast<double>(component.measured.end) / keys) + sigma * sigma / 2;
}

double odds(double mass) {
  const double inside = std::clamp(mass, 1e-12, 1 - 1e-12);
  return inside / (1 - inside);
}

// The largest relative miss.
double worst_miss(const HeadTruth& head, const std::vector<size_t>& active, const Masses& masses) {
  double worst = 0;
  for (size_t c : active) {
    const double target = head.components[c].target;
    worst = std::max(worst, std::abs(masses.components[c] - target) / target);
  }
  return worst;
}

// One step towards the targets. For components of the last queries the ratio to the background is
// what an amplitude sets: with S either 0 or 1 one step is exact. Early components move alone.
void step(HeadTruth& head, const std::vector<size_t>& active, const Masses& masses,
          bool last_block) {
  const double background =
      last_block ? log_double(head.background_target / std::max(masses.background, 1e-9)) : 0;
  for (size_t c : active) {
    Component& component = head.components[c];
    const double measured = std::max(masses.components[c], 1e-12);
    const double change = last_block
                              ? log_double(component.target / measured) - background
                              : log_double(odds(component.target)) - log_double(odds(measured));
    const double damped = is_position(component) ? 0.8 * change : change;
    component.amplitude += std::clamp(damped, -4.0, 4.0);
    // A negative kernel would push its own band away instead of leaving it alone.
    component.amplitude = std::clamp(component.amplitude,
                                     is_position(component) ? 0.0 : -kMaxAmplitude, kMaxAmplitude);
  }
}

void refuse_if_missed(const HeadTruth& head, int64_t index, const std::vector<size_t>& active,
                      const Masses& masses) {
  for (size_t c : active) {
    const Component& component = head.components[c];
    const double miss = std::abs(masses.components[c] - component.target);
    if (miss <= kTolerance && miss <= kRelativeTolerance * component.target) continue;
    std::ostringstream message;
    message << "head " << index << " (" << head.kind << "): " << name(component.kind);
    if (component.kind == ComponentKind::kNeedle || component.kind == ComponentKind::kSlash)
      message << " at " << component.position;
    message
        << " holds " << masses.components[c] << " of the attention, " << component.target
        << " was asked for and cannot be reached with these components, num_tokens and head_dim";
    throw Error(message.str());
  }
}

// Amplitudes of the active components, and what they gave.
struct Trial {
  std::vector<double> amplitudes;
  Masses masses;
  double miss = 0;
};

// Up to `rounds` + 1 measurements with a step between each; the best of them. Rounding of 16-bit
// queries can make the last ones swing around the target.
Trial best_trial(Plan& plan, int64_t index, const Positions& queries,
                 const std::vector<size_t>& active, bool last_block, int rounds, const void* k,
                 DType dtype) {
  HeadTruth& head = plan.heads[static_cast<size_t>(index)].truth;
  Trial best;
  for (int round = 0;; ++round) {
    Trial trial;
    trial.masses = measure_masses(plan, index, queries, k, dtype);
    trial.miss = worst_miss(head, active, trial.masses);
    for (size_t c : active) trial.amplitudes.push_back(head.components[c].amplitude);
    const Masses masses = trial.masses;
    if (round == 0 || trial.miss < best.miss) best = std::move(trial);
    if (best.miss < kGoal || round == rounds) break;
    step(head, active, masses, last_block);
  }
  for (size_t i = 0; i < active.size(); ++i)
    head.components[active[i]].amplitude = best.amplitudes[i];
  return best;
}

// Components measured over the same queries, solved together: on some of the queries first.
void solve_rows(Plan& plan, int64_t index, const RowRange& measured,
                const std::vector<size_t>& active, const void* k, DType dtype) {
  HeadTruth& head = plan.heads[static_cast<size_t>(index)].truth;
  const bool last_block = measured.end == plan.spec.num_tokens;
  const int64_t count = measured.end - measured.begin;
  const Positions all{measured.begin, count, 1};
  const Positions some{measured.begin + std::min(kCoarseStride / 2, count - 1),
                       std::max<int64_t>(count / kCoarseStride, 1), kCoarseStride};
  if (!active.empty()) best_trial(plan, index, some, active, last_block, kCoarseRounds, k, dtype);
  const Trial found = best_trial(plan, index, all, active, last_block, kFineRounds, k, dtype);
  refuse_if_missed(head, index, active, found.masses);
  for (size_t c : active) head.components[c].realised = found.masses.components[c];
  if (last_block) head.background_realised = found.masses.background;
}

}  // namespace

void solve_amplitudes(Plan& plan, int64_t index, const void* k, DType dtype) {
  HeadTruth& head = plan.heads[static_cast<size_t>(index)].truth;
  const int64_t num_tokens = plan.spec.num_tokens;
  std::vector<size_t> last, early;
  for (size_t c = 0; c < head.components.size(); ++c) {
    Component& component = head.components[c];
    component.amplitude = first_amplitude(component, head.background_target, head.sigma);
    (component.measured.end == num_tokens ? last : early).push_back(c);
  }
  solve_rows(plan, index, {std::max<int64_t>(num_tokens - kBlock, 0), num_tokens}, last, k, dtype);
  while (!early.empty()) {
    const RowRange measured = head.components[early.front()].measured;
    const auto same = std::stable_partition(early.begin(), early.end(), [&](size_t c) {
      const RowRange& other = head.components[c].measured;
      return other.begin != measured.begin || other.end != measured.end;
    });
    solve_rows(plan, index, measured, {same, early.end()}, k, dtype);
    early.erase(same, early.end());
  }
}

}  // namespace crisp::synth
