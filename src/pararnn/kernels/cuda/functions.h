// The functions that generated code calls, on `real`: CUDA's own, except those on cells' critical paths.
// Needs PARARNN_APPROXIMATE (0 or 1): 1 if the type in memory hides the error of the hardware's tanh (1e-5,
// where it was measured; 5e-4 at most), and relative ones of 1e-4 in exp and log1p.
// PARARNN_REFINED (0 or 1): 1 if sigmoid spends two more operations on its last bit.
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
PARARNN_BY_CUDA(exp2)
PARARNN_BY_CUDA(expm1)
PARARNN_BY_CUDA(log)
PARARNN_BY_CUDA(log2)
PARARNN_BY_CUDA(log10)
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

constexpr float log2_e = 1.4426950408889634f, log2_e_rest = 1.925963033e-8f, ln_2 = 0.6931471806f;

PARARNN_FUNCTION real exp(real x) {
  if constexpr (wide) return (real)::exp((double)x);
  else if constexpr (PARARNN_APPROXIMATE) return fast_exp2((float)x * log2_e);
  else return (real)::expf((float)x);
}

PARARNN_FUNCTION real log1p(real x) {
  if constexpr (wide) {
    return (real)::log1p((double)x);
  } else if constexpr (PARARNN_APPROXIMATE) {
    // The logarithm is accurate to 2^-22, which leaves few digits near zero: two terms of the series there.
    const float y = (float)x, near = ::fmaf(-0.5f * y, y, y);
    return ::fabsf(y) < 0x1p-8f ? near : fast_log2(1.0f + y) * ln_2;
  } else {
    return (real)::log1pf((float)x);
  }
}

// log1p(exp(-a)) for a >= 0, as in log-sum-exp.
PARARNN_FUNCTION real softplus_of_minus(real a) {
  if constexpr (wide || PARARNN_APPROXIMATE) {
    return log1p(exp(-a));
  } else {
    // The rounding error of the product by log2(e) grows with a: it is added back after the power. log1p on
    // [0, 1] is a polynomial, accurate to 1.2 units in the last place.
    const float x = -least((float)a, 128.0f), scaled = x * log2_e;
    const float rest = ::fmaf(x, log2_e_rest, ::fmaf(x, log2_e, -scaled)) * ln_2;
    const float power = fast_exp2(scaled), e = ::fmaf(power, rest, power), e2 = e * e, e4 = e2 * e2;
    const float q0 = ::fmaf(0.3332996368f, e, -0.4999990165f);
    const float q1 = ::fmaf(0.1967593133f, e, -0.2495413274f);
    const float q2 = ::fmaf(0.1060361713f, e, -0.1530556977f);
    const float q3 = ::fmaf(0.0198512618f, e, -0.0569591597f);
    const float high = ::fmaf(-0.0032439807f, e4, ::fmaf(q3, e2, q2));
    return ::fmaf(::fmaf(high, e4, ::fmaf(q1, e2, q0)), e2, e);
  }
}

PARARNN_FUNCTION real sigmoid(real x) {
  if constexpr (wide) return 1.0 / (1.0 + ::exp(-(double)x));
  else if constexpr (!PARARNN_REFINED) return fast_reciprocal(1.0f + fast_exp2((float)x * -log2_e));
  else {
    // Near 1 the last bit is most of 1 - sigmoid(x), which gradients depend on: one Newton step. It would
    // turn infinity into NaN, so the power stays finite; from 2^127 on its reciprocal is flushed to 0.
    const float y = 1.0f + fast_exp2(least((float)x * -log2_e, 127.5f));
    const float guess = fast_reciprocal(y);
    return ::fmaf(guess, ::fmaf(-y, guess, 1.0f), guess);
  }
}

// sigmoid(a b + c) with b on the critical path: the scale of the sum is applied to a and c, ahead of b.
PARARNN_FUNCTION real sigmoid_of_sum(real a, real b, real c) {
  if constexpr (wide || PARARNN_REFINED) return sigmoid(multiply_add(a, b, c));
  else return fast_reciprocal(1.0f + fast_exp2(::fmaf((float)a * -log2_e, (float)b, (float)c * -log2_e)));
}

PARARNN_FUNCTION real tanh(real x) {
  if constexpr (wide) {
    return ::tanh((double)x);
  } else if constexpr (PARARNN_APPROXIMATE) {
    return fast_tanh((float)x);
  } else {
    // 1 - 2 / (1 + exp(2|x|)) loses the last bits near zero: a polynomial there, accurate to 1.2e-8. Sign and
    // branch are computed before the reciprocal, which is on the critical path.
    const float y = (float)x, z = y * y, unit = ::copysignf(1.0f, y);
    const float near = ((-0.0503722718f * z + 0.1331490779f) * z - 0.3333306292f) * (y * z) + y;
    const bool small = ::fabsf(y) < 0.3f;
    const float reciprocal = fast_reciprocal(1.0f + fast_exp2(::fabsf(y) * (2.0f * log2_e)));
    return ::fmaf(small ? 0.0f : -2.0f * unit, reciprocal, small ? near : unit);
  }
}

}  // namespace pararnn

#include "../common/functions.h"
