// The policy of acceptance: when segments are one trajectory, which gaps between them may stay and be bridged, and
// when Newton gives up. Units, and the contract's bound of 8 of them for a step, are those of common/acceptance.h.
#pragma once
#include "linear.h"
#include "../common/acceptance.h"

namespace pararnn {

constexpr bool exact = jumps && !backward;  // whether segments have to meet to the bit
constexpr bool narrow_memory = !wide && !same<io, float>::value;

// What a start may be off, over what its own segment makes of the difference (`gain_of`), and one unit at least,
// since an end is itself rounded.
// - Two units: a quarter of the bound, as any step of a loop is rounded by.
// - Narrower tensors round by 2^-8 (bfloat16) or 2^-11 (float16), half their epsilon: a 64th of that, which bounds what
//   a segment makes of it. 64ths that were not divided by the gain left the contract (docs/negative-results.md).
// - An adjoint has no defect that anybody sees, only the error of the loop's own rounding, which adds up in a channel
//   that does not forget. So a start may be off by what the loop's end of a segment is off anyway: after 512 steps of
//   t = g + J t, with g from N(0, 1) and J from N(1, 0.02), 2 units of the largest adjoint in the median, 12 to 15 in a
//   thousandth of the channels, 13 to 21 in the worst of 4,096 (measured in float32, see tests/test_acceptance.py). 16 units
//   are a hundredth of the 2e-4 that the contract allows gradients at the returned states.
constexpr real allowance = !narrow_memory                ? (backward ? 16 : 2) * unit
                           : same<io, bfloat16>::value ? (real)6.1e-5
                                                       : (real)7.6e-6;

// What a run of steps makes of a difference at its start, at most, each over the size of its own state.
// `sizes`: those before it.
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

// How far a start is from where it belongs, over what it may: above 1 is too far. `gain`: what its run of
// steps makes of the difference. `size`: of the states before it. A step that jumps is to take just that.
PARARNN_FUNCTION real distance(real start, real wanted, real gain, real size) {
  if (start == wanted || (isnan(start) && isnan(wanted))) return constant(0);
  const real shared = allowance * reciprocal_of(gain);
  const real allowed = (shared > unit ? shared : unit) * largest(abs(wanted), size);
  const real apart = abs(start - wanted) * reciprocal_of(largest(allowed, smallest));
  const real far = apart < constant(farthest) ? apart : constant(farthest);
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

// What follows from a shift: whether it is further than `limit`; not if it is no number.
PARARNN_FUNCTION bool too_far(const State& start, const State& shift, real gain, const State& sizes,
                              real limit) {
  bool usable = true;
  each<num_states>([&](int n) { usable &= finite(shift[n]); });
  const State shifted = vec<num_states>([&](int n) { return start[n] + shift[n]; });
  return usable && distance(start, shifted, gain, sizes) > limit;
}

// Where channels do not forget, rounding alone moves the end of a segment of some hundred steps by 3 to 15 units
// (measured), and every rerun is rounded otherwise; coarse cell functions make Newton creep. So there the forward pass
// lets a start stay where all gaps before it would shift it by `bridged` times what it may be off together, and bridges
// its gap: the first `bridge_steps` steps fade into those that stand, see bridge.h. A gap lies between two such shifts,
// so it is twice as long at most. Less is small where a segment, or the next one, makes more than `bridged_gain` of a
// shift. The error that this allows:
// - A bridged step is off by a 32nd of what the steps before it have made of the gap. With a gain g >= 3 a gap is at
//   most 2 * 20 * 3 / g times one unit long, and g times as large later: 120 / 32 = 3.75 units of the bound of 8.
//   (Below 3 it is less. Simulated with a GRU's steps: 3.75 at most.)
// - What the gaps add up to was 10 to 30% of the contract's limit (measured); limits on single gaps left the contract
//   (docs/negative-results.md).
constexpr bool bridges = !backward && !events && !exact;
constexpr real bridged = 20, bridged_gain = 3;
constexpr int bridge_steps = 32;

// How large a shift may be that is not made, over what a start may be off, by what is made of it.
PARARNN_FUNCTION real small_shift(real gain) {
  const real shared = bridged * bridged_gain * reciprocal_of(gain);
  return shared > bridged ? bridged : larger(constant(1), shared);
}

// Of what a segment's start may be off, what a lane's may where lanes run parts of a segment, see mend.h: two units,
// or in narrow memory all of it. What all of them add up to is held to 8 units where a channel does not
// forget (measured, as above); gaps that fit do not add up where a lane makes more than `bridged_gain` of one.
constexpr real lane_share = narrow_memory ? constant(1) : 2 * unit / allowance;
constexpr real lane_share_of_sum = 4 * lane_share;

// Whether another round pays, by how far the starts were before a round and are after it. Besides progress:
// - In the first two rounds, as the first update changes what distances are measured by: from the sizes of one segment
//   to those of all before.
// - While starts are so near that it is rounding which keeps them apart, as what has run again is rounded
//   otherwise: each such round is another sample, which fits or does not. Most come within 8 times what is allowed
//   (docs/negative-results.md). `patience` bounds the rounds, by two things:
//   - What they gain. On the CPU emulator, with `patience` 64 and all of 64 channels slow (GRU and LSTM, float32, gates
//     shifted by 8 to 12, 4,096 and 16,384 steps in 16 segments), 51 of 64 backward passes went on by it and none
//     forward: distances were below 3, and the tile fitted at round 3 (20 times), 4 (17), 5 (9), 6 (2) or 7 (3). None
//     gave up, and none would have with 7.
//   - What they cost. A round runs one segment's steps at most, and giving up runs those of all W. `auto` cuts time
//     from 6 segments on (engines/rule.py), so 8 rounds that lead nowhere take 4/3 of the loop's time at most.
constexpr real near_enough = bridges ? 8 * bridged : 8;
constexpr int first_rounds = 2, patience = 8;

PARARNN_FUNCTION bool pays(int round, real before, real after) {
  return after <= enough_progress * before || round < first_rounds ||
         (after < near_enough && round < patience);
}

}  // namespace pararnn
