// Constants of the acceptance test for segment starts, shared by all targets. A tolerance is a number of
// units times the largest state of the channel so far: no state has an absolute size.
//
// The contract (docs/numerics.md) allows a step a defect of 8 epsilons of that. If a segment starts
// d away from the end of the one before, the returned states have a defect of |J| d there. J is the Jacobian
// of the segment's first step.
#pragma once

namespace pararnn {

// Epsilon, 2^-23 or 2^-52, rounded to two digits: the largest relative distance between two neighbouring
// numbers.
constexpr scalar unit = wide ? (scalar)2.2e-16 : (scalar)1.2e-7;
// The smallest normal number. Below it the rounding unit is absolute.
constexpr scalar smallest = wide ? (scalar)2.3e-308 : (scalar)1.2e-38;

// Cap on distances, which are in units of the tolerance: above 1 does not fit. Finite, so that distances
// compare; NaN counts as this far.
constexpr double max_distance = 1e30;
// Distance of any difference if segments must meet to the bit: above 1.
constexpr double not_to_the_bit = 1.5;

// Newton continues while a round reduces the distance by this factor. It converges quadratically or not at
// all, so slower progress means that it will not converge. A start that is off by a whole state is 2^22
// tolerances away in float32: halving ends within 22 rounds.
constexpr scalar enough_progress = 0.5;

}  // namespace pararnn
