// How the segments of a tile meet, any number of them: in global memory. All blocks must be resident (a
// cooperative launch), as they wait for each other.
#pragma once
#include "posts.h"

namespace pararnn {

static_assert(ends_words == post_words<end_numbers>);

struct Meeting {
  static constexpr int bytes = 0;

  const Counters& counters;
  const int column, segments, own;
  unsigned arrivals = 0, unfit = 0;  // those of the meetings so far

  PARARNN_FUNCTION Meeting(const Counters& counters, char*, int column, int segments, int own)
      : counters(counters), column(column), segments(segments), own(own) {
    __threadfence();  // who sees this segment arrive sees its board cleared
  }

  // All segments arrive. Returns `arrived`, which may count some of the next meeting already.
  PARARNN_FUNCTION Word meet(bool fits) {
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
  PARARNN_FUNCTION void exchange(int round, const real (&end)[end_numbers],
                                 real (&before)[1][end_numbers]) const {
    Word* place = counters.ends + (int64)(column * segments + own) * ends_words;
    if (own + 1 < segments) post(place, end, round + 1);
    collect(place - ends_words, 0, own > 0, round + 1, before);
  }

  // Whether any segment does not fit. None counts as unfit at the meeting that follows this one. Does not
  // wait until what a sweep has stored is seen by others, which takes a us: they read posts only.
  PARARNN_FUNCTION bool any(int, bool fits) {
    const unsigned now = (unsigned)(meet(fits) >> 32);
    const bool some = now != unfit;
    unfit = now;
    if (some) __threadfence();
    return some;
  }

  // What all segments have written is seen by all.
  PARARNN_FUNCTION void publish() {
    __threadfence();
    meet(true);
    __threadfence();
  }

  // The largest of all segments' distances.
  PARARNN_FUNCTION real most(int round, real far) {
    unsigned* furthest = counters.furthest + column * 2;
    if (lane() == 0) {
      atomicMax(furthest + round % 2, __float_as_uint((float)far));
      if (own == 0) furthest[(round + 1) % 2] = 0;  // all are done with what the round before left
    }
    publish();
    return (real)__uint_as_float(__ldcg(furthest + round % 2));
  }
};

}  // namespace pararnn
