// Independent tasks over threads. Which thread runs a task must not matter to its result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace pararnn {

// GOMP_parallel of the OpenMP runtime that PyTorch has loaded. Its threads are awake after a matrix
// product, and threads of our own would compete with them for the cores. Null: use our own.
typedef void (*openmp_parallel)(void (*)(void*), void*, unsigned, unsigned);

template <class Work> void call_work(void* work) { (*static_cast<Work*>(work))(); }

template <class Task>
void run_tasks(int64_t tasks, int64_t threads, void* openmp, const Task& task) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  };
  threads = std::min(threads, tasks);
  if (threads <= 1) return work();
  if (openmp != nullptr)
    return ((openmp_parallel)openmp)(call_work<decltype(work)>, &work, (unsigned)threads, 0);
  std::vector<std::thread> others;
  others.reserve(threads - 1);
  try {
    while ((int64_t)others.size() < threads - 1) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those there are do all tasks.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace pararnn
