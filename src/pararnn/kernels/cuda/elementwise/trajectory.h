// A warp's knowledge of its segment, and how well the segment fits the one before it.
#pragma once
#include "acceptance.h"
#include "channels.h"
#include "flagged.h"

namespace pararnn {

// State of a segment since its last sweep: unchanged, its start moved, or bridged.
enum class Status { unchanged, moved, bridged };

// A segment's channel, for the warp that finishes sequentially.
struct SegmentChannel {
  State start, end;
  Product product;
  real status;
};

static_assert(found_a_channel == numbers_in<SegmentChannel> && found_numbers == per_lane * found_a_channel);

// Start, end and gain of a segment.
struct Trajectory {
  States end;
  Linear linear;             // has the start
  real gain[per_lane];       // largest gain for a shift of the start
  real next_gain[per_lane];  // of the next segment, by newton_update
  bool bridging = false;     // true if there are enough steps for bridges

  PARARNN_FUNCTION void measure(const End& previous) {
    each<per_lane>([&](int c) { gain[c] = gain_of(linear.product[c], previous.size.column(c)); });
  }

  PARARNN_FUNCTION void write(scalar* target, Status status) const {
    each<per_lane>([&](int c) {
      const SegmentChannel record = {linear.start.column(c), end.column(c), linear.product[c],
                                     constant((int)status)};
      scalar* own = target + c * found_a_channel * lanes + lane();
      each<found_a_channel>([&](int i) { __stcg(own + i * lanes, numbers_of(record)[i]); });
    });
  }
  PARARNN_FUNCTION Status read(const scalar* source) {
    SegmentChannel record;
    each<per_lane>([&](int c) {
      const scalar* own = source + c * found_a_channel * lanes + lane();
      each<found_a_channel>([&](int i) { numbers_of(record)[i] = __ldcg(own + i * lanes); });
      linear.start.set_column(c, record.start);
      end.set_column(c, record.end);
      linear.product[c] = record.product;
    });
    return (Status)(int)record.status;
  }

  PARARNN_FUNCTION End last() const {
    End x;
    x.state = end;
    each<per_lane>([&](int c) { x.size.set_column(c, linear.product[c].sizes()); });
    return x;
  }
  // The same for a segment after states of these sizes.
  PARARNN_FUNCTION End last_after(const States& sizes) const {
    End x = last();
    each<per_lane>([&](int c) {
      State size = x.size.column(c);
      pass_on_sizes(linear.product[c].a, sizes.column(c), size);
      x.size.set_column(c, size);
    });
    return x;
  }

  // Distance of channel c's start from `wanted`.
  PARARNN_FUNCTION real distance_to(const States& wanted, const States& sizes, int c) const {
    return distance(linear.start.column(c), wanted.column(c), gain[c], sizes.column(c));
  }
  // Distance of the start from the end of the segment before.
  PARARNN_FUNCTION real gap(const End& previous, int c) const {
    return distance_to(previous.state, previous.size, c);
  }
  // True if a gap may stay and be bridged.
  PARARNN_FUNCTION bool bridgeable(int c) const {
    return bridging && max_skipped_shift(gain[c]) > constant(1);
  }
  // Longest gap: the two shifts that it lies between.
  PARARNN_FUNCTION real longest_gap(int c) const {
    return bridgeable(c) ? 2 * max_skipped_shift(gain[c]) : constant(1);
  }
  // Largest shift to skip.
  PARARNN_FUNCTION real limit(int c) const {
    return bridgeable(c) ? max_skipped_shift(larger(next_gain[c], gain[c])) : constant(1);
  }
  PARARNN_FUNCTION bool follows(const End& previous, const Tile& tile) const {
    bool fits = true;
    each<per_lane>([&](int c) { fits &= c >= tile.active || gap(previous, c) <= constant(1); });
    return __all_sync(~0u, fits);
  }

  // Channels whose gaps are small enough for a bridge.
  PARARNN_FUNCTION Channels gaps(const End& previous, const Tile& tile) const {
    return channels_where([&](int c) {
      const real far = gap(previous, c);
      return c < tile.active && far > constant(1) && far <= longest_gap(c);
    });
  }
  // Moves starts: those in `moved`, and if the whole segment runs again all bridgeable ones, which then need
  // no bridge.
  PARARNN_FUNCTION void move(const States& wanted, const Channels& moved, bool whole) {
    each<per_lane>([&](int c) {
      if (moved.has(c) || (whole && bridgeable(c)))
        linear.start.set_column(c, wanted.column(c));
    });
  }
};

}  // namespace pararnn
