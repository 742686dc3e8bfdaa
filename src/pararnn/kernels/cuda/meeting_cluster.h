// How the segments of a tile meet where they are the blocks of one cluster: in each other's shared
// memory. The hardware runs a cluster's blocks together, so nothing else has to be resident.
#pragma once
#include "posts.h"

namespace pararnn {

constexpr int most_segments = 16;

// Counts bytes that other blocks send, one batch after the other.
struct Mailbox {
  Barrier barrier;

  // Waits for the `bytes` of batch `number`, all lanes together.
  PARARNN_FUNCTION void await(int number, int bytes) {
    if (lane() == 0) expect_bytes(barrier, bytes);
    while (!has_arrived(barrier, number)) {}
    __syncwarp();
  }
};

PARARNN_FUNCTION unsigned bits_of(unsigned x) { return x; }
PARARNN_FUNCTION unsigned bits_of(float x) { return __float_as_uint(x); }
PARARNN_FUNCTION unsigned long long bits_of(double x) {
  return (unsigned long long)__double_as_longlong(x);
}

// Sends a value to the same place in another block, whose mailbox it counts in.
template <class T>
PARARNN_FUNCTION void send(const T* place, T value, const Mailbox& mailbox, int block) {
  send_bits(in_block(place, block), bits_of(value), in_block(&mailbox.barrier, block));
}

struct Desk {  // of one block
  Mailbox ends_box, votes_box, distances_box;
  real ends[end_numbers][lanes];       // of the segment before
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
      open_barrier(desk.ends_box.barrier);
      open_barrier(desk.votes_box.barrier);
      open_barrier(desk.distances_box.barrier);
      show_barriers();
    }
    __syncwarp();
    arrive_in_cluster();
  }

  // The end of the segment before, as a sweep of this round has found it; nothing for the first one.
  PARARNN_FUNCTION void exchange(int round, const real (&end)[end_numbers],
                                 real (&before)[1][end_numbers]) {
    if (round == 0) wait_for_cluster();  // all desks are open
#pragma unroll
    for (int i = 0; i < end_numbers; ++i)
      if (own + 1 < segments) send(&desk.ends[i][lane()], end[i], desk.ends_box, own + 1);
    if (own == 0) return;
    desk.ends_box.await(round, sizeof desk.ends);
#pragma unroll
    for (int i = 0; i < end_numbers; ++i) before[0][i] = desk.ends[i][lane()];
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
    arrive_in_cluster();
    wait_for_cluster();
  }

  // The largest of all segments' distances.
  PARARNN_FUNCTION real most(int round, real far) {
    const unsigned bits = __float_as_uint((float)far);  // in the order of the numbers, from 0 on
    const unsigned all = tell(desk.distances, desk.distances_box, round, bits);
    return (real)__uint_as_float(__reduce_max_sync(~0u, all));
  }
};

}  // namespace pararnn
