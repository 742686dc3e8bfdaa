// Some channels of a tile, and their states.
#pragma once
#include "linear.h"

namespace pararnn {

// Bit `lane` of word c stands for the lane's channel c.
struct Channels {
  unsigned lanes_of[per_lane];

  PARARNN_FUNCTION bool has(int c) const { return (lanes_of[c] >> lane() & 1) != 0; }
  PARARNN_FUNCTION bool any() const {
    unsigned all = 0;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) all |= lanes_of[c];
    return all != 0;
  }
  PARARNN_FUNCTION int count() const {
    int sum = 0;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) sum += __popc(lanes_of[c]);
    return sum;
  }
  // The k-th of them, as its place in the tile.
  PARARNN_FUNCTION int nth(int k) const {
    int place = 0;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      unsigned word = lanes_of[c];
      const int own = __popc(word);
      if (k >= 0 && k < own) {
        for (int skipped = 0; skipped < k; ++skipped) word &= word - 1;
        place = (__ffs(word) - 1) * per_lane + c;
      }
      k -= own;
    }
    return place;
  }
};

// The states of one channel of the tile, by its place.
PARARNN_FUNCTION void of_channel(const real (&x)[num_states][per_lane], int place,
                                 real (&state)[num_states]) {
#pragma unroll
  for (int n = 0; n < num_states; ++n)
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      const real own = __shfl_sync(~0u, x[n][c], place / per_lane);
      if (c == place % per_lane) state[n] = own;
    }
}

}  // namespace pararnn
