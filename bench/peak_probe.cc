#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "peak_probe.cc"
#include "hwy/foreach_target.h"
// Highway wants its own include first.
#include <chrono>
#include <thread>
#include <vector>

#include "hwy/highway.h"
#include "peak_probe.h"

HWY_BEFORE_NAMESPACE();
namespace crisp::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Enough independent chains to hide the latency of two units; returns the FLOP done. The sum is
// handed out so that the work cannot be dropped.
double ProbeOnce(float* sum) {
  constexpr int kChains = 12;
  constexpr int64_t kSteps = 4'000'000;
  const hn::ScalableTag<float> f;
  hn::Vec<decltype(f)> chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = hn::Set(f, static_cast<float>(c));
  const auto factor = hn::Set(f, 0.999999f), addend = hn::Set(f, 1e-6f);
  for (int64_t step = 0; step < kSteps; ++step) {
    HWY_UNROLL(16)
    for (int c = 0; c < kChains; ++c) chains[c] = hn::MulAdd(chains[c], factor, addend);
  }
  for (int c = 0; c < kChains; ++c) *sum += hn::GetLane(chains[c]);
  return 2.0 * kChains * static_cast<double>(kSteps) * static_cast<double>(hn::Lanes(f));
}

}  // namespace HWY_NAMESPACE
}  // namespace crisp::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace crisp::bench {

HWY_EXPORT(ProbeOnce);

double peak_gflops(int num_threads) {
  using Clock = std::chrono::steady_clock;
  std::vector<float> sums(static_cast<size_t>(num_threads));
  std::vector<double> flop(static_cast<size_t>(num_threads));
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (size_t t = 0; t < flop.size(); ++t) {
    threads.emplace_back([&, t] { flop[t] = HWY_DYNAMIC_DISPATCH(ProbeOnce)(&sums[t]); });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  double total = 0;
  for (const double done : flop) total += done;
  return total / seconds * 1e-9;
}

}  // namespace crisp::bench
#endif  // HWY_ONCE
