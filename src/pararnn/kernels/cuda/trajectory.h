// What a warp knows of the segment that it has run, and how well it fits the one before it.
#pragma once
#include "acceptance.h"
#include "channels.h"
#include "flagged.h"

namespace pararnn {

// What became of a segment since its last sweep: nothing, its start has moved, or it has been bridged.
enum class Status { as_it_was, moved, bridged };

// What one warp that goes on alone has to know of a segment's channel.
struct Found {
  State start, end;
  Product product;
  real status;
};

static_assert(found_a_channel == numbers_in<Found> && found_numbers == per_lane * found_a_channel);

// What a segment starts from, ends at, and makes of a shift of its start.
struct Trajectory {
  States end;
  Linear linear;             // and the start
  real gain[per_lane];       // what it makes of a shift, by measure
  real next_gain[per_lane];  // of the segment that follows, by newton_update
  bool bridging = false;     // whether there are steps enough for bridges

  PARARNN_FUNCTION void measure(const End& before) {
    each<per_lane>([&](int c) { gain[c] = gain_of(linear.product[c], before.size.column(c)); });
  }

  PARARNN_FUNCTION void write(scalar* to, Status status) const {
    each<per_lane>([&](int c) {
      const Found found = {linear.start.column(c), end.column(c), linear.product[c],
                           constant((int)status)};
      scalar* own = to + c * found_a_channel * lanes + lane();
      each<found_a_channel>([&](int i) { __stcg(own + i * lanes, numbers_of(found)[i]); });
    });
  }
  PARARNN_FUNCTION Status read(const scalar* from) {
    Found found;
    each<per_lane>([&](int c) {
      const scalar* own = from + c * found_a_channel * lanes + lane();
      each<found_a_channel>([&](int i) { numbers_of(found)[i] = __ldcg(own + i * lanes); });
      linear.start.set_column(c, found.start);
      end.set_column(c, found.end);
      linear.product[c] = found.product;
    });
    return (Status)(int)found.status;
  }

  PARARNN_FUNCTION End last() const {
    End x;
    x.state = end;
    each<per_lane>([&](int c) { x.size.set_column(c, linear.product[c].sizes()); });
    return x;
  }
  // The same, where the segment follows one that ends with `before`.
  PARARNN_FUNCTION End last_after(const End& before) const {
    End x = last();
    each<per_lane>([&](int c) {
      State size = x.size.column(c);
      pass_on_sizes(linear.product[c].a, before.size.column(c), size);
      x.size.set_column(c, size);
    });
    return x;
  }

  // How far channel c of the lane starts from `wanted`.
  PARARNN_FUNCTION real distance_to(const States& wanted, const States& sizes, int c) const {
    return distance(linear.start.column(c), wanted.column(c), gain[c], sizes.column(c));
  }
  // How far it starts from where the segment before it ends.
  PARARNN_FUNCTION real gap(const End& before, int c) const {
    return distance_to(before.state, before.size, c);
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
    each<per_lane>([&](int c) { fits &= c >= at.active || gap(before, c) <= constant(1); });
    return __all_sync(~0u, fits);
  }

  // The channels with gaps that are small enough for a bridge.
  PARARNN_FUNCTION Channels gaps(const End& before, const Place& at) const {
    return channels_where([&](int c) {
      const real far = gap(before, c);
      return c < at.active && far > constant(1) && far <= longest_gap(c);
    });
  }
  // Channels that have moved start from elsewhere; where the whole segment runs again, also those that had
  // not far to go, which so need no bridge.
  PARARNN_FUNCTION void move(const States& wanted, const Channels& moved, bool whole) {
    each<per_lane>([&](int c) {
      if (moved.has(c) || (whole && bridgeable(c)))
        linear.start.set_column(c, wanted.column(c));
    });
  }
};

}  // namespace pararnn
