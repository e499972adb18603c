// parallel.h - the only door to threads. The count is a parameter, never global state.
#pragma once

#include <atomic>
#include <cstdint>

namespace crisp {

inline constexpr int kMaxThreads = 1024;

// 0 -> the machine's cores, else the number itself.
int resolve_num_threads(int num_threads);

// Runs body(worker) exactly once for every worker in [0, num_workers), on up to num_workers
// threads.
void run_workers(int num_workers, void (*body)(int worker, void* user), void* user);

// Calls body(worker, index) for every index in [0, count), ascending per worker, handed out one at
// a time. `worker` < num_threads names the scratch slot the call may use. Which worker gets an
// index varies from run to run, so results must not depend on it.
template <class Body>
void parallel_for(int num_threads, int64_t count, Body&& body) {
  struct Job {
    std::atomic<int64_t> next{0};
    int64_t count;
    Body* body;
  } job;
  job.count = count;
  job.body = &body;
  const int num_workers =
      static_cast<int>(count < num_threads ? (count > 0 ? count : 0) : num_threads);
  run_workers(
      num_workers,
      [](int worker, void* user) {
        Job& shared = *static_cast<Job*>(user);
        for (;;) {
          const int64_t index = shared.next.fetch_add(1, std::memory_order_relaxed);
          if (index >= shared.count) return;
          (*shared.body)(worker, index);
        }
      },
      &job);
}

}  // namespace crisp
