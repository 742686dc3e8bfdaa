// What all targets hold the starts of segments to. What a start may be off is a number of units over the largest
// state of its channel so far: no state has an absolute size.
//
// The contract (docs/numerics-contract.md) allows a step a defect of 8 epsilons of that. Where a segment starts d
// away from where the one before it ends, the states that are returned have a defect of |J| d there, J being the
// Jacobian of the segment's first step.
#pragma once

namespace pararnn {

// An epsilon, 2^-23 or 2^-52, in two digits: as far as two neighbours are apart at most, over their size.
constexpr scalar unit = wide ? (scalar)2.2e-16 : (scalar)1.2e-7;
// The smallest normal number: below it rounding has a unit of its own.
constexpr scalar smallest = wide ? (scalar)2.3e-308 : (scalar)1.2e-38;

// Distances are over what is allowed: above 1 is too far. They are held finite, so that they compare and those that
// are not numbers count as far.
constexpr double farthest = 1e30;
// What any difference counts as where segments have to meet to the bit: more than 1.
constexpr double not_to_the_bit = 1.5;

// Newton goes on while a round brings the starts this much nearer. It converges by squares where it does at all: one
// that comes near more slowly is not on its way. A start that is off by a whole state is 2^22 times what is allowed
// away in float32, so halving ends within 22 rounds.
constexpr scalar enough_progress = 0.5;

}  // namespace pararnn
