// `real`: one channel's number in the compute type. Needs PARARNN_IO (float, double, bfloat16 or float16),
// the type of tensors in memory, and PARARNN_WIDE (0 or 1): 1 to compute in double. NVRTC compiles it, which
// has no standard headers.
#pragma once
#include "machine.h"

#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define PARARNN_UNROLL _Pragma("unroll")
#define PARARNN_FOR(i, count) PARARNN_UNROLL for (int i = 0; i < (count); ++i)

namespace pararnn {

using int64 = long long;

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

#if PARARNN_WIDE
using real = double;
#else
using real = float;
#endif
using scalar = real;
using mask = bool;
using io = PARARNN_IO;
constexpr bool wide = sizeof(real) == 8;

template <class T, class U> struct same { static constexpr bool value = false; };
template <class T> struct same<T, T> { static constexpr bool value = true; };

// Calls f(0), f(1) ... f(n - 1).
template <int n, class F> PARARNN_FUNCTION void each(const F& f) {
  PARARNN_FOR(i, n) f(i);
}

PARARNN_FUNCTION constexpr real constant(double x) { return (real)x; }
PARARNN_FUNCTION real select(mask m, real a, real b) { return m ? a : b; }
PARARNN_FUNCTION mask select(mask m, mask a, mask b) { return m ? a : b; }
PARARNN_FUNCTION mask truth(real x) { return x != constant(0); }
PARARNN_FUNCTION mask negated(mask m) { return !m; }
PARARNN_FUNCTION real multiply_add(real a, real b, real c) {
  return wide ? (real)::fma((double)a, (double)b, (double)c)
              : (real)::fmaf((float)a, (float)b, (float)c);
}
// Returns the larger number; ignores NaN.
PARARNN_FUNCTION real largest(real x, real y) {
  return wide ? (real)::fmax((double)x, (double)y) : (real)::fmaxf((float)x, (float)y);
}
// The rest of a number after its first part in bfloat16; none of infinity.
PARARNN_FUNCTION float rest_of(float x, unsigned first_part) {
  const float left = x - __uint_as_float(first_part);
  return left == left ? left : 0.0f;
}
PARARNN_FUNCTION real number(mask m) { return m ? constant(1) : constant(0); }

PARARNN_FUNCTION real widen(float x) { return x; }
PARARNN_FUNCTION real widen(double x) { return (real)x; }
PARARNN_FUNCTION real widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
PARARNN_FUNCTION real widen(float16 x) { return from_float16(x.bits); }

template <class T> PARARNN_FUNCTION T narrow(real x) {
  if constexpr (same<T, bfloat16>::value) return T{to_bfloat16((float)x)};
  else if constexpr (same<T, float16>::value) return T{to_float16((float)x)};
  else return (T)x;
}

PARARNN_FUNCTION unsigned bits_of(unsigned x) { return x; }
PARARNN_FUNCTION unsigned bits_of(float x) { return __float_as_uint(x); }
PARARNN_FUNCTION unsigned long long bits_of(double x) { return (unsigned long long)__double_as_longlong(x); }

// `count` neighbours in memory, moved by one instruction.
template <class T, int count> struct alignas(sizeof(T) * count) Pack { T items[count]; };

template <int count> PARARNN_FUNCTION void unpack(Pack<bfloat16, count> pack, real (&x)[count]) {
  if constexpr (count == 2) {  // one word holds both
    const unsigned word = *reinterpret_cast<const unsigned*>(&pack);
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    for (int i = 0; i < count; ++i) x[i] = widen(pack.items[i]);
  }
}

template <class T, int count> PARARNN_FUNCTION void unpack(Pack<T, count> pack, real (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) x[i] = widen(pack.items[i]);
}

template <class T, int count> PARARNN_FUNCTION Pack<T, count> packed(const real (&x)[count]) {
  Pack<T, count> pack;
  if constexpr (same<T, bfloat16>::value && count == 2) {
    *reinterpret_cast<unsigned*>(&pack) = to_bfloat16s((float)x[0], (float)x[1]);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) pack.items[i] = narrow<T>(x[i]);
  }
  return pack;
}

}  // namespace pararnn
