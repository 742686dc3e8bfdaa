// Boundaries between the segments of a tile: Newton's update of their starts.
//
// If a segment's start moves by x, its end moves by A x, A being its product of Jacobians. With d, the
// distance from its start to the end before it, the shifts of the ends obey y = A (y_before + d): an affine
// recurrence over segments, solved by a decoupled look-back.
#pragma once
#include "lookback.h"
#include "trajectory.h"
#if PARARNN_CLUSTER
#include "sync_cluster.h"
#else
#include "sync_grid.h"
#endif

namespace pararnn {

using Gains = real[per_lane];

// Offsets in a segment's board: codegen/board.py computes them.
static_assert(board_group - board_map == words_of<Aggregate>);
static_assert(board_end - board_group == words_of<Aggregate>);
static_assert(board_gains - board_end == words_of<States>);
static_assert(board_words - board_gains == words_of<Gains>);

// One segment of a tile, and the board that all of them publish on.
struct Boundary {
  const Tile& tile;
  const int segments, own;
  Word* const board;  // of the tile

  // `column`: index of the tile among those of all rows.
  PARARNN_FUNCTION Boundary(const Shooting& s, const Tile& tile, int column, int own)
      : tile(tile), segments((int)s.segments), own(own),
        board(s.board + (int64)column * segments * board_words) {}

  PARARNN_FUNCTION Word* segment_board(int w) const { return board + (int64)w * board_words; }
  PARARNN_FUNCTION Word* aggregate(int w) const { return segment_board(w) + board_map; }
  PARARNN_FUNCTION Word* group_aggregate(int w) const { return segment_board(w) + board_group; }
  PARARNN_FUNCTION Word* end(int w) const { return segment_board(w) + board_end; }
  PARARNN_FUNCTION Word* gains(int w) const { return segment_board(w) + board_gains; }

  // Clears the segment's flags.
  PARARNN_FUNCTION void clear() const {
#pragma unroll
    for (int i = 0; i < board_words; i += lanes) segment_board(own)[i + lane()] = 0;
  }
};

// Newton's update of a segment: its new start, the channels that move there, and the largest distance, 0 if
// none moves.
struct Update {
  States start;
  Channels moved;
  real furthest;
};

PARARNN_FUNCTION void exchange_gains(const Boundary& b, unsigned flag, Trajectory& trajectory) {
  Gains next;
  const bool last = b.own + 1 == b.segments;
  if (b.own > 0) publish(b.gains(b.own), trajectory.gain, flag);
  wait_for(b.gains(b.own + 1), !last, flag, next);
  each<per_lane>([&](int c) { trajectory.next_gain[c] = last ? constant(1) : next[c]; });
}

// Returns the shift of a channel's start if nothing before it moves. It is zero if the start fits: in
// segments that expand, rounding would become a shift. Bridgeable gaps always count, so that they cannot add
// up.
PARARNN_FUNCTION State gap_of(const Boundary& b, const End& previous, const Trajectory& own, int c) {
  const bool fits = b.own == 0 || (!own.bridgeable(c) && own.gap(previous, c) <= constant(1));
  return vec<num_states>([&](int n) {
    return fits ? constant(0) : previous.state[n][c] - own.linear.start[n][c];
  });
}

// Returns a segment's map from the shift of the end before it to that of its own end.
PARARNN_FUNCTION Affine map_of(const Product& product, const State& gap) {
  Affine map;
  map.begin();
  map.a = product.a;
  map.b = map(gap);
  map.size = product.sizes();
  return map;
}

// Returns the shift of the end before this segment, and the largest states of all segments before.
PARARNN_FUNCTION Prefix prefix_of(const Boundary& b, unsigned flag, const Aggregate& aggregate) {
  int group = 1;  // segments of a group: about the square root of all
  while (group * group < b.segments) group *= 2;
  publish(b.aggregate(b.own), aggregate, flag);
  const int first = b.own - b.own % group;
  Aggregate group_prefix;  // of the segments before this one in its group
  group_prefix.begin();
  look_back(b.aggregate(first), board_words, b.own - first, flag, group_prefix);
  if (b.own == first + group - 1) {
    Aggregate whole = group_prefix;
    whole.append(aggregate);
    publish(b.group_aggregate(b.own), whole, flag);
  }
  Prefix prefix;
  each<per_lane>([&](int c) { prefix.shift[c] = filled<num_states>(constant(0)); });
  prefix.size.fill(constant(0));
  look_back(b.group_aggregate(group - 1), (int64)group * board_words, b.own / group, flag, prefix);
  prefix.append(group_prefix);
  return prefix;
}

// Newton's update of segment b. `previous`: the end of the segment before it; its sizes become those of all
// segments before. If a segment's start is unchanged, its end is final: the next segment starts there, or
// moves there.
PARARNN_FUNCTION Update newton_update(const Boundary& b, int round, End& previous,
                                      Trajectory& trajectory) {
  const unsigned flag = round + 1;
  const Linear& linear = trajectory.linear;
  if constexpr (bridges) exchange_gains(b, flag, trajectory);
  State gap[per_lane];
  Aggregate aggregate;
  each<per_lane>([&](int c) {
    gap[c] = gap_of(b, previous, trajectory, c);
    aggregate.maps[c] = map_of(linear.product[c], gap[c]);
  });
  const Prefix prefix = prefix_of(b, flag, aggregate);
  previous.size = prefix.size;
  trajectory.measure(previous);

  bool shifted[per_lane];
  States end;
  each<per_lane>([&](int c) {
    State shift = vec<num_states>([&](int n) { return prefix.shift[c][n] + gap[c][n]; });
    shifted[c] = b.own > 0 && exceeds(linear.start.column(c), shift, trajectory.gain[c],
                                      previous.size.column(c), trajectory.limit(c));
    // The next segment may make up for a skipped shift if a bridge may lead there.
    const bool passes_on =
        trajectory.bridgeable(c) && max_skipped_shift(trajectory.next_gain[c]) > constant(1);
    if (!shifted[c] && !passes_on) shift = filled<num_states>(constant(0));
    end.set_column(c, newton_start(trajectory.end.column(c), linear.product[c].a, shift));
  });
  if (b.own + 1 < b.segments) publish(b.end(b.own), end, flag);

  Update update;
  wait_for(b.end(b.own - 1), b.own > 0, flag, update.start);
  update.furthest = constant(0);
  update.moved = channels_where([&](int c) {
    const real far = trajectory.distance_to(update.start, previous.size, c);
    // A gap that is too long cannot be bridged: the segment counts as moved, even if to the same start.
    const bool too_long = trajectory.gap(previous, c) > trajectory.longest_gap(c);
    const bool moves = b.own > 0 && c < b.tile.active &&
                       (shifted[c] || far > trajectory.limit(c) || too_long);
    update.furthest = larger(moves ? larger(far, constant(1)) : constant(0), update.furthest);
    return moves;
  });
  update.furthest = max_of_lanes(update.furthest);
  return update;
}

}  // namespace pararnn
