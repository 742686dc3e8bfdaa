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

  PARARNN_FUNCTION Segment(const Shooting& s, const Tile& tile, int length, int w) {
    go_to(s, tile, length, w);
    trajectory.bridging = bridges && span.end - span.first > bridge_steps;
  }

  PARARNN_FUNCTION void go_to(const Shooting& s, const Tile& tile, int length, int w) {
    const int first = w * (int)s.size;
    span = {first, first, min(first + (int)s.size, length)};
    slot = tile.row * s.segments + w;
  }

  // Starts from `trajectory.end`.
  PARARNN_FUNCTION void sweep(const Pass& pass) {
    pass.sweep(span, trajectory.end, trajectory.linear, slot);
    span.begin = span.first;
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

// The run of one warp from the first segment on that moved: those before it are exact. The sizes of the
// segments before the next one are where the first segment's record was: registers are few.
struct Rest {
  scalar* const records;  // of the tile's segments
  const int segments;
  int w = 0;  // the next segment

  // Goes past a segment, and reads the next one in its place; false at the end.
  PARARNN_FUNCTION bool pass(Trajectory& trajectory, States& sizes, End& last, Status& status) {
    last = trajectory.last_after(sizes);
    sizes = last.size;
    if (++w == segments) return false;
    status = trajectory.read(records + w * found_numbers * lanes);
    return true;
  }
  PARARNN_FUNCTION scalar* kept(int n, int c) const {
    return records + (n * per_lane + c) * lanes + lane();
  }
  PARARNN_FUNCTION void keep(const States& sizes) const {
    each<num_states>([&](int n) { each<per_lane>([&](int c) { __stcg(kept(n, c), sizes[n][c]); }); });
  }
  // Goes to the first segment that moved, which is not the first of all; false if none did. `state`: the end
  // before it.
  PARARNN_FUNCTION bool find_first(States& state) {
    Trajectory trajectory;
    States sizes;
    sizes.fill(constant(0));
    End last;
    for (Status status = trajectory.read(records); status != Status::moved;)
      if (!pass(trajectory, sizes, last, status)) return false;
    keep(sizes);
    state = last.state;
    return true;
  }
  // Goes past the segment that has run, and those that fit unchanged; false at the end.
  PARARNN_FUNCTION bool find_next(Trajectory trajectory, const Tile& tile, States& state) {
    States sizes;
    each<num_states>([&](int n) { each<per_lane>([&](int c) { sizes[n][c] = __ldcg(kept(n, c)); }); });
    End last;
    Status status;
    do {
      if (!pass(trajectory, sizes, last, status)) return false;
      trajectory.measure(last);
    } while (status == Status::unchanged && trajectory.follows(last, tile));
    keep(sizes);
    state = last.state;
    return true;
  }
};

// A sweep is most of the code: it stands once for the first round, where registers are few, and once for the
// next ones and the rest.
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
  if (burn_in == segment.span.first) pass.origin(trajectory.end);
  else trajectory.end.fill(constant(0));
  Rest rest{s.found + (int64)tile_number * segments * found_numbers * lanes, segments};
  segment.sweep(pass);
  bool sweeps = false, alone = false;
  real furthest = constant(INFINITY);
#pragma unroll 1
  for (int round = 0;;) {
    if (sweeps) segment.sweep(pass);
    if (alone) {
      ++round;
      if (!rest.find_next(trajectory, tile, trajectory.end)) {
        pass.report(tile_number, round + 1, true);
        return;
      }
      segment.go_to(s, tile, length, rest.w);
      continue;
    }
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
    const bool settled = most == constant(0);
    if (settled || !worth_another_round(round, furthest, most) || round >= segments) {
      const bool has_bridges = own > 0 && !moved.any() && segment.bridge_gaps(pass, tile, previous);
      if (!settled) {
        const Status status =
            moved.any() ? Status::moved : has_bridges ? Status::bridged : Status::unchanged;
        trajectory.write(rest.records + own * found_numbers * lanes, status);
        sync.memory_barrier();
      }
      if (own > 0) return;
      if (settled || !rest.find_first(trajectory.end)) {
        pass.report(tile_number, round + 1, true);
        return;
      }
      segment.go_to(s, tile, length, rest.w);
      sweeps = alone = true;
      continue;
    }
    furthest = most;
    ++round;
    sweeps = false;
    if (!moved.any()) continue;
    const bool few = worth_mending(moved.count(), segment.span.end - segment.span.first);
    trajectory.move(update.start, moved, !few);
    if (few) segment.mend_channels(pass, tile, moved, previous);
    else trajectory.end = trajectory.linear.start;
    sweeps = !few;
  }
}

}  // namespace pararnn

// Four warps per multiprocessor are enough: 8 here leave each one all registers that it may have.
extern "C" __global__ void __launch_bounds__(32, 8)
run(const __grid_constant__ pararnn::Pass::Launch launch) {
  pararnn::run_newton(launch);
}
