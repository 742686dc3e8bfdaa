// A decoupled look-back over the segments of a tile: what all segments before this one make of the shifts of their
// starts.
//
// Each segment publishes its aggregate, the map of its own. Segments form groups of about the square root of
// them all; the last one of a group publishes the group's aggregate. So each looks back at the segments of its group
// and at the groups before that, and all find their prefix at the same time.
#pragma once
#include "flagged.h"

namespace pararnn {

// What a run of segments makes of a shift of its start, by the lane's channels.
struct Aggregate {
  Affine of[per_lane];

  PARARNN_FUNCTION void begin() {
    each<per_lane>([&](int c) { of[c].begin(); });
  }
  PARARNN_FUNCTION void append(const Aggregate& next) {
    each<per_lane>([&](int c) { of[c] = next.of[c].after(of[c]); });
  }
};

// What the segments before have come to: the shift of the last one's end, and the largest states.
struct Prefix {
  State shift[per_lane];
  States size;

  PARARNN_FUNCTION void append(const Aggregate& next) {
    each<per_lane>([&](int c) {
      const Affine& own = next.of[c];
      shift[c] = own(shift[c]);
      State after = own.size;
      pass_on_sizes(own.a, size.column(c), after);
      size.set_column(c, after);
    });
  }
};

// Aggregates that are waited for together, as many as registers hold (measured).
constexpr int window = numbers_in<Aggregate> * words_a_number <= 6         ? 8
                       : numbers_in<Aggregate> <= (backward ? 12 : 16) ? 2
                                                                       : 1;

// Appends `count` aggregates to x, in their order.
template <class T>
PARARNN_FUNCTION void look_back(const Word* from, int64 stride, int count, unsigned flag, T& x) {
  for (int first = 0; first < count; first += window) {
    Aggregate found[window];
    wait_for(from + first * stride, stride, count - first, flag, found);
    each<window>([&](int k) {
      if (first + k < count) x.append(found[k]);
    });
  }
}

}  // namespace pararnn
