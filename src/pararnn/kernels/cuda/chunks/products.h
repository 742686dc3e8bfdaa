// Products of the decays of a chunk, which are numbers, without a quotient: of blocks of steps, from both sides of a middle.
#pragma once
#include "chunk.h"

namespace pararnn {

// Of a step's block of h steps: the product of the decays before it, after it, and of all.
struct Products {
  Factors before, after, total;
};

PARARNN_FUNCTION bool is_second(int h, int i) { return (lane_row() + 8 * i) / h % 2 == 1; }
// True if s is in the first half, and t in the second, of a block of 2 h steps.
PARARNN_FUNCTION bool is_pair(int h, int t, int s) { return t / (2 * h) == s / (2 * h) && t / h % 2 == 1 && s / h % 2 == 0; }

// The factor of the step h away, in the other half of its block.
PARARNN_FUNCTION Row partner(const Row& x, int h) {
  if (h == 8) return Row{{x[1], x[0]}};
  return Row{{__shfl_xor_sync(~0u, x[0], 4 * h), __shfl_xor_sync(~0u, x[1], 4 * h)}};
}
// An entry of a product of matrices of states.
PARARNN_FUNCTION Row product_of(const Factors& a, const Factors& b, int i, int j) {
  Row y = scaled(a[i][0], b[0][j]);
  PARARNN_UNROLL
  for (int l = 1; l < num_states; ++l) add_scaled(y, a[i][l], b[l][j]);
  return y;
}
PARARNN_FUNCTION void select_into(Row& y, const Row& other, bool first, bool second) {
  y = Row{{first ? other[0] : y[0], second ? other[1] : y[1]}};
}

// Joins blocks of h steps to blocks of 2 h.
PARARNN_FUNCTION void join(Products& x, int h) {
  Factors other;
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) other[i][j] = partner(x.total[i][j], h);
  Products y = x;
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) {
      const bool first = is_second(h, 0), second = is_second(h, 1);
      select_into(y.before[i][j], product_of(x.before, other, i, j), first, second);
      select_into(y.after[i][j], product_of(other, x.after, i, j), !first, !second);
      y.total[i][j] = product_of(x.total, other, i, j);
      if (num_states > 1) select_into(y.total[i][j], product_of(other, x.total, i, j), !first, !second);
    }
  x = y;
}

PARARNN_FUNCTION void start_products(const Factors& decay, Products& x) {
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) {
      x.before[i][j].fill(constant(i == j));
      x.after[i][j].fill(constant(i == j));
      x.total[i][j] = decay[i][j];
    }
}
PARARNN_FUNCTION void decays_until(const Factors& decay, const Products& x, Factors& y) {
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) y[i][j] = product_of(decay, x.before, i, j);
}

// rows^T P, and P columns, of 16 keys.
PARARNN_FUNCTION Square decayed_rows(const Square (&rows)[num_states], const Factors& p, int j) {
  Square y = scaled(rows[0], p[0][j]);
  PARARNN_UNROLL
  for (int i = 1; i < num_states; ++i) add_scaled(y, rows[i], p[i][j]);
  return y;
}
PARARNN_FUNCTION Square decayed_columns(const Factors& p, const Square (&columns)[num_states], int i) {
  Square y = scaled(columns[0], p[i][0]);
  PARARNN_UNROLL
  for (int j = 1; j < num_states; ++j) add_scaled(y, columns[j], p[i][j]);
  return y;
}

}  // namespace pararnn
