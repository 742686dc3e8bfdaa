// Newton's acceptance policy: when segments are one trajectory, which gaps may stay and be bridged, and when
// to give up. common/elementwise/acceptance.h has the units and the contract's bound of 8 of them for a step.
//
// Why this is not the policy of the C++ kernels: a warp runs every segment at once, and finishing a tile
// sequentially costs up to the whole loop's time. So this one goes further to accept a start (gains, bridges,
// resampled rounding) and to rerun little (mending).
#pragma once
#include "linear.h"
#include "../../common/elementwise/acceptance.h"

namespace pararnn {

constexpr bool exact = jumps && !backward;  // true if segments must meet to the bit
constexpr bool narrow_memory = !wide && !same<io, float>::value;

// Tolerance of a start, before division by its segment's gain (`gain_of`); after it, one unit at least, since
// an end is itself rounded.
// - Two units: a quarter of the bound, the rounding of one step of a loop.
// - Narrower tensors round by 2^-8 (bfloat16) or 2^-11 (float16), half their epsilon. A 64th of that bounds
//   the effect over a segment. A 64th without division by the gain violated the contract
//   (docs/negative-results.md).
// - An adjoint has no visible defect, only the accumulated error of the loop's own rounding in a channel that
//   does not forget. So the tolerance is the error of the loop's end of a segment: after 512 steps of t = g +
//   J t, with g from N(0, 1) and J from N(1, 0.02), 2 units of the largest adjoint in the median, 12 to 15 in
//   a thousandth of the channels, 13 to 21 in the worst of 4,096 (measured in float32, see
//   tests/test_acceptance.py). 16 units are a hundredth of the 2e-4 that the contract allows gradients at the
//   returned states.
constexpr real allowance = !narrow_memory                ? (backward ? 16 : 2) * unit
                           : same<io, bfloat16>::value ? (real)6.1e-5
                                                       : (real)7.6e-6;

// Returns the largest relative gain of a run of steps for a difference at its start. Each is relative to the
// size of its own state. `sizes`: the largest states before the run.
PARARNN_FUNCTION real gain_of(const Product& product, const State& sizes) {
  real gain = constant(1);
  each<entries>([&](int e) {
    const int i = e / num_states, j = e % num_states;
    const real own = product.peak[e];
    const real ratio = i == j ? constant(1) : sizes[j] / largest(sizes[i], product.size_of(i));
    gain = larger(own == constant(0) ? constant(0) : own * ratio, gain);
  });
  return gain;
}

// Returns how far a start is from `wanted`, in tolerances: above 1 is too far. `gain`: of the segment.
// `size`: of the states before it. A step that jumps must start from exactly `wanted`.
PARARNN_FUNCTION real distance(real start, real wanted, real gain, real size) {
  if (start == wanted || (isnan(start) && isnan(wanted))) return constant(0);
  const real shared = allowance * reciprocal_of(gain);
  const real allowed = (shared > unit ? shared : unit) * largest(abs(wanted), size);
  const real difference = abs(start - wanted) * reciprocal_of(largest(allowed, smallest));
  const real far = difference < constant(max_distance) ? difference : constant(max_distance);
  return exact ? largest(far, constant(not_to_the_bit)) : far;
}

PARARNN_FUNCTION real distance(const State& start, const State& wanted, real gain,
                               const State& sizes) {
  real far = constant(0);
  each<num_states>([&](int n) {
    const real own = distance(start[n], wanted[n], gain, sizes[n]);
    far = own > far ? own : far;
  });
  return far;
}

// Returns true if a shift is longer than `limit` tolerances; false if it is not finite.
PARARNN_FUNCTION bool exceeds(const State& start, const State& shift, real gain, const State& sizes,
                              real limit) {
  bool usable = true;
  each<num_states>([&](int n) { usable &= finite(shift[n]); });
  const State shifted = vec<num_states>([&](int n) { return start[n] + shift[n]; });
  return usable && distance(start, shifted, gain, sizes) > limit;
}

// Gaps that may stay. In channels that do not forget, rounding alone moves the end of a segment of some
// hundred steps by 3 to 15 units (measured), and a rerun is rounded differently; coarse cell functions slow
// Newton down. So the forward pass leaves a start unmoved if all gaps before it together would shift it by at
// most `bridge_limit` tolerances, and bridges its gap: the first `bridge_steps` steps blend into the existing ones
// (bridge.h). A gap lies between two such shifts, so it is at most twice as long. The limit is lower if this
// segment or the next one has a gain above `bridge_gain`. Errors that this allows:
// - A bridged step is off by 1/32 of the gap's effect on the steps before it. With a gain g >= 3 a gap is at
//   most 2 * 20 * 3 / g times one unit long, and g times as large later: 120 / 32 = 3.75 units of the bound
//   of 8. (Less for g < 3. Simulated with a GRU's steps: 3.75 at most.)
// - All gaps together added 10 to 30% of the contract's limit (measured). Limits on single gaps violated the
//   contract (docs/negative-results.md).
constexpr bool bridges = !backward && !events && !exact;
constexpr real bridge_limit = 20, bridge_gain = 3;
constexpr int bridge_steps = 32;

// Largest correction to skip, relative to the start tolerance, given the segment's gain.
PARARNN_FUNCTION real max_skipped_shift(real gain) {
  const real shared = bridge_limit * bridge_gain * reciprocal_of(gain);
  return shared > bridge_limit ? bridge_limit : larger(constant(1), shared);
}

// A lane's fraction of the start tolerance where lanes run consecutive steps of a segment (mend.h): two
// units, or all of it in narrow memory. The sum over lanes is held to 8 units in a channel that does not
// forget (measured, as above). Gaps that fit do not add up if a lane's gain is above `bridge_gain`.
constexpr real lane_share = narrow_memory ? constant(1) : 2 * unit / allowance;
constexpr real lane_share_of_sum = 4 * lane_share;

// Returns true if another round is worth its time, by the distance of the starts before and after this round.
// Besides progress, reasons to continue are:
// - The first two rounds: the first update changes the sizes that distances are relative to, from those of
//   one segment to those of all before.
// - Starts so near that only rounding keeps them apart. A rerun is rounded differently, so each round is
//   another sample, which fits or does not. Most come within 8 tolerances (docs/negative-results.md).
//   `patience` bounds these rounds:
// - Gain: on the CPU emulator, with `patience` 64 and all of 64 channels slow (GRU and LSTM, float32, gates
//   shifted by 8 to 12, 4,096 and 16,384 steps in 16 segments), 51 of 64 backward passes continued for this
//   reason and no forward pass did. Distances were below 3, and the tile fitted at round 3 (20 times), 4
//   (17), 5 (9), 6 (2) or 7 (3). None gave up, and none would have with 7.
// - Cost: a round runs at most one segment's steps, and giving up runs those of all W. `auto` splits time
//   from 6 segments on (engines/rule.py), so 8 rounds without result take at most 4/3 of the loop's time.
constexpr real near_limit = bridges ? 8 * bridge_limit : 8;
constexpr int first_rounds = 2, patience = 8;

PARARNN_FUNCTION bool worth_another_round(int round, real last, real now) {
  return now <= enough_progress * last || round < first_rounds ||
         (now < near_limit && round < patience);
}

}  // namespace pararnn
