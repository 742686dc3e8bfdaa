// Multiple shooting. Time is split into segments, one warp each; the unknowns are the states at their starts.
// 1. A first sweep runs every segment from a guess: the state after a burn-in from zero. If every segment
//    ends where the next one starts, to rounding, the segments of a tile are one trajectory, and the tile is
//    done.
// 2. Otherwise Newton moves the starts, by the product of Jacobians that each segment has accumulated. The
//    segments that moved run again, or only the channels that moved.
// Every round makes at least one more segment exact. If Newton does not converge, one warp runs the rest one
// step after the other. The backward pass does the same on a linear recurrence.
//
// The segments of a tile synchronise after each sweep. Decisions depend on values only, and all segments
// decide alike.
//
// Reading order: registers.h, ring.h, problem.h and forward.h, a sweep; linear.h, its derivatives;
// acceptance.h and trajectory.h, whether segments fit; sync_grid.h, synchronisation; lookback.h and
// boundaries.h, the next starts; mend.h and bridge.h, reruns.
#pragma once
#include "boundaries.h"
#include "bridge.h"
#include "mend.h"

namespace pararnn {

// A warp's own segment.
struct Segment {
  Span span;
  int64 slot;
  Trajectory trajectory;

  PARARNN_FUNCTION Segment(const Shooting& s, const Tile& tile, int length, int w)
      : span{w * (int)s.size, w * (int)s.size, min((w + 1) * (int)s.size, length)},
        slot(tile.row * s.segments + w) {
    trajectory.bridging = bridges && span.end - span.first > bridge_steps;
  }

  PARARNN_FUNCTION void sweep_from(const Pass& pass, const States& state) {
    trajectory.end = state;
    pass.sweep(span, trajectory.end, trajectory.linear, slot);
  }

  // Returns true if there were gaps.
  template <class AnyPass>
  PARARNN_FUNCTION bool bridge_gaps(const AnyPass& pass, const Tile& tile, const End& previous) const {
    if constexpr (bridges) {
      const Channels some = trajectory.gaps(previous, tile);
      bridge_channels(pass, tile, some, span.first, previous);
      return some.any();
    }
    return false;
  }

  // Runs some channels again.
  PARARNN_FUNCTION void mend_channels(const Pass& pass, const Tile& tile, const Channels& some,
                                      const End& previous) {
    const int count = some.count();
    for (int k = 0; k < count; ++k) {
      const int index = some.nth(k);
      State state = channel_states(trajectory.linear.start, index);
      Product product;
      mend(pass, tile.first + index, span, slot, channel_states(previous.size, index), state, product);
      each<per_lane>([&](int c) {
        if (lane() * per_lane + c != index) return;
        trajectory.end.set_column(c, state);
        trajectory.linear.product[c] = product;
      });
    }
  }
};

// One warp runs the rest, from the first segment on that moved: those before it are exact. Returns the number
// of segments it ran.
PARARNN_FUNCTION int run_sequentially(const Pass& pass, const Shooting& s, const Tile& tile,
                                      const scalar* records, int length) {
  const int segments = (int)s.segments;
  const auto status_of = [&](Trajectory& own, int w) {
    return own.read(records + w * found_numbers * lanes);
  };
  Trajectory trajectory;
  End last;
  last.size.fill(constant(0));
  int w = 0;
  for (Status own = status_of(trajectory, 0); own != Status::moved; own = status_of(trajectory, w)) {
    last = trajectory.last_after(last);
    if (++w == segments) return 0;
  }
  int ran = 0;
  for (; w < segments; ++ran) {
    Segment segment(s, tile, length, w);
    segment.sweep_from(pass, last.state);
    trajectory = segment.trajectory;
    bool fits = true;  // skips segments that fit unchanged
    while (fits) {
      last = trajectory.last_after(last);
      if (++w == segments) return ran + 1;
      fits = status_of(trajectory, w) == Status::unchanged;
      trajectory.measure(last);
      fits = fits && trajectory.follows(last, tile);
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
  const Tile tile(tile_number);
  Boundary(s, tile, tile_number, own).clear();
  SegmentSync sync(s.counters, inbox, tile_number, segments, own);
  const Weights weights(p.pass.in, tile);
  const Pass pass(p.pass, tile, weights, memory);
  Segment segment(s, tile, length, own);
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
    End previous;
    sync.exchange(round, trajectory.last(), previous);
    trajectory.measure(previous);
    if (!sync.any_unfit(round, own == 0 || trajectory.follows(previous, tile))) {
      if (own == 0) pass.report(tile_number, round + 1, round > 0);
      return;
    }
    const Boundary boundary(s, tile, tile_number, own);
    const Update update = newton_update(boundary, round, previous, trajectory);
    const Channels& moved = update.moved;
    const real most = sync.furthest(round, update.furthest);
    if (most == constant(0)) {
      if (own > 0) segment.bridge_gaps(pass, tile, previous);
      if (own == 0) pass.report(tile_number, round + 1, true);
      return;
    }
    if (!worth_another_round(round, furthest, most) || round >= segments) {
      scalar* records = s.found + (int64)tile_number * segments * found_numbers * lanes;
      const bool has_bridges = own > 0 && !moved.any() && segment.bridge_gaps(pass, tile, previous);
      const Status status = moved.any() ? Status::moved : has_bridges ? Status::bridged : Status::unchanged;
      trajectory.write(records + own * found_numbers * lanes, status);
      sync.memory_barrier();
      if (own > 0) return;
      const int sweeps = run_sequentially(pass, s, tile, records, length);
      pass.report(tile_number, round + 1 + sweeps, true);
      return;
    }
    furthest = most;
    if (!moved.any()) continue;
    const bool few = worth_mending(moved.count(), segment.span.end - segment.span.first);
    trajectory.move(update.start, moved, !few);
    if (few) {
      segment.mend_channels(pass, tile, moved, previous);
    } else {
      segment.sweep_from(pass, trajectory.linear.start);
    }
  }
}

}  // namespace pararnn

// Four warps per multiprocessor are enough: 8 here leave each one all registers that it may have.
extern "C" __global__ void __launch_bounds__(32, 8)
run(const __grid_constant__ pararnn::Pass::Launch launch) {
  pararnn::run_newton(launch);
}
