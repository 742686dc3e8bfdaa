// How the segments of a tile meet where they are the blocks of one cluster: in each other's shared
// memory. The hardware runs a cluster's blocks together, so nothing else has to be resident.
#pragma once
#include "posts.h"

namespace pararnn {

constexpr int boundary_numbers = num_states * per_lane;

struct Counters {};

constexpr int most_segments = 16;

PARARNN_FUNCTION unsigned shared_address(const void* place) {
  return (unsigned)__cvta_generic_to_shared(place);
}

// The address, in the shared memory of the cluster, of what a place of this block's is in another.
PARARNN_FUNCTION unsigned in_block(const void* place, int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(block));
  return address;
}

// Counts bytes that other blocks send, one batch after the other.
struct Mailbox {
  unsigned long long barrier;

  PARARNN_FUNCTION void open() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
  }
  // Waits for the `bytes` of batch `number`, all lanes together.
  PARARNN_FUNCTION void await(int number, int bytes) {
    if (lane() == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                       shared_address(&barrier)), "r"(bytes) : "memory");
    unsigned done = 0;
    while (!done)
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                   "selp.u32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(shared_address(&barrier)), "r"(number % 2) : "memory");
    __syncwarp();
  }
};

// Sends a value to the same place in another block, whose mailbox it counts in.
template <class T>
PARARNN_FUNCTION void send(const T* place, T value, const Mailbox& mailbox, int block) {
  const unsigned to = in_block(place, block), box = in_block(&mailbox.barrier, block);
  if constexpr (sizeof(T) == 8) {
    unsigned long long bits;
    if constexpr (same<T, double>::value) bits = (unsigned long long)__double_as_longlong(value);
    else bits = (unsigned long long)value;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(bits), "r"(box) : "memory");
  } else {
    unsigned bits;
    if constexpr (same<T, float>::value) bits = __float_as_uint(value);
    else bits = (unsigned)value;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(bits), "r"(box) : "memory");
  }
}

struct Desk {  // of one block
  Mailbox ends_box, votes_box, distances_box;
  real ends[boundary_numbers][lanes];  // of the segment before
  unsigned votes[most_segments];       // by segment: whether it does not fit
  unsigned distances[most_segments];   // by segment: bits of how far its start is from where it belongs
};

struct Meeting {
  static constexpr int bytes = sizeof(Desk);

  Desk& desk;
  const int segments, own;

  PARARNN_FUNCTION Meeting(const Counters&, char* memory, int, int segments, int own)
      : desk(*reinterpret_cast<Desk*>(memory)), segments(segments), own(own) {
    if (lane() == 0) {
      desk.ends_box.open();
      desk.votes_box.open();
      desk.distances_box.open();
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    arrive();
  }

  PARARNN_FUNCTION void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  PARARNN_FUNCTION void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  // The end of the segment before, as a sweep of this round has found it; 0 for the first one.
  PARARNN_FUNCTION void exchange(int round, const real (&end)[boundary_numbers],
                                 real (&before)[1][boundary_numbers]) {
    if (round == 0) wait();  // all desks are open
#pragma unroll
    for (int i = 0; i < boundary_numbers; ++i)
      if (own + 1 < segments) send(&desk.ends[i][lane()], end[i], desk.ends_box, own + 1);
    if (own == 0) return;
    desk.ends_box.await(round, sizeof desk.ends);
#pragma unroll
    for (int i = 0; i < boundary_numbers; ++i) before[0][i] = desk.ends[i][lane()];
  }

  // Every segment tells all of them a number; each lane returns that of one. What was told before has
  // been read: who told it has been told since.
  PARARNN_FUNCTION unsigned tell(unsigned (&told)[most_segments], Mailbox& box, int round,
                                 unsigned number) {
    if (lane() < segments) send(&told[own], number, box, lane());
    box.await(round, segments * (int)sizeof(unsigned));
    return lane() < segments ? told[lane()] : 0;
  }

  // Whether any segment does not fit.
  PARARNN_FUNCTION bool any(int round, bool fits) {
    return __any_sync(~0u, tell(desk.votes, desk.votes_box, round, !fits) != 0);
  }

  // What segments have written to global memory is seen by all.
  PARARNN_FUNCTION void publish() {
    arrive();
    wait();
  }

  // The largest of all segments' distances.
  PARARNN_FUNCTION real most(int round, real far) {
    const unsigned bits = __float_as_uint((float)far);  // in the order of the numbers, from 0 on
    const unsigned all = tell(desk.distances, desk.distances_box, round, bits);
    return (real)__uint_as_float(__reduce_max_sync(~0u, all));
  }
};

}  // namespace pararnn
