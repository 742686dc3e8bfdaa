// Functions that all targets define alike, in terms of the target's constant, select, abs, isnan, fmod, ...
// Included at the end of a target's functions.h.
#pragma once

namespace pararnn {

// NaN passes through at_least and at_most, because it compares false.
PARARNN_FUNCTION real at_least(real x, real low) { return select(x < low, low, x); }
PARARNN_FUNCTION real at_most(real x, real high) { return select(x > high, high, x); }
PARARNN_FUNCTION real maximum(real a, real b) { return select((b > a) | isnan(b), b, a); }
PARARNN_FUNCTION real minimum(real a, real b) { return select((b < a) | isnan(b), b, a); }
PARARNN_FUNCTION real fmax(real a, real b) { return select((b > a) | isnan(a), b, a); }
PARARNN_FUNCTION real fmin(real a, real b) { return select((b < a) | isnan(a), b, a); }
PARARNN_FUNCTION real sign(real x) { return number(x > constant(0)) - number(x < constant(0)); }
PARARNN_FUNCTION real product(real a, real b, real c) { return (a * b) * c; }  // c is on the critical path
PARARNN_FUNCTION real relu(real x) { return at_least(x, constant(0)); }

// How reductions combine two numbers.
struct Sum { PARARNN_FUNCTION static real of(real a, real b) { return a + b; } };
struct Max { PARARNN_FUNCTION static real of(real a, real b) { return maximum(a, b); } };
struct Min { PARARNN_FUNCTION static real of(real a, real b) { return minimum(a, b); } };

// Interpolates from the nearer end, as PyTorch does: exact at both ends.
PARARNN_FUNCTION real lerp(real a, real b, real weight) {
  return select(abs(weight) < constant(0.5), a + weight * (b - a),
                b - (b - a) * (constant(1) - weight));
}

// The result has the divisor's sign, as in Python.
PARARNN_FUNCTION real remainder(real a, real b) {
  const real r = fmod(a, b);
  return select((r != constant(0)) & ((r < constant(0)) != (b < constant(0))), r + b, r);
}

PARARNN_FUNCTION real floor_divide(real a, real b) {
  const real remainder = fmod(a, b);
  const mask crosses = (remainder != constant(0)) & ((remainder < constant(0)) != (b < constant(0)));
  const real quotient = (a - remainder) / b - number(crosses);
  const real below = floor(quotient);
  const real nearest = select(quotient - below > constant(0.5), below + constant(1), below);
  return select(b == constant(0), a / b,
                select(quotient == constant(0), with_sign(constant(0), a / b), nearest));
}

}  // namespace pararnn
