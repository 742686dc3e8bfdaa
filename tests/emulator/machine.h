// Replaces kernels/cuda/machine.h and NVRTC's builtins on a CPU. Copies into rings arrive as late as allowed.
#pragma once
#include <cmath>

#include "fibers.h"

#define PARARNN_FUNCTION inline
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;

inline float __uint_as_float(unsigned x) { return emulator::read<float>(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long x) { return emulator::read<double>((uint64_t)x); }
inline double __hiloint2double(int high, int low) {
  return emulator::read<double>((uint64_t)(unsigned)high << 32 | (unsigned)low);
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }

template <class T> T __ldcg(const T* source) { return *source; }
template <class T> void __stcg(T* target, T value) { *target = value; }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { emulator::poll(); }

template <class T> T atomicMax(T* address, T value) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {}
  return old;
}
template <class T> T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline void __syncthreads() { emulator::meet(emulator::all_meet, 0, (int)emulator::block->fibers.size()); }
inline void __syncwarp() { emulator::show(0); }
inline int emulated_lane() { return emulator::block->current % emulator::warp; }

template <class T> T __shfl_sync(unsigned, T value, int source) {
  return emulator::read<T>(emulator::show(value)[source]);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int with) {
  return emulator::read<T>(emulator::show(value)[emulated_lane() ^ with]);
}
template <class T> T __shfl_up_sync(unsigned, T value, int by, int width) {
  const int own = emulated_lane(), source = own % width >= by ? own - by : own;
  return emulator::read<T>(emulator::show(value)[source]);
}
inline unsigned __ballot_sync(unsigned, bool own) {
  const uint64_t* all = emulator::show((int)own);
  unsigned bits = 0;
  for (int i = 0; i < emulator::warp; ++i) bits |= (unsigned)all[i] << i;
  return bits;
}
inline bool __all_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) == ~0u; }
inline bool __any_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned own) {
  const uint64_t* all = emulator::show(own);
  return (unsigned)*std::max_element(all, all + emulator::warp);
}

namespace pararnn {

// Flushes subnormal results to zero.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline float fast_exp2(float x) { return flushed(::exp2f(flushed(x))); }
inline float fast_log2(float x) { return flushed(::log2f(flushed(x))); }
inline float fast_reciprocal(float x) { return flushed(1.0f / flushed(x)); }
inline float fast_tanh(float x) { return ::tanhf(x); }
inline float least(float a, float b) { return a < b || std::isnan(a) ? a : b; }

inline unsigned short to_bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7fff;
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned to_bfloat16s(float first, float second) {
  return (unsigned)to_bfloat16(second) << 16 | to_bfloat16(first);
}
inline unsigned lesser_bfloat16s(unsigned a, unsigned b) {
  const auto lesser = [](unsigned x, unsigned y) {
    return std::fmin(__uint_as_float(x << 16), __uint_as_float(y << 16));
  };
  return to_bfloat16s(lesser(a & 0xffff, b & 0xffff), lesser(a >> 16, b >> 16));
}
inline float from_float16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                    : std::ldexp((float)fraction, -24);
  return bits >> 15 ? -size : size;
}
inline unsigned short to_float16(float x) {
  const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0.0f) return sign;
  int exponent;
  std::frexp(size, &exponent);  // size < 2^exponent
  const int unit = max(exponent - 11, -24);
  const int number = (int)std::nearbyint(std::ldexp(size, -unit));  // of units; a carry is correct
  return sign | (unsigned short)(((unit + 24) << 10) + number);
}

inline unsigned shared_address(const void* address) {
  return (unsigned)(static_cast<const char*>(address) - &emulator::anchor);
}

template <int bytes> inline void copy_async(unsigned target, const char* source) {
  const emulator::Copy copy{&emulator::anchor + (int)target, source, bytes};
  if (bytes >= 4) emulator::fiber().copies.back().push_back(copy);
  else std::memcpy(copy.target, copy.source, bytes);
}
inline void end_group_of_copies() { emulator::fiber().copies.emplace_back(); }
template <int count> inline void wait_for_copies() {
  auto& groups = emulator::fiber().copies;
  while ((int)groups.size() > count + 1) {
    for (const emulator::Copy& copy : groups.front()) std::memcpy(copy.target, copy.source, copy.bytes);
    groups.erase(groups.begin());
  }
}

using Word = unsigned long long;

inline void write_word(Word* target, Word word) { __atomic_store_n(target, word, __ATOMIC_RELAXED); }
inline Word read_word(const Word* source) {
  emulator::poll();
  return __atomic_load_n(source, __ATOMIC_RELAXED);
}

// Address in the cluster: the block's number in the upper bits, the distance from its anchor in the lower ones.
constexpr int distance_bits = 26, distance_bias = 1 << (distance_bits - 1);

inline unsigned in_block(const void* address, int block) {
  return (unsigned)block << distance_bits | (unsigned)((int)shared_address(address) + distance_bias);
}
// Returns null if the block has ended.
inline char* in_cluster(unsigned address) {
  char* anchor = emulator::block->gang.anchors[address >> distance_bits];
  const int distance = (int)(address & ((1u << distance_bits) - 1)) - distance_bias;
  return anchor == nullptr ? nullptr : anchor + distance;
}

// Threads that have arrived, bytes expected minus bytes received, and the batches so far.
struct Barrier {
  short threads, arrived;
  int bytes, batches;

  void update() {
    if (arrived != threads || bytes != 0) return;
    arrived = 0;
    ++batches;
  }
};

using Lock = std::lock_guard<std::mutex>;

inline void open_barrier(Barrier& barrier, int threads) { barrier = {(short)threads, 0, 0, 0}; }
inline void show_barriers() {}
inline void arrive(Barrier& barrier) {
  emulator::block->idle_polls = 0;
  Lock lock(emulator::block->gang.mailboxes);
  ++barrier.arrived;
  barrier.update();
}
inline void arrive_after_copies(Barrier& barrier) {
  emulator::Fiber& own = emulator::fiber();
  emulator::block->arrivals.push_back({&barrier, std::move(own.copies.back())});
  own.copies.back().clear();
}
inline void expect_bytes(Barrier& barrier, int bytes) {
  Lock lock(emulator::block->gang.mailboxes);
  barrier.bytes += bytes;
  ++barrier.arrived;
  barrier.update();
}
inline bool has_arrived(Barrier& barrier, int number) {
  emulator::poll();
  auto& arrivals = emulator::block->arrivals;
  for (size_t i = 0; i < arrivals.size();) {
    if (arrivals[i].barrier != &barrier) {
      ++i;
      continue;
    }
    for (const emulator::Copy& copy : arrivals[i].copies) std::memcpy(copy.target, copy.source, copy.bytes);
    arrivals.erase(arrivals.begin() + (long)i);
    arrive(barrier);
  }
  Lock lock(emulator::block->gang.mailboxes);
  return barrier.batches % 2 != number % 2;
}
inline void load_again() {}
inline void keep(int&) {}
template <int count> inline void meet_threads() { emulator::meet(emulator::some_meet, 0, count); }
template <class Bits> inline void send_bits(unsigned target, Bits bits, unsigned barrier) {
  bool sent;
  {
    Lock lock(emulator::block->gang.mailboxes);
    char *const slot = in_cluster(target), *const counts = in_cluster(barrier);
    sent = slot != nullptr;
    if (sent) {
      std::memcpy(slot, &bits, sizeof bits);
      reinterpret_cast<Barrier*>(counts)->bytes -= (int)sizeof bits;
      reinterpret_cast<Barrier*>(counts)->update();
    }
  }
  if (!sent) emulator::fail("a message to a block that has left");
}

inline void arrive_in_cluster() {
  ++emulator::fiber().cluster_arrivals;
  ++emulator::block->gang.cluster_arrivals;
}
inline void wait_for_cluster() {
  const auto& gang = emulator::block->gang;
  const uint64_t all = (uint64_t)gang.blocks * emulator::block->fibers.size();
  while (gang.cluster_arrivals < all * emulator::fiber().cluster_arrivals) emulator::poll();
}

}  // namespace pararnn
