// Multiple shooting: time is cut into segments, a warp each, and the unknowns are the states that they
// start from. A first sweep runs every segment from a guess, the state that a burn-in of some steps
// reaches from zero. Where the end of each segment is the start of the next, to rounding, the tile of
// channels is done: the segments are one trajectory. Else Newton moves the starts, by the product of
// Jacobians that each segment has multiplied up, and the segments whose start has moved run again, or
// only the channels that have moved. Every round makes one more segment exact, at least; where Newton
// does not come nearer, one warp runs the rest one step after the other. The backward pass is the same on
// a linear recurrence.
//
// The segments of a tile synchronise after each sweep. What is decided depends on the values only, and all
// segments decide alike.
//
// In reading order: registers.h, ring.h, problem.h and forward.h, a sweep; linear.h, what it notes; acceptance.h and
// trajectory.h, whether segments fit; sync_grid.h, how they synchronise; lookback.h and boundaries.h, where they
// start next; mend.h and bridge.h, what runs again.
#pragma once
#include "boundaries.h"
#include "bridge.h"
#include "mend.h"

namespace pararnn {

// What a warp keeps of the segment that it runs.
struct Segment {
  Span span;
  int64 slot;
  Trajectory trajectory;

  PARARNN_FUNCTION Segment(const Shooting& s, const Place& at, int length, int w)
      : span{w * (int)s.size, w * (int)s.size, min((w + 1) * (int)s.size, length)},
        slot(at.row * s.segments + w) {
    trajectory.bridging = bridges && span.end - span.first > bridge_steps;
  }

  PARARNN_FUNCTION void sweep_from(const Pass& pass, const States& state) {
    trajectory.end = state;
    pass.sweep(span, trajectory.end, trajectory.linear, slot);
  }

  // Returns whether there were any gaps.
  template <class AnyPass>
  PARARNN_FUNCTION bool bridge_gaps(const AnyPass& pass, const Place& at, const End& before) const {
    if constexpr (bridges) {
      const Channels some = trajectory.gaps(before, at);
      bridge_channels(pass, at, some, span.first, before);
      return some.any();
    }
    return false;
  }

  // Runs some channels again.
  PARARNN_FUNCTION void mend_channels(const Pass& pass, const Place& at, const Channels& some,
                                      const End& before) {
    const int count = some.count();
    for (int k = 0; k < count; ++k) {
      const int place = some.nth(k);
      State state = of_channel(trajectory.linear.start, place);
      Product product;
      mend(pass, at.first + place, span, slot, of_channel(before.size, place), state, product);
      each<per_lane>([&](int c) {
        if (lane() * per_lane + c != place) return;
        trajectory.end.set_column(c, state);
        trajectory.linear.product[c] = product;
      });
    }
  }
};

// One warp runs what is left, from the first segment on that has moved: those before it are exact.
// Returns how many segments it ran.
PARARNN_FUNCTION int run_alone(const Pass& pass, const Shooting& s, const Place& at,
                                const scalar* found, int length) {
  const int segments = (int)s.segments;
  const auto status_of = [&](Trajectory& own, int w) {
    return own.read(found + w * found_numbers * lanes);
  };
  Trajectory known;
  End last;
  last.size.fill(constant(0));
  int w = 0;
  for (Status own = status_of(known, 0); own != Status::moved; own = status_of(known, w)) {
    last = known.last_after(last);
    if (++w == segments) return 0;
  }
  int ran = 0;
  for (; w < segments; ++ran) {
    Segment segment(s, at, length, w);
    segment.sweep_from(pass, last.state);
    known = segment.trajectory;
    bool fits = true;  // segments that fit as they are
    while (fits) {
      last = known.last_after(last);
      if (++w == segments) return ran + 1;
      fits = status_of(known, w) == Status::as_it_was;
      known.measure(last);
      fits = fits && known.follows(last, at);
    }
  }
  return ran;
}

PARARNN_FUNCTION void run_newton(const Pass::Launch& p) {
  __shared__ __align__(16) char memory[Pass::bytes];
  __shared__ __align__(16) char inbox[at_least_1(SegmentSync::bytes)];
  const Shooting& s = p.shooting;
  const int segments = (int)s.segments, length = (int)p.pass.in.length;
  const int own = blockIdx.x % segments, tile_number = blockIdx.x / segments;
  const Place at(tile_number);
  Boundary(s, at, tile_number, own).clear();
  SegmentSync sync(s.counters, inbox, tile_number, segments, own);
  const Weights weights(p.pass.in, at);
  const Pass pass(p.pass, at, weights, memory);
  Segment segment(s, at, length, own);
  Trajectory& trajectory = segment.trajectory;
  const int burn_in = min((int)s.burn_in, segment.span.first);
  segment.span.begin -= burn_in;
  States guess;
  if (burn_in == segment.span.first) pass.origin(guess);
  else guess.fill(constant(0));
  segment.sweep_from(pass, guess);
  segment.span.begin = segment.span.first;
  real furthest = constant(INFINITY);
  for (int round = 0;; ++round) {
    End before;
    sync.exchange(round, trajectory.last(), before);
    trajectory.measure(before);
    if (!sync.any_unfit(round, own == 0 || trajectory.follows(before, at))) {
      if (own == 0) pass.report(tile_number, round + 1, round > 0);
      return;
    }
    const Boundary boundary(s, at, tile_number, own);
    const Update update = newton_update(boundary, round, before, trajectory);
    const Channels& moved = update.moved;
    const real most = sync.furthest(round, update.furthest);
    if (most == constant(0)) {
      if (own > 0) segment.bridge_gaps(pass, at, before);
      if (own == 0) pass.report(tile_number, round + 1, true);
      return;
    }
    if (!pays(round, furthest, most) || round >= segments) {
      scalar* found = s.found + (int64)tile_number * segments * found_numbers * lanes;
      const bool bridged = own > 0 && !moved.any() && segment.bridge_gaps(pass, at, before);
      const Status status = moved.any() ? Status::moved : bridged ? Status::bridged : Status::as_it_was;
      trajectory.write(found + own * found_numbers * lanes, status);
      sync.memory_barrier();
      if (own > 0) return;
      const int sweeps = run_alone(pass, s, at, found, length);
      pass.report(tile_number, round + 1 + sweeps, true);
      return;
    }
    furthest = most;
    if (!moved.any()) continue;
    const bool few = worth_mending(moved.count(), segment.span.end - segment.span.first);
    trajectory.move(update.start, moved, !few);
    if (few) {
      segment.mend_channels(pass, at, moved, before);
    } else {
      segment.sweep_from(pass, trajectory.linear.start);
    }
  }
}

}  // namespace pararnn

// Four warps a multiprocessor are enough: twice as many leave each one all registers that it may have.
extern "C" __global__ void __launch_bounds__(32, 8)
run(const __grid_constant__ pararnn::Pass::Launch launch) {
  pararnn::run_newton(launch);
}
