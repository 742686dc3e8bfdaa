// Couplings of the steps of a chunk by decays that are numbers: products of vectors under masks of decays.
#pragma once
#include "products.h"

namespace pararnn {

// The products of all pairs of steps, by levels of a middle between the two.
PARARNN_FUNCTION void fill_masks(const Forms& f, Couplings& y) {
  start_products(f, y.products);
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) y.mask_before[i][j].fill(constant(0));
  PARARNN_UNROLL
  for (int h = 1; h < chunk; h *= 2) {
    PARARNN_UNROLL
    for (int l = 0; l < num_states; ++l)
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) {
        real after[2][2];
        by_column(y.products.after[l][j], after);
        PARARNN_UNROLL
        for (int i = 0; i < num_states; ++i)
          all_of<chunk>([&](int k, int e) {
            const int t = lane_row() + e / 2 * 8, s = 8 * k + lane_column() + e % 2;
            if (is_pair(h, t, s)) y.mask_before[i][j][k][e] += y.products.before[i][l][e / 2] * after[k][e % 2];
          });
      }
    join(y.products, h);
  }
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      y.mask[i][j].each([&](real& x, int h, int s) { x = i == j && lane_row() + 8 * h == s ? constant(1) : constant(0); });
      PARARNN_UNROLL
      for (int l = 0; l < num_states; ++l) add_scaled(y.mask[i][j], y.mask_before[l][j], f.decay[i][l]);
    }
}

PARARNN_FUNCTION Square coupling(const Operand<keys> (&rows)[num_states], const Operand<keys> (&columns)[num_states],
                                 const Square (&mask)[num_states][num_states]) {
  Square y;
  y.fill(constant(0));
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) add_scaled(y, inner(rows[i], columns[j]), mask[i][j]);
  return y;
}

PARARNN_FUNCTION void fill_couplings(const Forms& f, const Operands& of, Couplings& y) {
  fill_masks(f, y);
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) {
      y.read[r][c] = coupling(of.read[r], of.column[c], y.mask_before);
      keep_where(y.read[r][c], is_before);
    }
    PARARNN_UNROLL
    for (int p = 0; p < num_queries; ++p) {
      y.query[p][c] = coupling(of.query[p], of.column[c], y.mask);
      keep_where(y.query[p][c], is_until);
    }
  }
}

}  // namespace pararnn
