#include "core/parallel.h"

#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <thread>

namespace crisp {

int resolve_num_threads(int num_threads) {
  if (num_threads > 0) return num_threads;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

void run_workers(int num_workers, void (*body)(int worker, void* user), void* user) {
  if (num_workers <= 0) return;
  if (num_workers == 1) return body(0, user);
  // An arena of its own: the caller's TBB settings neither leak in nor are changed. Isolation by
  // simple_partitioner keeps one index per task, so that no worker runs two bodies nested.
  // No more threads than the machine has for this process: TBB would say so on stderr and ignore
  // the rest. The bodies that are left run on the same threads, one after the other.
  tbb::task_arena arena(std::min(num_workers, tbb::info::default_concurrency()));
  arena.execute([&] {
    tbb::parallel_for(
        0, num_workers, [&](int worker) { body(worker, user); }, tbb::simple_partitioner());
  });
}

}  // namespace crisp
