// The functions that generated code calls, on `real`: CUDA's own, but for sigmoid and tanh.
// Needs PARARNN_APPROXIMATE (0 or 1): whether the type in memory hides the error of the hardware's
// tanh (1e-5, where it was measured; 5e-4 at most).
// PARARNN_REFINED (0 or 1): whether sigmoid spends two operations more on its last bit.
#pragma once
#include "real.h"

namespace pararnn {

#define PARARNN_BY_CUDA(name)                                        \
  PARARNN_FUNCTION real name(real x) {                               \
    if constexpr (wide) return (real)::name((double)x);              \
    else return (real)::name##f((float)x);                           \
  }
#define PARARNN_BY_CUDA_2(name)                                      \
  PARARNN_FUNCTION real name(real a, real b) {                       \
    if constexpr (wide) return (real)::name((double)a, (double)b);   \
    else return (real)::name##f((float)a, (float)b);                 \
  }

PARARNN_BY_CUDA(sqrt)
PARARNN_BY_CUDA(floor)
PARARNN_BY_CUDA(ceil)
PARARNN_BY_CUDA(trunc)
PARARNN_BY_CUDA(exp)
PARARNN_BY_CUDA(exp2)
PARARNN_BY_CUDA(expm1)
PARARNN_BY_CUDA(log)
PARARNN_BY_CUDA(log2)
PARARNN_BY_CUDA(log10)
PARARNN_BY_CUDA(log1p)
PARARNN_BY_CUDA(sin)
PARARNN_BY_CUDA(cos)
PARARNN_BY_CUDA(tan)
PARARNN_BY_CUDA(asin)
PARARNN_BY_CUDA(acos)
PARARNN_BY_CUDA(atan)
PARARNN_BY_CUDA(sinh)
PARARNN_BY_CUDA(cosh)
PARARNN_BY_CUDA(asinh)
PARARNN_BY_CUDA(acosh)
PARARNN_BY_CUDA(atanh)
PARARNN_BY_CUDA(erf)
PARARNN_BY_CUDA(erfc)
PARARNN_BY_CUDA_2(pow)
PARARNN_BY_CUDA_2(atan2)
PARARNN_BY_CUDA_2(hypot)
PARARNN_BY_CUDA_2(fmod)

#undef PARARNN_BY_CUDA
#undef PARARNN_BY_CUDA_2

PARARNN_FUNCTION real round(real x) { return wide ? (real)::rint((double)x) : (real)::rintf((float)x); }
PARARNN_FUNCTION mask isnan(real x) { return x != x; }
PARARNN_FUNCTION real abs(real x) { return wide ? (real)::fabs((double)x) : (real)::fabsf((float)x); }
PARARNN_FUNCTION mask isinf(real x) { return abs(x) == constant(INFINITY); }
PARARNN_FUNCTION real with_sign(real magnitude, real sign) {
  return wide ? (real)::copysign((double)magnitude, (double)sign)
              : (real)::copysignf((float)magnitude, (float)sign);
}
PARARNN_FUNCTION mask signbit(real x) { return with_sign(constant(1), x) < constant(0); }

// Rounded to nearest; `/` is within two units in the last place.
PARARNN_FUNCTION real quotient(real a, real b) {
  return wide ? (real)::__ddiv_rn((double)a, (double)b) : (real)::__fdiv_rn((float)a, (float)b);
}

constexpr float log2_e = 1.4426950408889634f;

PARARNN_FUNCTION real sigmoid(real x) {
  if constexpr (wide) return 1.0 / (1.0 + ::exp(-(double)x));
  else if constexpr (!PARARNN_REFINED) return fast_reciprocal(1.0f + fast_exp2((float)x * -log2_e));
  else {
    // Next to 1 the last bit is most of 1 - sigmoid(x), on which gradients depend: a Newton step. It
    // would make NaN of infinity, so the power stays finite; from 2^127 on its reciprocal is flushed to 0.
    const float y = 1.0f + fast_exp2(least((float)x * -log2_e, 127.5f));
    const float guess = fast_reciprocal(y);
    return ::fmaf(guess, ::fmaf(-y, guess, 1.0f), guess);
  }
}

PARARNN_FUNCTION real tanh(real x) {
  if constexpr (wide) {
    return ::tanh((double)x);
  } else if constexpr (PARARNN_APPROXIMATE) {
    return fast_tanh((float)x);
  } else {
    // 1 - 2 / (1 + exp(2|x|)) loses the last bits next to zero: there a polynomial, right to 1.2e-8.
    // Sign and choice are made before the reciprocal is known, which is last.
    const float y = (float)x, z = y * y, unit = ::copysignf(1.0f, y);
    const float near = ((-0.0503722718f * z + 0.1331490779f) * z - 0.3333306292f) * (y * z) + y;
    const bool small = ::fabsf(y) < 0.3f;
    const float reciprocal = fast_reciprocal(1.0f + fast_exp2(::fabsf(y) * (2.0f * log2_e)));
    return ::fmaf(small ? 0.0f : -2.0f * unit, reciprocal, small ? near : unit);
  }
}

}  // namespace pararnn

#include "../common/functions.h"
