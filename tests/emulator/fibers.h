// Blocks of CUDA threads on a CPU. A block's threads are fibers of one host thread; blocks that may wait for
// each other are concurrent host threads. What would hang or be undefined on a GPU is an error: lanes that do
// not meet, copies without a wait, messages to a block that has ended, no progress.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

struct Index { int x = 0, y = 0; };
static thread_local Index threadIdx, blockIdx, gridDim;

namespace emulator {

using Clock = std::chrono::steady_clock;
constexpr size_t stack_bytes = 256 * 1024;
constexpr int warp = 32;
constexpr auto patience = std::chrono::seconds(120);

// Origin of a block's shared memory, which has the same offsets in every block.
static thread_local char anchor;

// Blocks that run concurrently.
struct Gang {
  const int blocks;
  const Clock::time_point deadline = Clock::now() + patience;
  std::atomic<const char*> failure{nullptr};
  std::atomic<int> started{0}, finished{0};
  std::atomic<uint64_t> cluster_arrivals{0};
  std::mutex mailboxes;
  std::vector<char*> anchors;  // null: the block has ended

  explicit Gang(int blocks) : blocks(blocks), anchors(blocks) {}
};

struct Copy {
  char* target;
  const char* source;
  int bytes;
};

// An arrival at a barrier that waits for copies.
struct Arrival {
  void* barrier;
  std::vector<Copy> copies;
};

enum Meeting { all_meet, some_meet, warp_meet, kinds_of_meeting };

struct Fiber {
  ucontext_t context;  // entry
  jmp_buf resume_at;        // where to resume: needs no system call
  bool started = false;
  uint64_t meetings[kinds_of_meeting] = {}, cluster_arrivals = 0;
  bool returned = false;
  std::vector<std::vector<Copy>> copies{1};  // in flight, by group; the last one is open
};

struct Block {
  Gang& gang;
  const Index size;
  const int number;  // in the gang
  std::vector<Fiber> fibers;
  std::vector<uint64_t> slots[2];  // values that threads exchange, for two meetings
  std::vector<std::array<uint32_t, 6>> fragments[2];  // the same inside warps
  std::vector<Arrival> arrivals;
  ucontext_t home;
  int current = 0, polls = 0;
  int idle_polls = 0;  // since a thread of this block last met or told others

  Block(Gang& gang, Index size, int number)
      : gang(gang), size(size), number(number), fibers(size.x * size.y) {
    for (auto& each : slots) each.resize(fibers.size());
    for (auto& each : fragments) each.resize(fibers.size());
  }
};

static thread_local Block* block;

inline Fiber& fiber() { return block->fibers[block->current]; }

// Ends the block and the launch.
inline void fail(const char* why) {
  const char* none = nullptr;
  block->gang.failure.compare_exchange_strong(none, why);
  setcontext(&block->home);
}

inline void become(int thread) {
  block->current = thread;
  threadIdx = {thread % block->size.x, thread / block->size.x};
}

// Returns the next running thread before the current one among some that follow each other, which may be the current one; -1
// for none.
inline int next_thread(int first, int count) {
  for (int i = 1; i <= count; ++i) {
    const int next = first + (block->current - first + count - i) % count;
    if (!block->fibers[next].returned) return next;
  }
  return -1;
}
inline int next_thread() { return next_thread(0, (int)block->fibers.size()); }

// Continues with a thread, and suspends the current one.
inline void resume(int thread) {
  become(thread);
  Fiber& next = fiber();
  if (next.started) _longjmp(next.resume_at, 1);
  next.started = true;
  setcontext(&next.context);
}

// Lets other threads run. A warp runs as far as it can before others do: what these have not read yet it may overwrite.
inline void pause(int next = next_thread()) {
  if (block->gang.failure) fail("another block has failed");
  if (next != block->current && _setjmp(fiber().resume_at) == 0) resume(next);
}

// Call while waiting for other threads of the block, or for other blocks.
inline void poll() {
  if (block->gang.blocks == 1) {
    // Nobody outside can end the wait, and a thread that runs comes to its next poll or meeting at once.
    if (++block->idle_polls > 100 * (int)block->fibers.size())
      fail("no progress: the threads wait for each other");
    return pause();
  }
  if (++block->polls % 16 != 0) return;
  if (Clock::now() > block->gang.deadline) fail("no progress: the blocks wait for each other");
  pause();
  // After a while the core goes to other blocks and processes.
  if (block->polls % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  else std::this_thread::yield();
}

// Threads from `first` to `last` - 1 meet. `own`: number of their meeting.
inline void wait_for(Meeting kind, int first, int last, uint64_t own) {
  for (int i = first; i < last;) {
    const Fiber& other = block->fibers[i];
    if (other.meetings[kind] >= own) ++i;
    else if (other.returned) fail("a thread has returned that others wait for");
    else if (kind == warp_meet) pause(next_thread(first, last - first));
    else pause();
  }
}
// Counts the current thread's meeting of a kind, and returns its number.
inline uint64_t come_to(Meeting kind) {
  block->idle_polls = 0;
  return ++fiber().meetings[kind];
}
inline void meet(Meeting kind, int first, int last) { wait_for(kind, first, last, come_to(kind)); }

// The threads of a warp meet and exchange `own`. Returns the warp's.
template <class T> const T* exchange(std::vector<T> (&slots)[2], const T& own) {
  const uint64_t meeting = come_to(warp_meet);
  const int first = block->current / warp * warp;
  auto& all = slots[meeting % 2];
  all[block->current] = own;
  wait_for(warp_meet, first, first + warp, meeting);
  return all.data() + first;
}
template <class T> const uint64_t* show(T value) {
  uint64_t own = 0;
  std::memcpy(&own, &value, sizeof value);
  return exchange(block->slots, own);
}
inline const std::array<uint32_t, 6>* show_fragments(const std::array<uint32_t, 6>& own) {
  return exchange(block->fragments, own);
}

template <class T> T read(uint64_t slot) {
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

static thread_local void (*body)(const void*);
static thread_local const void* argument;

inline void run_fiber() {
  body(argument);
  for (const auto& group : fiber().copies)
    if (!group.empty()) fail("a thread has returned before its copies have arrived");
  fiber().returned = true;
  const int next = next_thread();
  if (next < 0) setcontext(&block->home);
  resume(next);
}

inline void wait_for_all(std::atomic<int>& count, int all) {
  for (++count; count < all;) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

inline void run_block(Gang& gang, Index grid, Index index, Index size, int number) {
  Block own(gang, size, number);
  block = &own;
  blockIdx = index;
  gridDim = grid;
  gang.anchors[number] = &anchor;
  wait_for_all(gang.started, gang.blocks);
  const size_t bytes = own.fibers.size() * stack_bytes;
  const int pages = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
  char* stacks = static_cast<char*>(mmap(nullptr, bytes, pages, kind, -1, 0));
  if (stacks == MAP_FAILED) {
    gang.failure = "no memory for the threads' stacks";
  } else {
    for (size_t i = 0; i < own.fibers.size(); ++i) {
      ucontext_t& context = own.fibers[i].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks + i * stack_bytes;
      context.uc_stack.ss_size = stack_bytes;
      makecontext(&context, run_fiber, 0);
    }
    volatile bool back = false;
    getcontext(&own.home);
    if (!back) {
      back = true;
      resume(0);
    }
    munmap(stacks, bytes);
  }
  {
    std::lock_guard<std::mutex> lock(gang.mailboxes);
    gang.anchors[number] = nullptr;
  }
  wait_for_all(gang.finished, gang.blocks);  // shared memory lives as long as its thread
}

// Launches a grid, `together` blocks at a time. Returns an error message, or null.
template <class Problem>
const char* launch(void (*kernel)(Problem), const void* problem, Index grid, Index size,
                   int together) {
  static thread_local void (*entry)(Problem);
  const int all = grid.x * grid.y;
  for (int first = 0; first < all; first += together) {
    Gang gang(std::min(together, all - first));
    std::vector<std::thread> threads;
    for (int i = 0; i < gang.blocks; ++i)
      threads.emplace_back([&, i] {
        entry = kernel;
        body = [](const void* p) { entry(*static_cast<const std::decay_t<Problem>*>(p)); };
        argument = problem;
        run_block(gang, grid, {(first + i) % grid.x, (first + i) / grid.x}, size, i);
      });
    for (auto& thread : threads) thread.join();
    if (gang.failure) return gang.failure;
  }
  return nullptr;
}

}  // namespace emulator
