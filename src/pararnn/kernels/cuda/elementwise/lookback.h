// A decoupled look-back over the segments of a tile: the effect of all segments before this one on the shifts
// of their starts.
//
// Each segment publishes its aggregate, its own map. Segments form groups of about the square root of their
// number; the last one of a group publishes the group's aggregate. So each segment reads those before it in
// its group and the groups before that, and all compute their prefix at the same time.
#pragma once
#include "flagged.h"

namespace pararnn {

// Maps of a run of segments, one for each of the lane's channels.
struct Aggregate {
  Affine maps[per_lane];

  PARARNN_FUNCTION void begin() {
    each<per_lane>([&](int c) { maps[c].begin(); });
  }
  PARARNN_FUNCTION void append(const Aggregate& next) {
    each<per_lane>([&](int c) { maps[c] = next.maps[c].compose(maps[c]); });
  }
};

// Result over all segments before: the shift of the last one's end, and the largest states.
struct Prefix {
  State shift[per_lane];
  States size;

  PARARNN_FUNCTION void append(const Aggregate& next) {
    each<per_lane>([&](int c) {
      const Affine& own = next.maps[c];
      shift[c] = own(shift[c]);
      State size_so_far = own.size;
      pass_on_sizes(own.a, size.column(c), size_so_far);
      size.set_column(c, size_so_far);
    });
  }
};

// Aggregates to wait for together: as many as fit in registers (measured).
constexpr int window = numbers_in<Aggregate> * words_a_number <= 6         ? 8
                       : numbers_in<Aggregate> <= (backward ? 12 : 16) ? 2
                                                                       : 1;

// Appends `count` aggregates to x, in order.
template <class T>
PARARNN_FUNCTION void look_back(const Word* source, int64 stride, int count, unsigned flag, T& x) {
  for (int first = 0; first < count; first += window) {
    Aggregate aggregates[window];
    wait_for(source + first * stride, stride, count - first, flag, aggregates);
    each<window>([&](int k) {
      if (first + k < count) x.append(aggregates[k]);
    });
  }
}

}  // namespace pararnn
