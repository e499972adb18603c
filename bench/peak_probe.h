// peak_probe.h - what the multiply-add units of this machine give, measured, not looked up.
#pragma once

namespace crisp::bench {

// GFLOP/s of independent float32 fused multiply-adds in registers, all threads together: one round
// of about 10 ms a thread. Take it before every timed run, so that both see the same machine.
double peak_gflops(int num_threads);

}  // namespace crisp::bench
