// peak_probe.h - what the multiply-add units of this machine give, measured, not looked up.
#pragma once

namespace crisp::bench {

// GFLOP/s of independent float32 fused multiply-adds in registers, all threads together.
double peak_gflops(int num_threads);

}  // namespace crisp::bench
