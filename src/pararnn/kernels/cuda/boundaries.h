// Where the segments of a tile meet: their starts, ends and products of Jacobians, in memory that all
// blocks see, and Newton's update of the starts.
#pragma once
#include "meeting.h"

namespace pararnn {

struct Shooting {
  int64 segments, size, burn_in;  // how many, steps of one, steps of the guess
  scalar* starts;                 // (row, segment, state, channel)
  scalar* ends;                   // (row, segment, state, channel)
  scalar* products;               // (row, segment, kept, channel)
  Counters counters;              // of the meeting
};

// The segments of one tile.
struct Boundaries {
  const Shooting& s;
  const Place& at;

  PARARNN_FUNCTION Boundaries(const Shooting& s, const Place& at) : s(s), at(at) {}

  PARARNN_FUNCTION int segments() const { return (int)s.segments; }

  // The values of segment w for one channel, of all.
  template <int count>
  PARARNN_FUNCTION void read(const scalar* from, int w, int channel, real (&x)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i)
      x[i] = __ldcg(from + ((at.row * s.segments + w) * count + i) * channels + channel);
  }
  template <int count>
  PARARNN_FUNCTION void write(scalar* to, int w, int channel, const real (&x)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i)
      __stcg(to + ((at.row * s.segments + w) * count + i) * channels + channel, x[i]);
  }
  PARARNN_FUNCTION void read_states(const scalar* from, int w,
                                    real (&x)[num_states][per_lane]) const {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real own[num_states] = {};
      if (c < at.active) read(from, w, at.own + c, own);
#pragma unroll
      for (int n = 0; n < num_states; ++n) x[n][c] = own[n];
    }
  }
  // What a sweep of segment w has found.
  PARARNN_FUNCTION void write_all(int w, const Linear& linear,
                                  const real (&end)[num_states][per_lane]) const {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      if (c >= at.active) continue;
      real own_start[num_states], own_end[num_states];
      column(linear.start, c, own_start);
      column(end, c, own_end);
      write(s.starts, w, at.own + c, own_start);
      write(s.ends, w, at.own + c, own_end);
      write(s.products, w, at.own + c, linear.product[c]);
    }
  }
};

// The start of a segment, and what comes before it.
struct Boundary {
  real wanted[num_states], start[num_states], before[kept], product[kept];

  PARARNN_FUNCTION void read(const Boundaries& b, int w, int channel) {
    b.read(b.s.ends, w - 1, channel, wanted);
    b.read(b.s.starts, w, channel, start);
    b.read(b.s.products, w - 1, channel, before);
    b.read(b.s.products, w, channel, product);
  }

  // From how far the start before it is off to how far this one is.
  PARARNN_FUNCTION Affine map() const {
    Affine own;
#pragma unroll
    for (int e = 0; e < entries; ++e) own.a[e] = before[e];
#pragma unroll
    for (int n = 0; n < num_states; ++n) own.b[n] = wanted[n] - start[n];
    return own;
  }
};

PARARNN_FUNCTION bool too_far(const real (&start)[num_states], const real (&shift)[num_states],
                              real gain) {
  real shifted[num_states];
  bool usable = true;
#pragma unroll
  for (int n = 0; n < num_states; ++n) {
    shifted[n] = start[n] + shift[n];
    usable &= finite(shift[n]);
  }
  return usable && distance(start, shifted, gain) > constant(1);
}

// Where a start belongs: `end`, where the run before it ends, and what that makes of its own shift (`a`),
// unless that overflows.
PARARNN_FUNCTION void newton_start(const real (&end)[num_states], const real (&a)[kept],
                                   const real (&shift)[num_states], real (&wanted)[num_states]) {
#pragma unroll
  for (int i = 0; i < num_states; ++i) {
    real change = constant(0);
#pragma unroll
    for (int j = 0; j < num_states; ++j)
      change = multiply_add(a[i * num_states + j], shift[j], change);
    wanted[i] = end[i] + (finite(change) ? change : constant(0));
  }
}

constexpr int batch = num_states == 1 ? 4 : num_states == 2 ? 2 : 1;  // boundaries read together

// Newton's update for one channel, by `width` neighbouring lanes, each with some of the boundaries.
// Moves the starts that are too far away, and tells `moved(w)`. A segment whose start stays is one
// whose end is believed: what follows it starts there, or is moved to there. Returns how far away the
// furthest start was.
template <class Moved>
PARARNN_FUNCTION real move_channel(const Boundaries& b, int channel, bool exists, int width,
                                   const Moved& moved) {
  const int boundaries = b.segments() - 1, sub = lane() % width;
  const int each = (boundaries + width - 1) / width;
  const int first = 1 + sub * each, end = exists ? min(first + each, b.segments()) : 0;
  Affine all;
  for (int from = first; from < end; from += batch) {
    Boundary some[batch];
#pragma unroll
    for (int k = 0; k < batch; ++k) some[k].read(b, min(from + k, end - 1), channel);
#pragma unroll
    for (int k = 0; k < batch; ++k)
      if (from + k < end) all = some[k].map().after(all);
  }
  scan_lanes(all, width);
  real shift[num_states], furthest = constant(0);  // of the start before
  from_lane_before(all.b, 1, width, shift);
#pragma unroll
  for (int n = 0; n < num_states; ++n)
    if (sub == 0) shift[n] = constant(0);
  bool shifted = false;  // whether that start moves, by its shift
  if (first < end && first > 1) {
    Boundary before;
    before.read(b, first - 1, channel);
    shifted = too_far(before.start, shift, before.product[entries]);
  }
  __syncwarp();  // the lane before may move that start
  for (int from = first; from < end; from += batch) {
    Boundary some[batch];
#pragma unroll
    for (int k = 0; k < batch; ++k) some[k].read(b, min(from + k, end - 1), channel);
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int w = from + k;
      if (w >= end) continue;
      const Boundary& own = some[k];
      real wanted[num_states], next[num_states], counted[num_states];
#pragma unroll
      for (int n = 0; n < num_states; ++n) counted[n] = shifted ? shift[n] : constant(0);
      newton_start(own.wanted, own.before, counted, wanted);
      own.map().apply(shift, next);
#pragma unroll
      for (int n = 0; n < num_states; ++n)
        shift[n] = w + 1 < end ? next[n] : all.b[n];  // the bits that the next lane goes on from
      shifted = too_far(own.start, shift, own.product[entries]);
      const real far = distance(own.start, wanted, own.product[entries]);
      if (shifted || far > constant(1)) {
        b.write(b.s.starts, w, channel, wanted);
        moved(w);
      }
      furthest = larger(far, furthest);
    }
  }
  return furthest;
}

// The channels `far` of a tile are shared among the warps of its segments, `own` being one of them.
template <class Moved>
PARARNN_FUNCTION real move_starts(const Boundaries& b, const Channels& far, int own,
                                  const Moved& moved) {
  const int count = far.count(), first = b.at.first;
  int width = 1;
  while (width < lanes && width < b.segments() - 1) width *= 2;
  const int groups = lanes / width;
  real furthest = constant(0);
  for (int from = own * groups; from < count; from += b.segments() * groups) {
    const int k = from + lane() / width, place = far.nth(min(k, count - 1));
    const real own_far = move_channel(b, first + place, k < count, width,
                                      [&](int w) { moved(w, place); });
    furthest = larger(own_far, furthest);
  }
  return most_of_lanes(furthest);
}

}  // namespace pararnn
