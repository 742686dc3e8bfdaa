// Runs independent tasks on threads. A task's result must not depend on its thread.
#pragma once
#include <pthread.h>  // including <thread> takes a quarter of a small kernel's compilation

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace pararnn {

// GOMP_parallel of the OpenMP runtime that PyTorch has loaded, or null to start threads here. PyTorch's
// threads spin after a matrix product; threads started here would compete with them for cores.
typedef void (*openmp_parallel)(void (*)(void*), void*, unsigned, unsigned);

template <class Work> void call_work(void* work) { (*static_cast<Work*>(work))(); }

template <class Work> void* call_in_thread(void* work) {
  call_work<Work>(work);
  return nullptr;
}

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
  std::vector<pthread_t> others;
  others.reserve(threads - 1);
  for (pthread_t other; (int64_t)others.size() < threads - 1; others.push_back(other)) {
    // If the system refuses a thread, the existing ones run all tasks.
    if (pthread_create(&other, nullptr, call_in_thread<decltype(work)>, &work) != 0) break;
  }
  work();
  for (pthread_t other : others) pthread_join(other, nullptr);
}

}  // namespace pararnn
