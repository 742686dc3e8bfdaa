// Where the segments of a tile meet: Newton's update of the states that they start from.
//
// A segment whose start moves by x moves its end by A x, its product of Jacobians. With d, how far its
// start is from the end before it, the shifts of the ends obey y = A (y_before + d): an affine recurrence
// over the segments, which look back.
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

// Where the numbers that a segment publishes are on its board: see codegen/board.py.
static_assert(board_group - board_map == words_of<Aggregate>);
static_assert(board_end - board_group == words_of<Aggregate>);
static_assert(board_gains - board_end == words_of<States>);
static_assert(board_words - board_gains == words_of<Gains>);

// One segment of a tile among its `segments`, and what they publish.
struct Boundary {
  const Place& at;
  const int segments, own;
  Word* const board;  // of the tile

  // `column`: the number of the tile among those of all rows.
  PARARNN_FUNCTION Boundary(const Shooting& s, const Place& at, int column, int own)
      : at(at), segments((int)s.segments), own(own),
        board(s.board + (int64)column * segments * board_words) {}

  PARARNN_FUNCTION Word* of_segment(int w) const { return board + (int64)w * board_words; }
  PARARNN_FUNCTION Word* aggregate(int w) const { return of_segment(w) + board_map; }
  PARARNN_FUNCTION Word* group_aggregate(int w) const { return of_segment(w) + board_group; }
  PARARNN_FUNCTION Word* end(int w) const { return of_segment(w) + board_end; }
  PARARNN_FUNCTION Word* gains(int w) const { return of_segment(w) + board_gains; }

  // No flag of the segment's is set at first.
  PARARNN_FUNCTION void clear() const {
#pragma unroll
    for (int i = 0; i < board_words; i += lanes) of_segment(own)[i + lane()] = 0;
  }
};

// Where Newton wants a segment to start, the channels that have to move there, as it is too far away, and how far it
// is: 0 if all stay.
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

// How far a channel's start is to be shifted if nothing before it moves. A start that fits has no gap: where segments
// expand, rounding would become a shift. But where gaps are bridged, they must not add up.
PARARNN_FUNCTION State gap_of(const Boundary& b, const End& before, const Trajectory& own, int c) {
  const bool fits = b.own == 0 || (!own.bridgeable(c) && own.gap(before, c) <= constant(1));
  return vec<num_states>([&](int n) {
    return fits ? constant(0) : before.state[n][c] - own.linear.start[n][c];
  });
}

// What a segment makes of a shift of its start, added to its gap.
PARARNN_FUNCTION Affine map_of(const Product& product, const State& gap) {
  Affine map;
  map.begin();
  map.a = product.a;
  map.b = map(gap);
  map.size = product.sizes();
  return map;
}

// The shift of the end before this segment, and the largest states of all segments before.
PARARNN_FUNCTION Prefix prefix_of(const Boundary& b, unsigned flag, const Aggregate& aggregate) {
  int group = 1;  // segments of a group: about the square root of them all
  while (group * group < b.segments) group *= 2;
  publish(b.aggregate(b.own), aggregate, flag);
  const int first = b.own - b.own % group;
  Aggregate inside;  // of those before it in its group
  inside.begin();
  look_back(b.aggregate(first), board_words, b.own - first, flag, inside);
  if (b.own == first + group - 1) {
    Aggregate whole = inside;
    whole.append(aggregate);
    publish(b.group_aggregate(b.own), whole, flag);
  }
  Prefix prefix;
  each<per_lane>([&](int c) { prefix.shift[c] = filled<num_states>(constant(0)); });
  prefix.size.fill(constant(0));
  look_back(b.group_aggregate(group - 1), (int64)group * board_words, b.own / group, flag, prefix);
  prefix.append(inside);
  return prefix;
}

// Newton's update of segment b. `before`: the end of the segment before it, whose sizes become those of all
// segments before. A segment whose start stays is one whose end is believed: what follows it starts there, or is
// moved to there.
PARARNN_FUNCTION Update newton_update(const Boundary& b, int round, End& before,
                                      Trajectory& trajectory) {
  const unsigned flag = round + 1;
  const Linear& linear = trajectory.linear;
  if constexpr (bridges) exchange_gains(b, flag, trajectory);
  State gap[per_lane];
  Aggregate aggregate;
  each<per_lane>([&](int c) {
    gap[c] = gap_of(b, before, trajectory, c);
    aggregate.of[c] = map_of(linear.product[c], gap[c]);
  });
  const Prefix prefix = prefix_of(b, flag, aggregate);
  before.size = prefix.size;
  trajectory.measure(before);

  bool shifted[per_lane];
  States end;
  each<per_lane>([&](int c) {
    State shift = vec<num_states>([&](int n) { return prefix.shift[c][n] + gap[c][n]; });
    shifted[c] = b.own > 0 && too_far(linear.start.column(c), shift, trajectory.gain[c],
                                      before.size.column(c), trajectory.limit(c));
    // What stays unmade, the next segment may make up for if a bridge may lead there.
    const bool passes_on =
        trajectory.bridgeable(c) && small_shift(trajectory.next_gain[c]) > constant(1);
    if (!shifted[c] && !passes_on) shift = filled<num_states>(constant(0));
    end.set_column(c, newton_start(trajectory.end.column(c), linear.product[c].a, shift));
  });
  if (b.own + 1 < b.segments) publish(b.end(b.own), end, flag);

  Update update;
  wait_for(b.end(b.own - 1), b.own > 0, flag, update.start);
  update.furthest = constant(0);
  update.moved = channels_where([&](int c) {
    const real far = trajectory.distance_to(update.start, before.size, c);
    // A gap that is too long is no end: then the segment counts as moved, if only to where it is.
    const bool too_long = trajectory.gap(before, c) > trajectory.longest_gap(c);
    const bool moves = b.own > 0 && c < b.at.active &&
                       (shifted[c] || far > trajectory.limit(c) || too_long);
    update.furthest = larger(moves ? larger(far, constant(1)) : constant(0), update.furthest);
    return moves;
  });
  update.furthest = most_of_lanes(update.furthest);
  return update;
}

}  // namespace pararnn
