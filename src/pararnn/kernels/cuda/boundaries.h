// Where the segments of a tile meet: Newton's update of the states that they start from.
//
// A segment whose start moves by x moves its end by A x, its product of Jacobians. With d, how far its
// start is from the end before it, the shifts of the ends obey y = A (y_before + d): an affine recurrence
// over the segments. Each of them posts its map, composes those of its group before it, and applies them to
// the shift that the groups before it make.
#pragma once
#include "channels.h"
#if PARARNN_CLUSTER
#include "meeting_cluster.h"
#else
#include "meeting_grid.h"
#endif

namespace pararnn {

constexpr int map_size = entries + 2 * num_states;
constexpr int map_numbers = per_lane * map_size;

// Where posts are on a segment's board: see codegen/board.py.
static_assert(board_group - board_map == post_words<map_numbers>);
static_assert(board_end - board_group == post_words<map_numbers>);
static_assert(board_gains - board_end == post_words<boundary_numbers>);
static_assert(board_words - board_gains == post_words<per_lane>);
static_assert(found_a_channel == 2 * num_states + kept + 1 && found_numbers == per_lane * found_a_channel);

// Where channels do not forget, rounding alone moves the end of a segment by more than a start may be off,
// and every rerun is rounded otherwise, or cell functions are so coarse that Newton creeps. So there the
// forward pass bridges gaps, see bridge.h, where the shifts that follow from them are small: over what a start
// may be off. Less is small where a segment, or the next one, makes more than `bridged_gain` of a shift.
constexpr bool bridges = !backward && !events && !exact;
constexpr real bridged = 20, bridged_gain = 3;
constexpr int bridge_steps = 32;

// Over what a start may be off: how large a shift may be that is not made, by what is made of it.
PARARNN_FUNCTION real small_shift(real gain) {
  const real shared = bridged * bridged_gain * reciprocal_of(gain);
  return shared > bridged ? bridged : larger(constant(1), shared);
}

// States as the first of some numbers to post, and back.
template <int count>
PARARNN_FUNCTION void flatten(const real (&x)[num_states][per_lane], real (&out)[count]) {
#pragma unroll
  for (int i = 0; i < boundary_numbers; ++i) out[i] = x[i / per_lane][i % per_lane];
}
template <int count>
PARARNN_FUNCTION void unflatten(const real (&x)[count], real (&out)[num_states][per_lane]) {
#pragma unroll
  for (int i = 0; i < boundary_numbers; ++i) out[i / per_lane][i % per_lane] = x[i];
}

// Where a segment ends: the states, and the largest ones on the way.
struct End {
  real state[num_states][per_lane], size[num_states][per_lane];

  PARARNN_FUNCTION void get(real (&numbers)[end_numbers]) const {
    flatten(state, numbers);
#pragma unroll
    for (int i = 0; i < boundary_numbers; ++i)
      numbers[boundary_numbers + i] = size[i / per_lane][i % per_lane];
  }
  PARARNN_FUNCTION void set(const real (&numbers)[end_numbers]) {
    unflatten(numbers, state);
#pragma unroll
    for (int i = 0; i < boundary_numbers; ++i)
      size[i / per_lane][i % per_lane] = numbers[boundary_numbers + i];
  }
};

// What became of a segment since its last sweep: nothing, its start has moved, or it has been bridged.
enum class Status { as_it_was, moved, bridged };

// What a segment starts from, ends at, and makes of a shift of its start.
struct Trajectory {
  real end[num_states][per_lane];
  Linear linear;                 // and the start
  real gain[per_lane];           // what it makes of a shift, by measure
  real next_gain[per_lane];      // of the segment that follows, by newton_update
  bool bridging = false;         // whether there are steps enough for bridges

  PARARNN_FUNCTION void measure(const End& before) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real sizes[num_states];
      column(before.size, c, sizes);
      gain[c] = gain_of(linear.product[c], sizes);
    }
  }

  // For one warp that goes on alone.
  PARARNN_FUNCTION void write(scalar* to, Status status) const {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      scalar* own = to + c * found_a_channel * lanes + lane();
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        __stcg(own + n * lanes, linear.start[n][c]);
        __stcg(own + (num_states + n) * lanes, end[n][c]);
      }
#pragma unroll
      for (int k = 0; k < kept; ++k)
        __stcg(own + (2 * num_states + k) * lanes, linear.product[c][k]);
      __stcg(own + (found_a_channel - 1) * lanes, constant((int)status));
    }
  }
  PARARNN_FUNCTION Status read(const scalar* from) {
    real status;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      const scalar* own = from + c * found_a_channel * lanes + lane();
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        linear.start[n][c] = __ldcg(own + n * lanes);
        end[n][c] = __ldcg(own + (num_states + n) * lanes);
      }
#pragma unroll
      for (int k = 0; k < kept; ++k)
        linear.product[c][k] = __ldcg(own + (2 * num_states + k) * lanes);
      status = __ldcg(own + (found_a_channel - 1) * lanes);
    }
    return (Status)(int)status;
  }

  PARARNN_FUNCTION End last() const {
    End x;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        x.state[n][c] = end[n][c];
        x.size[n][c] = size_of(linear.product[c], n);
      }
    }
    return x;
  }
  // The same, where the segment follows one that ends with `before`.
  PARARNN_FUNCTION End last_after(const End& before) const {
    End x = last();
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real sizes[num_states], own[num_states];
      column(before.size, c, sizes);
      column(x.size, c, own);
      pass_on_sizes(linear.product[c], sizes, own);
#pragma unroll
      for (int n = 0; n < num_states; ++n) x.size[n][c] = own[n];
    }
    return x;
  }

  // How far channel c of the lane starts from where the segment before it ends.
  PARARNN_FUNCTION real gap(const End& before, int c) const {
    real own_start[num_states], own_before[num_states], sizes[num_states];
    column(linear.start, c, own_start);
    column(before.state, c, own_before);
    column(before.size, c, sizes);
    return distance(own_start, own_before, gain[c], sizes);
  }
  // Whether a gap may stay, and be bridged.
  PARARNN_FUNCTION bool bridgeable(int c) const {
    return bridging && small_shift(gain[c]) > constant(1);
  }
  // How long it may be: as the two shifts that it lies between.
  PARARNN_FUNCTION real longest_gap(int c) const {
    return bridgeable(c) ? 2 * small_shift(gain[c]) : constant(1);
  }
  // How large a shift may be that is not made.
  PARARNN_FUNCTION real limit(int c) const {
    return bridgeable(c) ? small_shift(larger(next_gain[c], gain[c])) : constant(1);
  }
  PARARNN_FUNCTION bool follows(const End& before, const Place& at) const {
    bool fits = true;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) fits &= c >= at.active || gap(before, c) <= constant(1);
    return __all_sync(~0u, fits);
  }

  // The channels with gaps that are small enough for a bridge.
  PARARNN_FUNCTION Channels gaps(const End& before, const Place& at) const {
    Channels some;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      const real far = gap(before, c);
      const bool small = far > constant(1) && far <= longest_gap(c);
      some.lanes_of[c] = __ballot_sync(~0u, c < at.active && small);
    }
    return some;
  }
  // Channels that have moved start from elsewhere; where the whole segment runs again, also those that had
  // not far to go, which so need no bridge.
  PARARNN_FUNCTION void move(const real (&wanted)[num_states][per_lane], const Channels& moved,
                             bool whole) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
#pragma unroll
      for (int n = 0; n < num_states; ++n)
        if (moved.has(c) || (whole && bridgeable(c))) linear.start[n][c] = wanted[n][c];
  }
};

struct Maps {  // one a channel of the lane
  Affine of[per_lane];

  PARARNN_FUNCTION void post_to(Word* to, unsigned tag) const {
    real numbers[map_numbers];
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int e = 0; e < entries; ++e) numbers[c * map_size + e] = of[c].a[e];
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        numbers[c * map_size + entries + n] = of[c].b[n];
        numbers[c * map_size + entries + num_states + n] = of[c].size[n];
      }
    }
    post(to, numbers, tag);
  }
  PARARNN_FUNCTION void set(const real (&numbers)[map_numbers]) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int e = 0; e < entries; ++e) of[c].a[e] = numbers[c * map_size + e];
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        of[c].b[n] = numbers[c * map_size + entries + n];
        of[c].size[n] = numbers[c * map_size + entries + num_states + n];
      }
    }
  }
  // To a shift, and to what states are measured by before it.
  PARARNN_FUNCTION void apply(real (&x)[per_lane][num_states], End& at) const {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real y[num_states], before[num_states], size[num_states];
      of[c].apply(x[c], y);
      column(at.size, c, before);
#pragma unroll
      for (int n = 0; n < num_states; ++n) size[n] = of[c].size[n];
      pass_on_sizes(of[c].a, before, size);
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        x[c][n] = y[n];
        at.size[n][c] = size[n];
      }
    }
  }
  PARARNN_FUNCTION void follow(const Maps& next) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) of[c] = next.of[c].after(of[c]);
  }
};

// Maps that are waited for together, as many as registers hold.
constexpr int together = map_numbers * words_a_number <= 6              ? 8
                         : map_numbers <= (backward ? 12 : 16) ? 2
                                                                 : 1;

// Calls use(maps) for `some` posts, in their order.
template <class Use>
PARARNN_FUNCTION void for_each_map(const Word* from, int64 apart, int some, unsigned tag,
                                   const Use& use) {
  for (int first = 0; first < some; first += together) {
    real numbers[together][map_numbers];
    collect(from + first * apart, apart, some - first, tag, numbers);
#pragma unroll
    for (int k = 0; k < together; ++k) {
      if (first + k >= some) continue;
      Maps maps;
      maps.set(numbers[k]);
      use(maps);
    }
  }
}

// What follows from a shift: whether it is worth a rerun; it is not if it is no number.
PARARNN_FUNCTION bool too_far(const real (&start)[num_states], const real (&shift)[num_states],
                              real gain, const real (&sizes)[num_states], real limit) {
  real shifted[num_states];
  bool usable = true;
#pragma unroll
  for (int n = 0; n < num_states; ++n) {
    shifted[n] = start[n] + shift[n];
    usable &= finite(shift[n]);
  }
  return usable && distance(start, shifted, gain, sizes) > limit;
}

// Where Newton wants segment `own` to start, and the channels that have to move there, as it is too far away.
// `before`: the end of the segment before it, whose sizes become those of all segments before. Returns how far
// it is, 0 if all stay. A segment whose start stays is one whose end is believed: what follows it starts
// there, or is moved to there.
PARARNN_FUNCTION real newton_update(const Shooting& s, const Place& at, int column_number, int own,
                                    int round, End& before, Trajectory& trajectory,
                                    real (&wanted)[num_states][per_lane], Channels& moved) {
  const int segments = (int)s.segments;
  int group = 1;  // segments of a group: about the square root of them all
  while (group * group < segments) group *= 2;
  const unsigned tag = round + 1;
  Word* const all = s.board + (int64)column_number * segments * board_words;
  Word* const mine = all + (int64)own * board_words;
  Word *const to_group = mine + board_group, *const to_end = mine + board_end;
  const Linear& linear = trajectory.linear;
  if constexpr (bridges) {
    Word* const to_gains = mine + board_gains;
    real next[1][per_lane];
    if (own > 0) post(to_gains, trajectory.gain, tag);
    collect(to_gains + board_words, 0, own + 1 < segments, tag, next);
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
      trajectory.next_gain[c] = own + 1 < segments ? next[0][c] : constant(1);
  }
  Maps maps, inside;
  real shift[per_lane][num_states], gap[per_lane][num_states];
#pragma unroll
  for (int c = 0; c < per_lane; ++c) {
#pragma unroll
    for (int e = 0; e < entries; ++e) maps.of[c].a[e] = linear.product[c][e];
    // A start that fits has no gap: where segments expand, rounding would become a shift. But where gaps
    // are bridged, they must not add up.
    const bool fits =
        own == 0 || (!trajectory.bridgeable(c) && trajectory.gap(before, c) <= constant(1));
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      gap[c][n] = fits ? constant(0) : before.state[n][c] - linear.start[n][c];
      shift[c][n] = constant(0);
    }
    real ends[num_states];
    maps.of[c].apply(gap[c], ends);
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      maps.of[c].b[n] = ends[n];
      maps.of[c].size[n] = size_of(linear.product[c], n);
    }
  }
  maps.post_to(mine, tag);
  const int first = own - own % group;
  for_each_map(all + (int64)first * board_words, board_words, own - first, tag,
               [&](const Maps& next) { inside.follow(next); });
  if (own == first + group - 1) {
    Maps whole = inside;
    whole.follow(maps);
    whole.post_to(to_group, tag);
  }
  clear(before.size);
  const int64 group_apart = (int64)group * board_words;
  for_each_map(all + group_apart - board_words + board_group, group_apart, own / group,
               tag, [&](const Maps& next) { next.apply(shift, before); });
  inside.apply(shift, before);
  trajectory.measure(before);
  bool shifted[per_lane];
  real ends[num_states][per_lane];
#pragma unroll
  for (int c = 0; c < per_lane; ++c) {
    real own_start[num_states], own_end[num_states], expected[num_states], sizes[num_states];
    column(before.size, c, sizes);
    column(linear.start, c, own_start);
    column(trajectory.end, c, own_end);
#pragma unroll
    for (int n = 0; n < num_states; ++n) shift[c][n] += gap[c][n];
    shifted[c] = own > 0 && too_far(own_start, shift[c], trajectory.gain[c], sizes,
                                    trajectory.limit(c));
    // What stays unmade, the next segment may make up for if a bridge may lead there.
    const bool passes_on = trajectory.bridgeable(c) && small_shift(trajectory.next_gain[c]) > constant(1);
#pragma unroll
    for (int n = 0; n < num_states; ++n)
      if (!shifted[c] && !passes_on) shift[c][n] = constant(0);
    newton_start(own_end, linear.product[c], shift[c], expected);
#pragma unroll
    for (int n = 0; n < num_states; ++n) ends[n][c] = expected[n];
  }
  real flat[boundary_numbers], posted[1][boundary_numbers];
  flatten(ends, flat);
  if (own + 1 < segments) post(to_end, flat, tag);
  collect(to_end - board_words, 0, own > 0, tag, posted);
  unflatten(posted[0], wanted);
  real furthest = constant(0);
#pragma unroll
  for (int c = 0; c < per_lane; ++c) {
    real own_start[num_states], own_wanted[num_states], sizes[num_states];
    column(before.size, c, sizes);
    column(linear.start, c, own_start);
    column(wanted, c, own_wanted);
    const bool exists = own > 0 && c < at.active;
    const real far = distance(own_start, own_wanted, trajectory.gain[c], sizes);
    const real limit = trajectory.limit(c);
    // A gap that is too long is no end: then the segment counts as moved, if only to where it is.
    const bool too_long = trajectory.gap(before, c) > trajectory.longest_gap(c);
    const bool moves = exists && (shifted[c] || far > limit || too_long);
    moved.lanes_of[c] = __ballot_sync(~0u, moves);
    furthest = larger(moves ? larger(far, constant(1)) : constant(0), furthest);
  }
  return most_of_lanes(furthest);
}

// A segment's part of the board is empty at first.
PARARNN_FUNCTION void clear_board(const Shooting& s, int column_number, int own) {
  Word* mine = s.board + ((int64)column_number * s.segments + own) * board_words;
#pragma unroll
  for (int i = 0; i < board_words; i += lanes) mine[i + lane()] = 0;
}

}  // namespace pararnn
