// How the segments of a tile synchronise, any number of them: in global memory. All blocks must be resident (a
// cooperative launch), as they wait for each other.
#pragma once
#include "flagged.h"

namespace pararnn {

static_assert(ends_words == words_of<End>);

struct SegmentSync {
  static constexpr int bytes = 0;

  const Counters& counters;
  const int column, segments, own;
  unsigned arrivals = 0, unfit = 0;  // those of the barriers so far

  PARARNN_FUNCTION SegmentSync(const Counters& counters, char*, int column, int segments, int own)
      : counters(counters), column(column), segments(segments), own(own) {
    __threadfence();  // who sees this segment arrive sees its flags cleared
  }

  // A barrier of all segments. Returns `arrived`, which may count some of the next one already.
  PARARNN_FUNCTION Word barrier(bool fits) {
    __syncwarp();
    arrivals += segments;
    Word word = 0;
    if (lane() == 0) {
      Word* place = counters.arrived + column;
      atomicAdd(place, fits ? 1ull : (1ull << 32) + 1);
      for (word = read_word(place); (unsigned)word < arrivals; word = read_word(place))
        __nanosleep(20);
    }
    return __shfl_sync(~0u, word, 0);
  }

  // The end of the segment before, as a sweep of this round has found it; nothing for the first one.
  PARARNN_FUNCTION void exchange(int round, const End& end, End& before) const {
    Word* place = counters.ends + (int64)(column * segments + own) * ends_words;
    if (own + 1 < segments) publish(place, end, round + 1);
    wait_for(place - ends_words, own > 0, round + 1, before);
  }

  // Whether any segment does not fit. None counts as unfit at the barrier that follows this one. Does not
  // wait until what a sweep has stored is seen by others, which takes a us: they read flagged numbers only.
  PARARNN_FUNCTION bool any_unfit(int, bool fits) {
    const unsigned now = (unsigned)(barrier(fits) >> 32);
    const bool some = now != unfit;
    unfit = now;
    if (some) __threadfence();
    return some;
  }

  // What all segments have written is seen by all.
  PARARNN_FUNCTION void memory_barrier() {
    __threadfence();
    barrier(true);
    __threadfence();
  }

  // The largest of all segments' distances.
  PARARNN_FUNCTION real furthest(int round, real far) {
    unsigned* most = counters.furthest + column * 2;
    if (lane() == 0) {
      atomicMax(most + round % 2, __float_as_uint((float)far));
      if (own == 0) most[(round + 1) % 2] = 0;  // all are done with what the round before left
    }
    memory_barrier();
    return (real)__uint_as_float(__ldcg(most + round % 2));
  }
};

}  // namespace pararnn
