// How the segments of a tile meet, any number of them: in global memory. All blocks must be resident (a
// cooperative launch), as they wait for each other.
#pragma once
#include "meeting.h"

namespace pararnn {

constexpr int post_words = wide ? 2 : 1;  // of a number that is posted

struct Counters {  // zero at first
  unsigned long long* arrived;  // (row, tile): arrivals, and above 2^32 those of segments that do not fit
  unsigned long long* posts;    // (row, tile, segment, state, channel of a lane, word, lane): ends
  unsigned* moved;              // (row, tile, segment, channel of a lane): lanes whose start has moved
  unsigned* far;                // (row, tile, round % 2, channel of a lane): lanes that do not fit
  unsigned* furthest;           // (row, tile, round % 2): bits of a distance
};

// Half a number and the round that it belongs to travel in one word: who waits for it needs no fence.
PARARNN_FUNCTION void post(unsigned long long* to, unsigned half, unsigned round) {
  const unsigned long long word = (unsigned long long)round << 32 | half;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
PARARNN_FUNCTION unsigned collect(const unsigned long long* from, unsigned round) {
  unsigned long long word;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  } while (word >> 32 != round);
  return (unsigned)word;
}

struct Meeting {
  static constexpr int bytes = 0;
  static constexpr bool in_global_memory = true;  // what segments find is written there at once

  const Counters& counters;
  const int column, segments, own;
  unsigned arrivals = 0, unfit = 0;  // those of the meetings so far

  PARARNN_FUNCTION Meeting(const Counters& counters, char*, int column, int segments, int own)
      : counters(counters), column(column), segments(segments), own(own) {}

  PARARNN_FUNCTION unsigned* moved(int w) const {
    return counters.moved + (column * segments + w) * per_lane;
  }

  // All segments arrive: what they have written is seen by all. Returns `arrived`, which may count some
  // of the next meeting already.
  PARARNN_FUNCTION unsigned long long sync(bool fits) {
    __threadfence();
    __syncwarp();
    arrivals += segments;
    unsigned long long word = 0;
    if (lane() == 0) {
      atomicAdd(counters.arrived + column, fits ? 1ull : (1ull << 32) + 1);
      const volatile unsigned long long* place = counters.arrived + column;
      for (word = *place; (unsigned)word < arrivals; word = *place) __nanosleep(20);
    }
    word = __shfl_sync(~0u, word, 0);
    __threadfence();
    return word;
  }

  // The end of the segment before, as a sweep of this round has found it; 0 for the first one.
  PARARNN_FUNCTION void exchange(int round, const real (&end)[num_states][per_lane],
                                 real (&before)[num_states][per_lane]) const {
    constexpr int size = num_states * per_lane * post_words * lanes;
    unsigned long long* to = counters.posts + (int64)(column * segments + own) * size + lane();
#pragma unroll
    for (int n = 0; n < num_states; ++n)
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        unsigned long long* place = to + (n * per_lane + c) * post_words * lanes;
        if constexpr (wide) {
          const unsigned long long bits = (unsigned long long)__double_as_longlong(end[n][c]);
          post(place, (unsigned)bits, round + 1);
          post(place + lanes, (unsigned)(bits >> 32), round + 1);
        } else {
          post(place, __float_as_uint((float)end[n][c]), round + 1);
        }
      }
    const unsigned long long* from = to - size;
#pragma unroll
    for (int n = 0; n < num_states; ++n)
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        before[n][c] = constant(0);
        if (own == 0) continue;
        const unsigned long long* place = from + (n * per_lane + c) * post_words * lanes;
        if constexpr (wide) {
          const unsigned low = collect(place, round + 1), high = collect(place + lanes, round + 1);
          before[n][c] = __hiloint2double((int)high, (int)low);
        } else {
          before[n][c] = __uint_as_float(collect(place, round + 1));
        }
      }
  }

  // The channels that do not fit at any segment.
  PARARNN_FUNCTION Channels anywhere(int round, const Channels& far) {
    unsigned* all = counters.far + (column * 2 + round % 2) * per_lane;
    const bool fits = !far.any();
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
      if (lane() == 0 && far.lanes_of[c] != 0) atomicOr(all + c, far.lanes_of[c]);
    // No segment counts as unfit at the meeting that follows this one.
    const unsigned now = (unsigned)(sync(fits) >> 32);
    Channels found;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) found.lanes_of[c] = now != unfit ? __ldcg(all + c) : 0;
    unfit = now;
    return found;
  }

  // What segments have written to global memory is seen by all: `anywhere` has seen to that.
  PARARNN_FUNCTION void publish() const {}

  // The largest of all segments' distances. All are done with what the round before has left.
  PARARNN_FUNCTION real most(int round, real far) {
    unsigned* furthest = counters.furthest + column * 2;
    if (lane() == 0) {
      atomicMax(furthest + round % 2, __float_as_uint((float)far));
      if (own == 0) {
        furthest[(round + 1) % 2] = 0;
#pragma unroll
        for (int c = 0; c < per_lane; ++c)
          counters.far[(column * 2 + (round + 1) % 2) * per_lane + c] = 0;
      }
    }
    sync(true);
    return (real)__uint_as_float(__ldcg(furthest + round % 2));
  }

  PARARNN_FUNCTION void leave() {}
};

}  // namespace pararnn
