// The segments of a tile meet, learn which of their channels do not fit, and wait for each other.
// PARARNN_CLUSTER (0 or 1) says whether they are the blocks of a cluster.
#pragma once
#include "linear.h"

namespace pararnn {

// Some channels of a tile: bit `lane` of word c stands for the lane's channel c.
struct Channels {
  unsigned lanes_of[per_lane];

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

}  // namespace pararnn

#if PARARNN_CLUSTER
#include "meeting_cluster.h"
#else
#include "meeting_grid.h"
#endif
