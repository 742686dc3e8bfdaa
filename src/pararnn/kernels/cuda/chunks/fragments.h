// Tiles of the 16 steps of a chunk in a warp's registers, and their products on tensor cores.
//
// Lane i holds, of steps i / 4 and i / 4 + 8, neighbouring pairs of channels: 8 j + 2 (i % 4) and the next, for each j.
// That is how a product's sums lie, so that a result is the operand of the next product without an exchange. Operands are
// bfloat16 terms: `terms` is 1, 2 or 3, which keep 8, 16 or all bits of a number.
//
// Needs: PARARNN_TERMS.
#pragma once
#include "../tiles.h"
#include "../real.h"

namespace pararnn {

constexpr int chunk = 16, terms = PARARNN_TERMS;
template <int> struct Turn {};  // of a warp among those of a block

PARARNN_FUNCTION int lane_row() { return threadIdx.x % 32 / 4; }
PARARNN_FUNCTION int lane_column() { return threadIdx.x % 4 * 2; }

// Sum over the lanes that hold a step.
PARARNN_FUNCTION real sum_of_row(real x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// Sum over the lanes that hold a channel.
PARARNN_FUNCTION real sum_of_column(real x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// A number for each of a lane's two steps.
struct Row {
  real x[2];
  PARARNN_FUNCTION real& operator[](int i) { return x[i]; }
  PARARNN_FUNCTION const real& operator[](int i) const { return x[i]; }
  PARARNN_FUNCTION void fill(real value) { x[0] = x[1] = value; }
  template <class F> PARARNN_FUNCTION void each(const F& f) {
    f(x[0], 0);
    f(x[1], 1);
  }
};

// n channels of 16 steps: [channel / 8][0, 1: of the first step; 2, 3: of the second].
template <int n> struct Tile {
  static constexpr int columns = n / 8;
  real x[columns][4];
  PARARNN_FUNCTION real* operator[](int j) { return x[j]; }
  PARARNN_FUNCTION const real* operator[](int j) const { return x[j]; }
  // Calls f(number, which of the lane's steps, channel).
  template <class F> PARARNN_FUNCTION void each(const F& f) {
    PARARNN_FOR(j, columns)
      PARARNN_FOR(e, 4) f(x[j][e], e / 2, 8 * j + lane_column() + e % 2);
  }
  PARARNN_FUNCTION void fill(real value) {
    each([&](real& y, int, int) { y = value; });
  }
};
using Square = Tile<chunk>;

// Calls f(j, e) for all numbers of a lane's tile of n channels.
template <int n, class F> PARARNN_FUNCTION void all_of(const F& f) {
  PARARNN_FOR(j, n / 8)
    PARARNN_FOR(e, 4) f(j, e);
}

PARARNN_FUNCTION Row scaled(const Row& a, const Row& b) { return Row{{a[0] * b[0], a[1] * b[1]}}; }
PARARNN_FUNCTION void add_scaled(Row& y, const Row& a, const Row& b) {
  y[0] += a[0] * b[0];
  y[1] += a[1] * b[1];
}
template <int n> PARARNN_FUNCTION Tile<n> scaled(const Tile<n>& a, const Row& b) {
  Tile<n> y;
  all_of<n>([&](int j, int e) { y[j][e] = a[j][e] * b[e / 2]; });
  return y;
}
template <int n> PARARNN_FUNCTION Tile<n> scaled(const Tile<n>& a, const Tile<n>& b) {
  Tile<n> y;
  all_of<n>([&](int j, int e) { y[j][e] = a[j][e] * b[j][e]; });
  return y;
}
template <int n> PARARNN_FUNCTION void add_scaled(Tile<n>& y, const Tile<n>& a, const Row& b) {
  all_of<n>([&](int j, int e) { y[j][e] += a[j][e] * b[e / 2]; });
}
template <int n> PARARNN_FUNCTION void add_scaled(Tile<n>& y, const Tile<n>& a, const Tile<n>& b) {
  all_of<n>([&](int j, int e) { y[j][e] += a[j][e] * b[j][e]; });
}
// Adds for each step the sum over channels of a b.
template <int n> PARARNN_FUNCTION Row sum_of_products(const Tile<n>& a, const Tile<n>& b) {
  Row sum{{0, 0}};
  all_of<n>([&](int j, int e) { sum[e / 2] += a[j][e] * b[j][e]; });
  return Row{{sum_of_row(sum[0]), sum_of_row(sum[1])}};
}
// Reductions over the channels of a step, of which there are `size`.
template <int size, int n, class F> PARARNN_FUNCTION void reduce_by(const Tile<n>& x, Row& y, real start, const F& combine) {
  y.fill(start);
  all_of<n>([&](int j, int e) {
    if (size == n || 8 * j + lane_column() + e % 2 < size) y[e / 2] = combine(y[e / 2], x[j][e]);
  });
  PARARNN_FOR(i, 2)
    PARARNN_UNROLL
    for (int by = 1; by < 4; by *= 2) y[i] = combine(y[i], __shfl_xor_sync(~0u, y[i], by));
}
template <int size, int n> PARARNN_FUNCTION void reduce_sum(const Tile<n>& x, Row& y) {
  reduce_by<size>(x, y, constant(0), [](real a, real b) { return a + b; });
}
template <int size, int n> PARARNN_FUNCTION void reduce_max(const Tile<n>& x, Row& y) {
  reduce_by<size>(x, y, constant(-INFINITY), [](real a, real b) { return maximum(a, b); });
}
template <int size, int n> PARARNN_FUNCTION void reduce_min(const Tile<n>& x, Row& y) {
  reduce_by<size>(x, y, constant(INFINITY), [](real a, real b) { return minimum(a, b); });
}
// Adds the sum over channels.
template <int n> PARARNN_FUNCTION void add_sum(const Tile<n>& x, Row& y) {
  Row sum;
  reduce_sum<n>(x, sum);
  y[0] += sum[0];
  y[1] += sum[1];
}
// Selects entries of pairs of steps (t, s) for which f(t, s) holds; others are 0, whatever they were.
template <class F> PARARNN_FUNCTION void keep_where(Square& x, const F& f) {
  x.each([&](real& y, int i, int s) { y = f(lane_row() + 8 * i, s) ? y : constant(0); });
}
// The numbers of the steps that are a lane's columns of a square.
PARARNN_FUNCTION void by_column(const Row& row, real (&x)[2][2]) {
  PARARNN_FOR(e, 2)
    PARARNN_FOR(j, 2) x[j][e] = __shfl_sync(~0u, row[j], 4 * (lane_column() + e));
}

// Two neighbours as the terms of operands.
template <int t> struct Pair {
  unsigned term[t];
};
template <int t = terms> PARARNN_FUNCTION Pair<t> pair_of(real first, real second) {
  Pair<t> p;
  PARARNN_FOR(i, t) {
    p.term[i] = to_bfloat16s((float)first, (float)second);
    first -= __uint_as_float(p.term[i] << 16);
    second -= __uint_as_float(p.term[i] & 0xffff0000u);
  }
  return p;
}

PARARNN_FUNCTION real bfloat16_of(unsigned word, int index) {
  return __uint_as_float(index ? word & 0xffff0000u : word << 16);
}

// A tile as operands: pairs by [channel / 8][first or second step].
template <int n, int t = terms> struct Operand {
  static constexpr int columns = n / 8;
  Pair<t> x[columns][2];
};
template <int t = terms, int n> PARARNN_FUNCTION Operand<n, t> operand_of(const Tile<n>& a) {
  Operand<n, t> y;
  PARARNN_FOR(j, n / 8)
    PARARNN_FOR(h, 2) y.x[j][h] = pair_of<t>(a[j][2 * h], a[j][2 * h + 1]);
  return y;
}
// The same with its 8 x 8 tiles transposed: a lane holds pairs of steps of a channel.
template <int n, int t> PARARNN_FUNCTION Operand<n, t> turned(const Operand<n, t>& a) {
  Operand<n, t> y;
  PARARNN_FOR(j, n / 8)
    PARARNN_FOR(h, 2)
      PARARNN_FOR(i, t) y.x[j][h].term[i] = transpose(a.x[j][h].term[i]);
  return y;
}
// sum += (a0 a1 a2 a3) (b0 b1): four 8 x 8 tiles by two.
template <int t, int u>
PARARNN_FUNCTION void add_terms(float (&sum)[4], const Pair<t>& a0, const Pair<t>& a1, const Pair<t>& a2, const Pair<t>& a3,
                                const Pair<u>& b0, const Pair<u>& b1) {
  PARARNN_UNROLL
  for (int i = t - 1; i >= 0; --i)
    PARARNN_UNROLL
    for (int j = u - 1; j >= 0; --j) {
      if (i + j >= terms) continue;  // such products are below what is kept
      const unsigned a[4] = {a0.term[i], a1.term[i], a2.term[i], a3.term[i]};
      const unsigned b[2] = {b0.term[j], b1.term[j]};
      add_product(sum, a, b);
    }
}

// y[t][s] += sum over channels of a[t] b[s].
template <int n, int t, int u> PARARNN_FUNCTION void add_inner(Square& y, const Operand<n, t>& a, const Operand<n, u>& b) {
  PARARNN_UNROLL
  for (int k = 0; k < n / 8; k += 2)
    PARARNN_FOR(h, 2)
      add_terms(y.x[h], a.x[k][0], a.x[k][1], a.x[k + 1][0], a.x[k + 1][1], b.x[k][h], b.x[k + 1][h]);
}
template <int n, int t, int u> PARARNN_FUNCTION Square inner(const Operand<n, t>& a, const Operand<n, u>& b) {
  Square y;
  y.fill(constant(0));
  add_inner(y, a, b);
  return y;
}
// y[t] += sum over s of a[t][s] x[s]; `x` is turned.
template <int n, int t, int u> PARARNN_FUNCTION void add_mixed(Tile<n>& y, const Operand<chunk, t>& a, const Operand<n, u>& x) {
  PARARNN_FOR(j, n / 8)
    add_terms(y.x[j], a.x[0][0], a.x[0][1], a.x[1][0], a.x[1][1], x.x[j][0], x.x[j][1]);
}
// y[s] += sum over t of a[t][s] x[t]; both are turned.
template <int n, int t, int u>
PARARNN_FUNCTION void add_mixed_back(Tile<n>& y, const Operand<chunk, t>& a, const Operand<n, u>& x) {
  PARARNN_FOR(j, n / 8)
    add_terms(y.x[j], a.x[0][0], a.x[1][0], a.x[0][1], a.x[1][1], x.x[j][0], x.x[j][1]);
}

}  // namespace pararnn
