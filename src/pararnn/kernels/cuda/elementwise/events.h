// Events of sequences, step by step.
#pragma once
#include "tile.h"

namespace pararnn {

// Begins and ends of sequences, resets and padding, as bits of 32 steps: step j is bit j % 32. A lane loads
// one step's flags, 32 steps ahead.
struct Events {
  const Inputs& in;
  int64 row;
  int order;  // of processing: 1 if step j is l = j, otherwise -1
  unsigned begins, ends, resets, pads;
  int next_seq, next_before, next_after;
  bool next_reset;

  PARARNN_FUNCTION Events(const Inputs& in, const Tile& tile, int order, int begin)
      : in(in), row(tile.row), order(order) {
    look_ahead(begin - begin % lanes);
  }
  // Call before the stage that begins at step j of a run from `begin` on.
  PARARNN_FUNCTION void at_stage(int j, int begin) {
    if (j % lanes == 0 || j == begin) refresh(j - j % lanes);
  }
  PARARNN_FUNCTION int64 position(int64 l) const {
    return row * in.length + (reverse ? in.length - 1 - l : l);
  }
  PARARNN_FUNCTION int number(int64 l) const {  // of the sequence of step l
    if (l < 0 || l >= in.length) return -2;
    return in.seq != nullptr ? in.seq[position(l)] : (int)row;
  }
  PARARNN_FUNCTION int64 number_of(int j) const {
    return number(order > 0 ? j : in.length - 1 - j);
  }
  PARARNN_FUNCTION void look_ahead(int first) {
    const int64 j = first + lane(), l = order > 0 ? j : in.length - 1 - j;
    next_seq = number(l);
    next_before = number(l - 1);
    next_after = number(l + 1);
    next_reset = in.reset != nullptr && j < in.length && in.reset[position(l)];
  }
  PARARNN_FUNCTION void refresh(int j) {
    begins = __ballot_sync(~0u, next_seq != next_before);
    ends = __ballot_sync(~0u, next_seq != next_after);
    resets = __ballot_sync(~0u, next_reset);
    pads = __ballot_sync(~0u, next_seq < 0);
    look_ahead(j + lanes);
  }
  PARARNN_FUNCTION bool any(int j) const {
    return (begins | ends | resets | pads) >> (j % lanes) & 1;
  }
  PARARNN_FUNCTION bool begin(int j) const { return begins >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool end(int j) const { return ends >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool reset(int j) const { return resets >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool pad(int j) const { return pads >> (j % lanes) & 1; }
};

}  // namespace pararnn
