// Instructions that CUDA C++ has no names for.
#pragma once

#define PARARNN_FUNCTION __device__ __forceinline__
// A function that is one instruction, by types and registers of its result and its argument.
#define PARARNN_INSTRUCTION(name, instruction, Result, result, Argument, argument) \
  PARARNN_FUNCTION Result name(Argument x) { \
    Result y; \
    asm(instruction " %0, %1;" : result(y) : argument(x)); \
    return y; \
  }

namespace pararnn {

// The special function unit's 2^x, log2(x), 1/x and tanh.
PARARNN_INSTRUCTION(fast_exp2, "ex2.approx.ftz.f32", float, "=f", float, "f")
PARARNN_INSTRUCTION(fast_log2, "lg2.approx.ftz.f32", float, "=f", float, "f")
PARARNN_INSTRUCTION(fast_reciprocal, "rcp.approx.ftz.f32", float, "=f", float, "f")
PARARNN_INSTRUCTION(fast_tanh, "tanh.approx.f32", float, "=f", float, "f")
// NaN stays NaN, unlike fminf.
PARARNN_FUNCTION float least(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

PARARNN_INSTRUCTION(from_float16, "cvt.f32.f16", float, "=f", unsigned short, "h")
PARARNN_INSTRUCTION(to_float16, "cvt.rn.f16.f32", unsigned short, "=h", float, "f")
PARARNN_INSTRUCTION(to_bfloat16, "cvt.rn.bf16.f32", unsigned short, "=h", float, "f")
// Two in a word, the second one in the upper half.
PARARNN_FUNCTION unsigned to_bfloat16s(float first, float second) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
// The lesser of each two; the other where one is NaN.
PARARNN_FUNCTION unsigned lesser_bfloat16s(unsigned a, unsigned b) {
  unsigned word;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

// Copies `bytes` to shared memory: asynchronously from 4 bytes on, otherwise at once.
template <int bytes> PARARNN_FUNCTION void copy_async(unsigned target, const char* source) {
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source));
  } else if constexpr (bytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(bytes));
  } else {
    const unsigned short value = *reinterpret_cast<const unsigned short*>(source);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(value));
  }
}
// Ends a group: the copies since the last call.
PARARNN_FUNCTION void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this lane's groups except the last `count`.
template <int count> PARARNN_FUNCTION void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}

// 64-bit words in global memory, written and read whole, unordered with other memory.
using Word = unsigned long long;

PARARNN_FUNCTION void write_word(Word* target, Word word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(word) : "memory");
}
PARARNN_FUNCTION Word read_word(const Word* source) {
  Word word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(source) : "memory");
  return word;
}

PARARNN_FUNCTION unsigned shared_address(const void* object) {
  return (unsigned)__cvta_generic_to_shared(object);
}

// Barriers in shared memory: a batch has arrived when a number of threads have, and the bytes that they expect.
using Barrier = unsigned long long;

PARARNN_FUNCTION void open_barrier(Barrier& barrier, int threads) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(threads) : "memory");
}
PARARNN_FUNCTION void arrive(Barrier& barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives when all asynchronous copies of this thread so far have.
PARARNN_FUNCTION void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Returns true if batch `number` has arrived. Only one may be in flight.
PARARNN_FUNCTION bool has_arrived(Barrier& barrier, int number) {
  unsigned done;
#if PARARNN_CLUSTER  // other blocks may have written what this makes visible
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
               "selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(number % 2) : "memory");
#elif __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(number % 2) : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(&barrier)), "r"(number % 2) : "memory");
#endif
  return done;
}
// Keeps a number in a register: it is not computed anew where it is used.
PARARNN_FUNCTION void keep(int& x) { asm volatile("" : "+r"(x)); }
// Loads after it are not those before it: what they load need not stay in registers.
PARARNN_FUNCTION void load_again() { asm volatile("" ::: "memory"); }
// The first `count` threads of a block meet.
template <int count> PARARNN_FUNCTION void meet_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(count) : "memory");
}

#if PARARNN_CLUSTER
// Address, in the cluster's shared memory, of the same object in another block.
PARARNN_FUNCTION unsigned in_block(const void* object, int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(object)), "r"(block));
  return address;
}

// Makes this lane's open barriers visible to the cluster.
PARARNN_FUNCTION void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
PARARNN_FUNCTION void expect_bytes(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(&barrier)), "r"(bytes) : "memory");
}
// Sends bits to an address and counts them in a barrier; both addresses are from in_block.
PARARNN_FUNCTION void send_bits(unsigned target, unsigned long long bits, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(target),
               "l"(bits), "r"(barrier) : "memory");
}
PARARNN_FUNCTION void send_bits(unsigned target, unsigned bits, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(target),
               "r"(bits), "r"(barrier) : "memory");
}

// Cluster barrier: writes before it are visible after it.
PARARNN_FUNCTION void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
PARARNN_FUNCTION void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

}  // namespace pararnn
