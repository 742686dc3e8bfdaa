// How the segments of a tile synchronise where they are the blocks of one cluster: in each other's shared
// memory. The hardware runs a cluster's blocks together, so nothing else has to be resident.
#pragma once
#include "flagged.h"

namespace pararnn {

constexpr int most_segments = 16;

// Waits for the `bytes` of batch `number`, all lanes together.
PARARNN_FUNCTION void wait_for_bytes(Barrier& barrier, int number, int bytes) {
  if (lane() == 0) expect_bytes(barrier, bytes);
  while (!has_arrived(barrier, number)) {}
  __syncwarp();
}

PARARNN_FUNCTION unsigned bits_of(unsigned x) { return x; }
PARARNN_FUNCTION unsigned bits_of(float x) { return __float_as_uint(x); }
PARARNN_FUNCTION unsigned long long bits_of(double x) {
  return (unsigned long long)__double_as_longlong(x);
}

// Sends a value to the same place in another block, whose barrier counts it.
template <class T>
PARARNN_FUNCTION void send(const T* place, T value, const Barrier& barrier, int block) {
  send_bits(in_block(place, block), bits_of(value), in_block(&barrier, block));
}

struct Inbox {  // of one block, in its shared memory
  Barrier ends_sent, votes_sent, distances_sent;
  real ends[numbers_in<End>][lanes];   // of the segment before
  unsigned votes[most_segments];       // by segment: whether it does not fit
  unsigned distances[most_segments];   // by segment: bits of how far its start is from where it belongs
};

struct SegmentSync {
  static constexpr int bytes = sizeof(Inbox);

  Inbox& inbox;
  const int segments, own;

  PARARNN_FUNCTION SegmentSync(const Counters&, char* memory, int, int segments, int own)
      : inbox(*reinterpret_cast<Inbox*>(memory)), segments(segments), own(own) {
    if (lane() == 0) {
      open_barrier(inbox.ends_sent);
      open_barrier(inbox.votes_sent);
      open_barrier(inbox.distances_sent);
      show_barriers();
    }
    __syncwarp();
    arrive_in_cluster();
  }

  // The end of the segment before, as a sweep of this round has found it; nothing for the first one.
  PARARNN_FUNCTION void exchange(int round, const End& end, End& before) {
    if (round == 0) wait_for_cluster();  // all barriers are open
    each<numbers_in<End>>([&](int i) {
      if (own + 1 < segments)
        send(&inbox.ends[i][lane()], numbers_of(end)[i], inbox.ends_sent, own + 1);
    });
    if (own == 0) return;
    wait_for_bytes(inbox.ends_sent, round, sizeof inbox.ends);
    each<numbers_in<End>>([&](int i) { numbers_of(before)[i] = inbox.ends[i][lane()]; });
  }

  // Every segment sends all of them a number; each lane returns that of one. What was sent before has
  // been read: who read it has sent since.
  PARARNN_FUNCTION unsigned all_gather(unsigned (&numbers)[most_segments], Barrier& sent, int round,
                                       unsigned number) {
    if (lane() < segments) send(&numbers[own], number, sent, lane());
    wait_for_bytes(sent, round, segments * (int)sizeof(unsigned));
    return lane() < segments ? numbers[lane()] : 0;
  }

  // Whether any segment does not fit.
  PARARNN_FUNCTION bool any_unfit(int round, bool fits) {
    return __any_sync(~0u, all_gather(inbox.votes, inbox.votes_sent, round, !fits) != 0);
  }

  // What segments have written to global memory is seen by all.
  PARARNN_FUNCTION void memory_barrier() {
    arrive_in_cluster();
    wait_for_cluster();
  }

  // The largest of all segments' distances.
  PARARNN_FUNCTION real furthest(int round, real far) {
    const unsigned bits = __float_as_uint((float)far);  // in the order of the numbers, from 0 on
    const unsigned lane_bits = all_gather(inbox.distances, inbox.distances_sent, round, bits);
    return (real)__uint_as_float(__reduce_max_sync(~0u, lane_bits));
  }
};

}  // namespace pararnn
