// The functions that generated code calls, on `real`. Those of most cells are written out and vectorise; the
// others call the C library lane by lane. Errors are a few units in the last place.
#pragma once
#include "real.h"

namespace pararnn {

constexpr int mantissa_bits = wide ? 52 : 23;
constexpr integer exponent_bias = wide ? 1023 : 127;
constexpr double ln2_high = wide ? 0x1.62e42feep-1 : 0x1.62e4p-1;  // n * ln2_high is exact
constexpr double ln2_low = wide ? 0x1.a39ef35793c76p-33 : 0x1.7f7d1cf79abcap-20;
constexpr scalar infinity = std::numeric_limits<scalar>::infinity();
constexpr scalar not_a_number = std::numeric_limits<scalar>::quiet_NaN();

inline mask isnan(real x) { return x != x; }
inline real sign_bit(real x) { return (real)((whole)x & (whole)constant(-0.0)); }
inline real abs(real x) { return (real)((whole)x & ~(whole)constant(-0.0)); }
inline real with_sign(real magnitude, real sign) {
  return (real)((whole)abs(magnitude) | (whole)sign_bit(sign));
}
inline mask signbit(real x) { return (mask)((whole)x < 0); }
inline mask isinf(real x) { return abs(x) == constant(infinity); }

inline real quotient(real a, real b) { return a / b; }

inline real at_least(real x, real low);
inline real at_most(real x, real high);

// x = n ln 2 + r with |r| <= ln(2)/2.
struct Reduced {
  real r;
  whole biased;  // its low bits are n + exponent_bias: shifted up they are the float 2^n
  whole n() const { return biased - (whole)constant(shift); }
  real power() const { return (real)(biased << mantissa_bits); }

  // Adding it rounds to an integer and leaves that integer, biased, in the low bits.
  static constexpr double shift = (wide ? 0x1.8p52 : 0x1.8p23) + exponent_bias;
};

inline Reduced reduce(real x) {
  const real shifted = x * constant(1.4426950408889634) + constant(Reduced::shift);
  const real n = shifted - constant(Reduced::shift);
  const real r = x - n * constant(ln2_high);
  return {r - n * constant(ln2_low), (whole)shifted};
}

// (exp(r) - 1 - r) / r^2 for |r| <= ln(2)/2: a Taylor polynomial, long enough for the type.
inline real exp_tail(real r) {
  constexpr double inverse_factorial[] = {
      1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
      1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  constexpr int top = wide ? 11 : 5;
  real q = constant(inverse_factorial[top]);
  for (int k = top - 1; k >= 0; --k) q = q * r + constant(inverse_factorial[k]);
  return q;
}

inline real exp_reduced(real r) { return (exp_tail(r) * r + constant(1)) * r + constant(1); }
inline real expm1_reduced(real r) { return exp_tail(r) * (r * r) + r; }

inline real exp(real x) {
  const Reduced reduced =
      reduce(at_least(at_most(x, constant(wide ? 710 : 89)), constant(wide ? -746 : -104)));
  const whole half = reduced.n() >> 1;  // in two factors: 2^n itself may overflow or vanish
  const real first = (real)((half + exponent_bias) << mantissa_bits);
  const real second = (real)((reduced.biased - half) << mantissa_bits);
  return exp_reduced(reduced.r) * first * second;
}

inline real expm1(real x) {
  const Reduced reduced = reduce(at_least(at_most(x, constant(wide ? 710 : 89)), constant(-50)));
  const real half = (real)((reduced.biased - 1) << mantissa_bits);
  return constant(2) * (half * expm1_reduced(reduced.r) + (half - constant(0.5)));
}

// 1 / (1 + exp(-x)). The bounds keep 2^n a float: 1 at the lower end, infinity (so 0) at the upper.
inline real sigmoid(real x) {
  const Reduced reduced =
      reduce(at_least(at_most(-x, constant(wide ? 710 : 89)), constant(wide ? -708 : -87)));
  return constant(1) / (exp_reduced(reduced.r) * reduced.power() + constant(1));
}

inline real sigmoid_of_sum(real a, real b, real c) { return sigmoid(multiply_add(a, b, c)); }

inline real tanh(real x) {
  const Reduced reduced = reduce(constant(-2) * at_most(abs(x), constant(20)));
  const real power = reduced.power();
  const real e = power * expm1_reduced(reduced.r) + (power - constant(1));
  return with_sign(e / (constant(2) + e), x);
}

// log(m 2^e) for 1/sqrt(2) <= m < sqrt(2), by the series of 2 atanh((m - 1) / (m + 1)).
inline real log(real x) {
  const mask tiny = x < constant(std::numeric_limits<scalar>::min());
  const real scaled = select(tiny, x * constant(wide ? 0x1p54 : 0x1p25), x);
  const whole offset = (whole)constant(0.70710678118654752);
  const whole shifted = (whole)scaled - offset;
  const whole exponent = shifted >> mantissa_bits;
  const real m = (real)((whole)scaled - (exponent << mantissa_bits));
  const real e = __builtin_convertvector(exponent, real) -
                 select(tiny, constant(wide ? 54 : 25), constant(0));
  const real f = m - constant(1);
  const real s = f / (constant(2) + f);
  const real z = s * s;
  constexpr int top = wide ? 10 : 4;
  real q = constant(2.0 / (2 * top + 1));
  for (int k = top - 1; k >= 1; --k) q = q * z + constant(2.0 / (2 * k + 1));
  // log(1 + f) = f - f^2/2 + s (f^2/2 + z q): keeps f's last bits.
  const real h = constant(0.5) * f * f;
  const real low = s * (h + z * q) + e * constant(ln2_low);
  const real y = e * constant(ln2_high) - ((h - low) - f);
  const real special = select(x == constant(0), constant(-infinity),
                              select(x < constant(0), constant(not_a_number), x));
  return select((x > constant(0)) & (x < constant(infinity)), y, special);
}

inline real log1p(real x) {
  const real u = constant(1) + x;
  // What rounding u lost, relative to u; meaningless where u is 0 or infinite.
  const real lost = (x - (u - constant(1))) / u;
  const real y = log(u) + select((u > constant(0)) & (u < constant(infinity)), lost, constant(0));
  return select(u == constant(1), x, y);
}

inline real softplus_of_minus(real a) { return log1p(exp(-a)); }

#define PARARNN_BY_LANE(name, call)                        \
  inline real name(real x) {                               \
    real y;                                                \
    for (int i = 0; i < lanes; ++i) y[i] = call(x[i]);     \
    return y;                                              \
  }
#define PARARNN_BY_LANE_2(name, call)                            \
  inline real name(real a, real b) {                             \
    real y;                                                      \
    for (int i = 0; i < lanes; ++i) y[i] = call(a[i], b[i]);     \
    return y;                                                    \
  }

PARARNN_BY_LANE(sqrt, std::sqrt)
PARARNN_BY_LANE(floor, std::floor)
PARARNN_BY_LANE(ceil, std::ceil)
PARARNN_BY_LANE(trunc, std::trunc)
PARARNN_BY_LANE(round, std::nearbyint)
PARARNN_BY_LANE(exp2, std::exp2)
PARARNN_BY_LANE(log2, std::log2)
PARARNN_BY_LANE(log10, std::log10)
PARARNN_BY_LANE(sin, std::sin)
PARARNN_BY_LANE(cos, std::cos)
PARARNN_BY_LANE(tan, std::tan)
PARARNN_BY_LANE(asin, std::asin)
PARARNN_BY_LANE(acos, std::acos)
PARARNN_BY_LANE(atan, std::atan)
PARARNN_BY_LANE(sinh, std::sinh)
PARARNN_BY_LANE(cosh, std::cosh)
PARARNN_BY_LANE(asinh, std::asinh)
PARARNN_BY_LANE(acosh, std::acosh)
PARARNN_BY_LANE(atanh, std::atanh)
PARARNN_BY_LANE(erf, std::erf)
PARARNN_BY_LANE(erfc, std::erfc)
PARARNN_BY_LANE_2(pow, std::pow)
PARARNN_BY_LANE_2(atan2, std::atan2)
PARARNN_BY_LANE_2(hypot, std::hypot)
PARARNN_BY_LANE_2(fmod, std::fmod)

#undef PARARNN_BY_LANE
#undef PARARNN_BY_LANE_2

}  // namespace pararnn

#include "../common/functions.h"
