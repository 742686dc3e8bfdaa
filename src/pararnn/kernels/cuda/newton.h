// Multiple shooting: time is cut into segments, a warp each, and the unknowns are the states that they
// start from. A first sweep runs every segment from a guess, the state that a burn-in of some steps
// reaches from zero. Where the end of each segment is the start of the next, to rounding, the tile of
// channels is done: the segments are one trajectory. Else Newton moves the starts, by the product of
// Jacobians that each segment has multiplied up, and the segments whose start has moved run again, or
// only the channels that have moved. Every round makes one more segment exact, at least; where Newton
// does not come nearer, one warp runs the rest one step after the other. The backward pass is the same on
// a linear recurrence.
//
// The segments of a tile meet after each sweep. What is decided depends on the values only, and all
// segments decide alike.
#pragma once
#include "boundaries.h"
#include "mend.h"

namespace pararnn {

struct NewtonProblem {
  Pass::Problem pass;
  Shooting shooting;
};

// Newton goes on while a round brings the starts this much nearer.
constexpr real enough_progress = 0.5;

// What a warp keeps of the segment that it runs.
struct Segment {
  Span span;
  int64 slot;
  real state[num_states][per_lane];  // the start, and then the end
  Linear linear;

  PARARNN_FUNCTION Segment(const Boundaries& b, int length, int w)
      : span{w * (int)b.s.size, w * (int)b.s.size, min((w + 1) * (int)b.s.size, length)},
        slot(b.at.row * b.s.segments + w) {}

  PARARNN_FUNCTION void sweep(const Pass& pass) { pass.sweep(span, state, linear, slot); }

  // The channels whose end is not the start of the segment after it; `before`: the end of the one
  // before this one.
  PARARNN_FUNCTION Channels compare(const Place& at, const real (&before)[num_states][per_lane],
                                    bool first) const {
    Channels far;
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real own_start[num_states], own_before[num_states];
      column(linear.start, c, own_start);
      column(before, c, own_before);
      const bool fits = first || c >= at.active ||
                        distance(own_start, own_before, linear.product[c][entries]) <= constant(1);
      far.lanes_of[c] = __ballot_sync(~0u, !fits);
    }
    return far;
  }

  // Runs the channels again whose start has moved.
  PARARNN_FUNCTION void mend_channels(const Pass& pass, const Boundaries& b, int w,
                                      const Channels& moved) {
    const int count = moved.count();
    for (int k = 0; k < count; ++k) {
      const int place = moved.nth(k), channel = b.at.first + place;
      real own[num_states], start[num_states], product[kept];
      b.read(b.s.starts, w, channel, own);
#pragma unroll
      for (int n = 0; n < num_states; ++n) start[n] = own[n];
      mend(pass, channel, span, slot, own, product);
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        if (lane() * per_lane + c != place) continue;
#pragma unroll
        for (int n = 0; n < num_states; ++n) {
          linear.start[n][c] = start[n];
          state[n][c] = own[n];
        }
#pragma unroll
        for (int e = 0; e < kept; ++e) linear.product[c][e] = product[e];
      }
    }
  }
};

PARARNN_FUNCTION Channels moved_at(const Meeting& meeting, int w) {
  const volatile unsigned* words = meeting.moved(w);
  Channels moved;
#pragma unroll
  for (int c = 0; c < per_lane; ++c) moved.lanes_of[c] = words[c];
  return moved;
}

// One warp runs what is left, from the first segment on that has moved: those before it are exact.
PARARNN_FUNCTION void run_alone(const Pass& pass, const Boundaries& b, const Meeting& meeting,
                                int length) {
  real state[num_states][per_lane];
  int w = 1;
  while (w < b.segments() && !moved_at(meeting, w).any()) ++w;
  if (w < b.segments()) b.read_states(b.s.starts, w, state);
  while (w < b.segments()) {
    Segment segment(b, length, w);
#pragma unroll
    for (int n = 0; n < num_states; ++n)
#pragma unroll
      for (int c = 0; c < per_lane; ++c) segment.state[n][c] = state[n][c];
    segment.sweep(pass);
    do {  // the segments that fit as they are
#pragma unroll
      for (int n = 0; n < num_states; ++n)
#pragma unroll
        for (int c = 0; c < per_lane; ++c) state[n][c] = segment.state[n][c];
      if (++w == b.segments() || moved_at(meeting, w).any()) break;
      b.read_states(b.s.starts, w, segment.linear.start);
#pragma unroll
      for (int c = 0; c < per_lane; ++c)
        if (c < b.at.active) b.read(b.s.products, w, b.at.own + c, segment.linear.product[c]);
      b.read_states(b.s.ends, w, segment.state);
    } while (!segment.compare(b.at, state, false).any());
  }
}

PARARNN_FUNCTION void run_newton(const NewtonProblem& p) {
  __shared__ __align__(16) char memory[Pass::bytes];
  __shared__ __align__(16) char desk[at_least_1(Meeting::bytes)];
  const Shooting& s = p.shooting;
  const int segments = (int)s.segments, length = (int)p.pass.in.length;
  const int own = blockIdx.x % segments, tile_number = blockIdx.x / segments;
  Meeting meeting(s.counters, desk, tile_number, segments, own);
  const Place at(tile_number);
  const Weights weights(p.pass.in, at);
  const Pass pass(p.pass, at, weights, memory);
  const Boundaries b(s, at);
  Segment segment(b, length, own);
  const int burn_in = min((int)s.burn_in, segment.span.first);
  segment.span.begin -= burn_in;
  if (burn_in == segment.span.first) pass.origin(segment.state);
  else clear(segment.state);
  segment.sweep(pass);
  segment.span.begin = segment.span.first;
  real before = constant(INFINITY);
  for (int round = 0;; ++round) {
    real end_before[num_states][per_lane];
    if (Meeting::in_global_memory) b.write_all(own, segment.linear, segment.state);
    meeting.exchange(round, segment.state, end_before);
    const Channels far = meeting.anywhere(round, segment.compare(at, end_before, own == 0));
    if (!far.any()) {
      if (own == 0) pass.report(tile_number, round + 1, round > 0);
      return;
    }
    if (!Meeting::in_global_memory) {
      b.write_all(own, segment.linear, segment.state);
      meeting.publish();
    }
    const auto tell = [&](int w, int place) {
      atomicOr(meeting.moved(w) + place % per_lane, 1u << place / per_lane);
    };
    const real furthest = meeting.most(round, move_starts(b, far, own, tell));
    if (!(furthest <= enough_progress * before) || round >= segments) {
      if (own == 0) {
        run_alone(pass, b, meeting, length);
        pass.report(tile_number, round + 2, true);
      }
      meeting.leave();
      return;
    }
    before = furthest;
    const Channels moved = moved_at(meeting, own);
    __syncwarp();
    if (lane() < per_lane) meeting.moved(own)[lane()] = 0;
    if (!moved.any()) continue;
    if (worth_mending(moved.count(), segment.span.end - segment.span.first)) {
      segment.mend_channels(pass, b, own, moved);
    } else {
      b.read_states(s.starts, own, segment.state);
      segment.sweep(pass);
    }
  }
}

}  // namespace pararnn

// Four warps a multiprocessor are enough: twice as many leave each one all registers that it may have.
extern "C" __global__ void __launch_bounds__(32, 8)
run(const __grid_constant__ pararnn::NewtonProblem problem) {
  pararnn::run_newton(problem);
}
