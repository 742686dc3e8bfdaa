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

PARARNN_FUNCTION void fill_read_couplings(const Forms& f, const Operands& of, Couplings& y) {
  fill_masks(f, y);
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      y.read[r][c] = coupling(of.read[r], of.column[c], y.mask_before);
      keep_where(y.read[r][c], is_before);
    }
}
PARARNN_FUNCTION void fill_query_couplings(const Forms&, const Operands& of, Couplings& y) {
  PARARNN_UNROLL
  for (int p = 0; p < num_queries; ++p)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      y.query[p][c] = coupling(of.query[p], of.column[c], y.mask);
      keep_where(y.query[p][c], is_until);
    }
}
PARARNN_FUNCTION void fill_couplings(const Forms& f, const Operands& of, Couplings& y) {
  fill_read_couplings(f, of, y);
  fill_query_couplings(f, of, y);
}

// With one state, a step's decay may come after products: it is the same for all keys.
constexpr bool scales_late = num_states == 1;
constexpr int scale_bytes = chunk * (int)sizeof(real), scales_bytes = scales_late ? 2 * scale_bytes : 0;
// True if operands of keys go through memory, 16 keys at a time.
constexpr bool by_blocks = scales_late && num_reads <= num_corrected;

// The decays until a step, then those after it.
PARARNN_FUNCTION void put_scales(const Forms& f, const Couplings& of, char* memory) {
  if (!scales_late || lane_column() != 0) return;
  real* const target = reinterpret_cast<real*>(memory);
  PARARNN_UNROLL
  for (int i = 0; i < 2; ++i) {
    target[lane_row() + 8 * i] = f.decay[0][0][i] * of.products.before[0][0][i];
    target[chunk + lane_row() + 8 * i] = of.products.after[0][0][i];
  }
}

}  // namespace pararnn
