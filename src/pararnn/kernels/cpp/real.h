// `real`: one SIMD vector of channels, in the compute type, which generated code handles like a
// scalar. Needs PARARNN_IO (float, double, bfloat16 or float16), the type of tensors in memory, and
// PARARNN_WIDE (0 or 1), whether to compute in double.
// Nothing here may assume finite numbers or reassociate: NaN and infinity behave as in PyTorch.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#define PARARNN_VECTOR_BYTES 64
#elif defined(__AVX__)
#define PARARNN_VECTOR_BYTES 32
#else
#define PARARNN_VECTOR_BYTES 16
#endif

#define PARARNN_FUNCTION inline
#define PARARNN_UNROLL  // optimisers do
#define PARARNN_FOR(i, count) PARARNN_UNROLL for (int i = 0; i < (count); ++i)
#define PARARNN_INLINE __attribute__((always_inline))

namespace pararnn {

using int64 = int64_t;

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

#if PARARNN_WIDE
using scalar = double;
#else
using scalar = float;
#endif
using io = PARARNN_IO;
using weight_io = scalar;  // of biases and params in memory
constexpr bool wide = sizeof(scalar) == 8;
using integer = std::conditional<wide, int64_t, int32_t>::type;
constexpr int lanes = PARARNN_VECTOR_BYTES / sizeof(scalar);

typedef scalar real __attribute__((vector_size(PARARNN_VECTOR_BYTES)));
typedef decltype(real{} < real{}) mask;  // per lane: all ones or all zeros
typedef integer whole __attribute__((vector_size(PARARNN_VECTOR_BYTES)));

// Subtracting zero keeps every value, -0 included.
inline real constant(double x) { return scalar(x) - real{}; }
inline real select(mask m, real a, real b) { return m ? a : b; }
inline mask select(mask m, mask a, mask b) { return (m & a) | (~m & b); }
inline mask truth(real x) { return x != constant(0); }
inline mask negated(mask m) { return ~m; }
inline real multiply_add(real a, real b, real c) { return a * b + c; }
// Returns the larger number; ignores NaN in y.
inline real largest(real a, real b) { return select(b > a, b, a); }
inline real number(mask m) { return select(m, constant(1), constant(0)); }

// Loads and stores of a row of channels. The short forms touch only `count` channels.

template <class T> inline real load_as(const T* p);
template <class T> inline void store_as(T* p, real x);

template <> inline real load_as(const scalar* p) {
  real x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <> inline void store_as(scalar* p, real x) { std::memcpy(p, &x, sizeof x); }

// Half-width floats are converted by integer arithmetic, which vectorises on every processor.
#if !PARARNN_WIDE
typedef uint16_t halves __attribute__((vector_size(PARARNN_VECTOR_BYTES / 2)));
typedef uint32_t bits32 __attribute__((vector_size(PARARNN_VECTOR_BYTES)));

inline bits32 load_halves(const void* p) {
  halves h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, bits32);
}

inline void store_halves(void* p, bits32 b) {
  const halves h = __builtin_convertvector(b, halves);
  std::memcpy(p, &h, sizeof h);
}

template <> inline real load_as(const bfloat16* p) { return (real)(load_halves(p) << 16); }

template <> inline void store_as(bfloat16* p, real x) {
  const bits32 b = (bits32)x;
  const bits32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const bits32 quiet_nan = 0x7fc0u + bits32{};
  store_halves(p, (bits32)select(x == x, (real)rounded, (real)quiet_nan));
}

template <> inline real load_as(const float16* p) {
  const bits32 b = load_halves(p);
  const bits32 magnitude = (b & 0x7fffu) << 13;
  // Multiplying by 2^112 corrects the exponent's bias, exactly, for subnormal numbers too.
  const real finite = (real)magnitude * constant(0x1p112);
  const bits32 special = (b & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : (bits32)finite;
  return (real)(special | ((b & 0x8000u) << 16));
}

template <> inline void store_as(float16* p, real x) {
  const bits32 b = (bits32)x;
  const bits32 magnitude = b & 0x7fffffffu;
  // Normal results: rounds the 13 dropped bits to nearest, ties to even.
  const bits32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14: adding 0.5 aligns the last bit with a subnormal's, and the addition rounds.
  const bits32 small = (bits32)((real)magnitude + constant(0.5)) - 0x3f000000u;
  bits32 out = magnitude < 0x38800000u ? small : normal;
  out = magnitude >= 0x477ff000u ? 0x7c00u + bits32{} : out;
  out = magnitude > 0x7f800000u ? 0x7e00u + bits32{} : out;
  store_halves(p, out | ((b >> 16) & 0x8000u));
}
#endif

// Copies of the first `count` items; the whole of `padded` may be read and written.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
// Compilers' builtins: the official header would take a fifth of a compilation. Compilers agree on the names
// but not on the pointer types.
struct Memory {
  const void* place;
  template <class T> operator T*() const { return (T*)place; }
};

template <int size> struct Masked;
template <> struct Masked<2> {
  typedef short items __attribute__((vector_size(32)));
  static items read(Memory p, int mask) {
    return __builtin_ia32_loaddquhi256_mask(p, items{}, mask);
  }
  static void write(Memory p, items x, int mask) { __builtin_ia32_storedquhi256_mask(p, x, mask); }
};
template <> struct Masked<4> {
  typedef float items __attribute__((vector_size(64)));
  static items read(Memory p, int mask) { return __builtin_ia32_loadups512_mask(p, items{}, mask); }
  static void write(Memory p, items x, int mask) { __builtin_ia32_storeups512_mask(p, x, mask); }
};
template <> struct Masked<8> {
  typedef double items __attribute__((vector_size(64)));
  static items read(Memory p, int mask) { return __builtin_ia32_loadupd512_mask(p, items{}, mask); }
  static void write(Memory p, items x, int mask) { __builtin_ia32_storeupd512_mask(p, x, mask); }
};

template <class T> inline void read_some(T* padded, const T* p, int count) {
  const auto x = Masked<sizeof(T)>::read({p}, (1 << count) - 1);
  std::memcpy(padded, &x, sizeof x);
}
template <class T> inline void write_some(T* p, const T* padded, int count) {
  typename Masked<sizeof(T)>::items x;
  std::memcpy(&x, padded, sizeof x);
  Masked<sizeof(T)>::write({p}, x, (1 << count) - 1);
}
#else
template <class T> inline void read_some(T* padded, const T* p, int count) {
  std::memcpy(padded, p, count * sizeof(T));
}
template <class T> inline void write_some(T* p, const T* padded, int count) {
  std::memcpy(p, padded, count * sizeof(T));
}
#endif

template <class T> inline real load(const T* p, int count) {
  if (count >= lanes) return load_as(p);
  T padded[lanes] = {};
  read_some(padded, p, count);
  return load_as(padded);
}

template <class T> inline void store(T* p, real x, int count) {
  if (count >= lanes) return store_as(p, x);
  T padded[lanes];
  store_as(padded, x);
  write_some(p, padded, count);
}

}  // namespace pararnn
