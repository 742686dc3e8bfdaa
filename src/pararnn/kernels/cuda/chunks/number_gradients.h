// Gradients of decays that are numbers, by the products of all pairs of steps: a product with one decay left out is the
// product after it times that before it, also where it is 0.
#pragma once
#include "chunk.h"

namespace pararnn {

// The gradient of one decay by those of the products of all pairs of steps: y_j += sum over t, s of P[t, j] g[t, s] Q[j, s].
PARARNN_FUNCTION void add_decay_gradient(Row& y, const Square& p, const Square& g, const Square& q) {
  Square z;
  z.fill(constant(0));
  add_mixed_back(z, turned(operand_of(p)), turned(operand_of(g)));
  const Row sum = sum_of_products(z, q);
  y[0] += sum[0];
  y[1] += sum[1];
}
// Sum over t of p[t][s] x[t], for the lane's own steps s.
PARARNN_FUNCTION Row mixed_back(const Square& p, const Row& x) {
  real column[2][2];
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j)
    PARARNN_UNROLL
    for (int e = 0; e < 2; ++e) column[j][e] = sum_of_column(p[j][e] * x[0] + p[j][e + 2] * x[1]);
  Row y;  // the sum of step s is in lanes whose columns have s
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j) {
    const real even = __shfl_sync(~0u, column[j][0], lane_row() / 2), odd = __shfl_sync(~0u, column[j][1], lane_row() / 2);
    y[j] = lane_row() % 2 ? odd : even;
  }
  return y;
}
// Sum over s of p[t][s] x[s].
PARARNN_FUNCTION Row mixed(const Square& p, const Row& x) {
  real column[2][2];
  by_column(x, column);
  Row y{{0, 0}};
  all_of<chunk>([&](int j, int e) { y[e / 2] += p[j][e] * column[j][e % 2]; });
  return Row{{sum_of_row(y[0]), sum_of_row(y[1])}};
}
PARARNN_FUNCTION void add_product_of(Row& y, const Row& a, const Row& b) {
  y[0] += a[0] * b[0];
  y[1] += a[1] * b[1];
}

PARARNN_FUNCTION void pull_coupling(const Square& grad, const Operand<keys> (&rows)[num_states],
                                    const Operand<keys> (&columns)[num_states], const Square (&mask)[num_states][num_states],
                                    Tile<keys> (&grad_rows)[num_states], Tile<keys> (&grad_columns)[num_states],
                                    Square (&grad_mask)[num_states][num_states]) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      const Operand<chunk> masked = operand_of(scaled(grad, mask[i][j]));
      add_mixed(grad_rows[i], masked, turned(columns[j]));
      add_mixed_back(grad_columns[j], turned(masked), turned(rows[i]));
      add_scaled(grad_mask[i][j], grad, inner(rows[i], columns[j]));
    }
}

// Adds a lane's share of the sum over 16 values and all keys: of the diagonal of a product.
template <int t> PARARNN_FUNCTION void add_states_product(Row& y, const Operand<keys, t>& a, const Operand<keys, t>& b) {
  Square products = inner(a, b);
  products.each([&](real& x, int i, int s) { y[i] += lane_row() + 8 * i == s ? x : constant(0); });
}

PARARNN_FUNCTION void pull_decays(const Forms& f, const Operands& operands, const Couplings& of,
                                  const CouplingGradients& couplings, const ProductGradients& g, Forms& gradient) {
  Square grad_before[num_states][num_states], grad_until[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      grad_before[i][j].fill(constant(0));
      grad_until[i][j].fill(constant(0));
    }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r)
      pull_coupling(couplings.read[r][c], operands.read[r], operands.column[c], of.mask_before, gradient.read[r],
                    gradient.column[c], grad_before);
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q)
      pull_coupling(couplings.query[q][c], operands.query[q], operands.column[c], of.mask, gradient.query[q],
                    gradient.column[c], grad_until);
  }
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      Row& y = gradient.decay[i][j];
      PARARNN_UNROLL
      for (int a = 0; a < num_states; ++a)
        PARARNN_UNROLL
        for (int b = 0; b < num_states; ++b) {
          add_decay_gradient(y, of.mask_before[a][i], grad_before[a][b], of.mask_before[j][b]);
          add_decay_gradient(y, of.mask[a][i], grad_until[a][b], of.mask_before[j][b]);
          const Row& before = of.products.before[j][b];
          add_product_of(y, mixed_back(of.mask_before[a][i], g.before[a][b]), before);
          add_product_of(y, mixed_back(of.mask[a][i], g.until[a][b]), before);
          const Row& after = of.products.after[a][i];
          add_product_of(y, mixed(of.mask_before[j][b], g.after[a][b]), after);
          const real total = sum_of_column(sum_of_row(g.total[a][b][0] + g.total[a][b][1]));
          y[0] += after[0] * before[0] * total;
          y[1] += after[1] * before[1] * total;
        }
    }
}

}  // namespace pararnn
