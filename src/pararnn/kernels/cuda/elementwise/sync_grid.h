// Synchronisation of any number of segments of a tile, in global memory. All blocks must be resident (a
// cooperative launch), as they wait for each other.
#pragma once
#include "flagged.h"

namespace pararnn {

static_assert(ends_words == words_of<End>);

struct SegmentSync {
  static constexpr int bytes = 0;

  const Counters& counters;
  const int column, segments, own;
  unsigned arrivals = 0, unfit = 0;  // totals of the barriers so far

  PARARNN_FUNCTION SegmentSync(const Counters& counters, char*, int column, int segments, int own)
      : counters(counters), column(column), segments(segments), own(own) {
    __threadfence();  // once this segment arrives, its flags are visibly cleared
  }

  // Barrier of all segments. Returns `arrived`, which may already count some of the next one.
  PARARNN_FUNCTION Word barrier(bool fits) {
    __syncwarp();
    arrivals += segments;
    Word word = 0;
    if (lane() == 0) {
      Word* address = counters.arrived + column;
      atomicAdd(address, fits ? 1ull : (1ull << 32) + 1);
      for (word = read_word(address); (unsigned)word < arrivals; word = read_word(address))
        __nanosleep(20);
    }
    return __shfl_sync(~0u, word, 0);
  }

  // Exchanges ends: `previous` becomes the end of the segment before, as of this round's sweep. No-op for the
  // first segment.
  PARARNN_FUNCTION void exchange(int round, const End& end, End& previous) const {
    Word* address = counters.ends + (int64)(column * segments + own) * ends_words;
    if (own + 1 < segments) publish(address, end, round + 1);
    wait_for(address - ends_words, own > 0, round + 1, previous);
  }

  // Returns true if any segment does not fit. The barrier that follows must count none as unfit. Does not
  // wait until a sweep's stores are visible, which takes a microsecond: others read flagged numbers only.
  PARARNN_FUNCTION bool any_unfit(int, bool fits) {
    const unsigned now = (unsigned)(barrier(fits) >> 32);
    const bool some = now != unfit;
    unfit = now;
    if (some) __threadfence();
    return some;
  }

  // Makes the writes of all segments visible to all.
  PARARNN_FUNCTION void memory_barrier() {
    __threadfence();
    barrier(true);
    __threadfence();
  }

  // Returns the largest of all segments' distances.
  PARARNN_FUNCTION real furthest(int round, real far) {
    unsigned* most = counters.furthest + column * 2;
    if (lane() == 0) {
      atomicMax(most + round % 2, __float_as_uint((float)far));
      if (own == 0) most[(round + 1) % 2] = 0;  // all have read the round before
    }
    memory_barrier();
    return (real)__uint_as_float(__ldcg(most + round % 2));
  }
};

}  // namespace pararnn
