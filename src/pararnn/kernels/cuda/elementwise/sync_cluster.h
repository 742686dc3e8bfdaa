// Synchronisation of a tile's segments as the blocks of one cluster, in each other's shared memory. The
// hardware runs a cluster's blocks together, so nothing else must be resident.
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

// Sends a value to the same address in another block, whose barrier counts it.
template <class T>
PARARNN_FUNCTION void send(const T* slot, T value, const Barrier& barrier, int block) {
  send_bits(in_block(slot, block), bits_of(value), in_block(&barrier, block));
}

struct Inbox {  // of one block, in its shared memory
  Barrier ends_sent, votes_sent, distances_sent;
  real ends[numbers_in<End>][lanes];   // of the segment before
  unsigned votes[most_segments];       // by segment: 1 if it does not fit
  unsigned distances[most_segments];   // by segment: bits of its start's distance
};

struct SegmentSync {
  static constexpr int bytes = sizeof(Inbox);

  Inbox& inbox;
  const int segments, own;

  PARARNN_FUNCTION SegmentSync(const Counters&, char* memory, int, int segments, int own)
      : inbox(*reinterpret_cast<Inbox*>(memory)), segments(segments), own(own) {
    if (lane() == 0) {
      open_barrier(inbox.ends_sent, 1);
      open_barrier(inbox.votes_sent, 1);
      open_barrier(inbox.distances_sent, 1);
      show_barriers();
    }
    __syncwarp();
    arrive_in_cluster();
  }

  // Exchanges ends: `previous` becomes the end of the segment before, as of this round's sweep. No-op for the
  // first segment.
  PARARNN_FUNCTION void exchange(int round, const End& end, End& previous) {
    if (round == 0) wait_for_cluster();  // all barriers are open
    each<numbers_in<End>>([&](int i) {
      if (own + 1 < segments)
        send(&inbox.ends[i][lane()], numbers_of(end)[i], inbox.ends_sent, own + 1);
    });
    if (own == 0) return;
    wait_for_bytes(inbox.ends_sent, round, sizeof inbox.ends);
    each<numbers_in<End>>([&](int i) { numbers_of(previous)[i] = inbox.ends[i][lane()]; });
  }

  // Sends every segment a number from every other; each lane returns one of them. No slot is overwritten
  // before it was read: its reader has sent since.
  PARARNN_FUNCTION unsigned all_gather(unsigned (&numbers)[most_segments], Barrier& sent, int round,
                                       unsigned number) {
    if (lane() < segments) send(&numbers[own], number, sent, lane());
    wait_for_bytes(sent, round, segments * (int)sizeof(unsigned));
    return lane() < segments ? numbers[lane()] : 0;
  }

  // Returns true if any segment does not fit.
  PARARNN_FUNCTION bool any_unfit(int round, bool fits) {
    return __any_sync(~0u, all_gather(inbox.votes, inbox.votes_sent, round, !fits) != 0);
  }

  // Makes global writes of all segments visible to all.
  PARARNN_FUNCTION void memory_barrier() {
    arrive_in_cluster();
    wait_for_cluster();
  }

  // Returns the largest of all segments' distances.
  PARARNN_FUNCTION real furthest(int round, real far) {
    const unsigned bits = __float_as_uint((float)far);  // ordered as the numbers, from 0 on
    const unsigned lane_bits = all_gather(inbox.distances, inbox.distances_sent, round, bits);
    return (real)__uint_as_float(__reduce_max_sync(~0u, lane_bits));
  }
};

}  // namespace pararnn
