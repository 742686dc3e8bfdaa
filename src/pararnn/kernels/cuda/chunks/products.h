// Products of the decays of a chunk, without a quotient: of blocks of steps, from both sides of a middle.
#pragma once
#include "inputs.h"

namespace pararnn {

// Of a step's block of h steps: the product of the decays before it, after it, and of all.
struct Products {
  Factor before[num_states][num_states], after[num_states][num_states], total[num_states][num_states];
};

PARARNN_FUNCTION bool is_second(int h, int i) { return (lane_row() + 8 * i) / h % 2 == 1; }
// True if s is in the first half, and t in the second, of a block of 2 h steps.
PARARNN_FUNCTION bool is_pair(int h, int t, int s) { return t / (2 * h) == s / (2 * h) && t / h % 2 == 1 && s / h % 2 == 0; }

// The factor of the step h away, in the other half of its block.
PARARNN_FUNCTION Row partner(const Row& x, int h) {
  if (h == 8) return Row{{x[1], x[0]}};
  return Row{{__shfl_xor_sync(~0u, x[0], 4 * h), __shfl_xor_sync(~0u, x[1], 4 * h)}};
}
template <int n> PARARNN_FUNCTION Tile<n> partner(const Tile<n>& x, int h) {
  Tile<n> y;
  all_of<n>([&](int j, int e) { y[j][e] = h == 8 ? x[j][e ^ 2] : __shfl_xor_sync(~0u, x[j][e], 4 * h); });
  return y;
}
PARARNN_FUNCTION Row scaled(const Row& a, const Row& b) { return Row{{a[0] * b[0], a[1] * b[1]}}; }
PARARNN_FUNCTION void add_scaled(Row& y, const Row& a, const Row& b) {
  y[0] += a[0] * b[0];
  y[1] += a[1] * b[1];
}
template <class F> PARARNN_FUNCTION F product_of(const F (&a)[num_states][num_states], const F (&b)[num_states][num_states], int i, int j) {
  F y = scaled(a[i][0], b[0][j]);
  PARARNN_UNROLL
  for (int l = 1; l < num_states; ++l) add_scaled(y, a[i][l], b[l][j]);
  return y;
}
PARARNN_FUNCTION void select_into(Row& y, const Row& other, bool first, bool second) {
  y = Row{{first ? other[0] : y[0], second ? other[1] : y[1]}};
}
template <int n> PARARNN_FUNCTION void select_into(Tile<n>& y, const Tile<n>& other, bool first, bool second) {
  all_of<n>([&](int j, int e) { y[j][e] = (e < 2 ? first : second) ? other[j][e] : y[j][e]; });
}

// Joins blocks of h steps to blocks of 2 h.
PARARNN_FUNCTION void join(Products& x, int h) {
  Factor other[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) other[i][j] = partner(x.total[i][j], h);
  Products y = x;
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      const bool first = is_second(h, 0), second = is_second(h, 1);
      select_into(y.before[i][j], product_of(x.before, other, i, j), first, second);
      select_into(y.after[i][j], product_of(other, x.after, i, j), !first, !second);
      y.total[i][j] = product_of(x.total, other, i, j);
      if (num_states > 1) select_into(y.total[i][j], product_of(other, x.total, i, j), !first, !second);
    }
  x = y;
}

// Couplings of the steps of a chunk.
struct Couplings {
  Square read[reads][num_columns];       // of a read at t with what s wrote
  Square query[num_queries][num_columns];
  Square mask_before[num_states][num_states], mask[num_states][num_states];  // of decays that are numbers
  Products products;                     // over the whole chunk
};

// Operands of the forms.
struct Operands {
  Operand<keys> column[num_columns][num_states], read[reads][num_states], query[num_queries][num_states];
};
PARARNN_FUNCTION void operands_of_columns(const Forms& f, Operands& y) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) y.column[c][i] = operand_of(f.column[c][i]);
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][i] = operand_of(f.read[r][i]);
  }
}
PARARNN_FUNCTION void operands_of_queries(const Forms& f, Operands& y) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int p = 0; p < num_queries; ++p) y.query[p][i] = operand_of(f.query[p][i]);
}
PARARNN_FUNCTION void operands_of(const Forms& f, Operands& y) {
  operands_of_columns(f, y);
  operands_of_queries(f, y);
}

PARARNN_FUNCTION void start_products(const Forms& f, Products& x) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      x.before[i][j].fill(constant(i == j));
      x.after[i][j].fill(constant(i == j));
      x.total[i][j] = f.decay[i][j];
    }
}

// rows^T P, and P columns.
template <class M> PARARNN_FUNCTION Tile<keys> decayed_rows(const Tile<keys> (&rows)[num_states], const M& p, int j) {
  Tile<keys> y = scaled(rows[0], p[0][j]);
  PARARNN_UNROLL
  for (int i = 1; i < num_states; ++i) add_scaled(y, rows[i], p[i][j]);
  return y;
}
template <class M> PARARNN_FUNCTION Tile<keys> decayed_columns(const M& p, const Tile<keys> (&columns)[num_states], int i) {
  Tile<keys> y = scaled(columns[0], p[i][0]);
  PARARNN_UNROLL
  for (int j = 1; j < num_states; ++j) add_scaled(y, columns[j], p[i][j]);
  return y;
}

PARARNN_FUNCTION bool is_before(int t, int s) { return s < t; }
PARARNN_FUNCTION bool is_until(int t, int s) { return s <= t; }

// What steps before a chunk's first step reach: its reads, and with the corrections inside of the chunk, its columns.
PARARNN_FUNCTION Tile<keys> reach_of(const Forms& f, const Couplings& of, int d, int j) {
  Tile<keys> y;
  y.fill(constant(0));
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) add_scaled(y, decayed_rows(f.read[r], of.products.before, j), f.gain[d][r]);
  return y;
}
PARARNN_FUNCTION void reaches_of(const Forms& f, const Couplings& of, const Operand<chunk> (&inverse)[corrected][corrected],
                                 int j, Tile<keys> (&y)[corrected]) {
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) y[c].fill(constant(0));
  PARARNN_UNROLL
  for (int d = 0; d < num_corrected; ++d) {
    const Operand<keys> x = turned(operand_of(reach_of(f, of, d, j)));
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) add_mixed(y[c], inverse[c][d], x);
  }
}
}  // namespace pararnn
