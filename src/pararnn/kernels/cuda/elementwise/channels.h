// A set of channels of a tile.
#pragma once
#include "linear.h"

namespace pararnn {

// Bit `lane` of word c is the lane's channel c.
struct Channels {
  unsigned lanes_of[per_lane];

  PARARNN_FUNCTION bool has(int c) const { return (lanes_of[c] >> lane() & 1) != 0; }
  PARARNN_FUNCTION bool any() const {
    unsigned all = 0;
    each<per_lane>([&](int c) { all |= lanes_of[c]; });
    return all != 0;
  }
  PARARNN_FUNCTION int count() const {
    int sum = 0;
    each<per_lane>([&](int c) { sum += __popc(lanes_of[c]); });
    return sum;
  }
  // The k-th channel of the set, as its index in the tile.
  PARARNN_FUNCTION int nth(int k) const {
    int index = 0;
    each<per_lane>([&](int c) {
      unsigned word = lanes_of[c];
      const int own = __popc(word);
      if (k >= 0 && k < own) {
        for (int skipped = 0; skipped < k; ++skipped) word &= word - 1;
        index = (__ffs(word) - 1) * per_lane + c;
      }
      k -= own;
    });
    return index;
  }
};

// Returns the channels of all lanes for which own(c) holds.
template <class Own> PARARNN_FUNCTION Channels channels_where(const Own& own) {
  Channels some;
  each<per_lane>([&](int c) { some.lanes_of[c] = __ballot_sync(~0u, own(c)); });
  return some;
}

// Returns the states of one channel, by its index in the tile.
PARARNN_FUNCTION State channel_states(const States& x, int index) {
  State state;
  each<num_states>([&](int n) {
    each<per_lane>([&](int c) {
      const real own = __shfl_sync(~0u, x[n][c], index / per_lane);
      if (c == index % per_lane) state[n] = own;
    });
  });
  return state;
}

}  // namespace pararnn
