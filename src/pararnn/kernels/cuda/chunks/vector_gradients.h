// Gradients of decays for each key, of one state: the levels of their products in reverse.
#pragma once
#include "chunk.h"

namespace pararnn {

static_assert(num_states == 1, "decays for each key");

// Adds a lane's share of the sum over 16 values, by key.
template <int t> PARARNN_FUNCTION void add_states_product(Tile<keys>& y, const Operand<keys, t>& a, const Operand<keys, t>& b) {
  PARARNN_UNROLL
  for (int k = 0; k < keys / 8; ++k)
    PARARNN_UNROLL
    for (int e = 0; e < 4; ++e) {
      real x = constant(0), z = constant(0);
      PARARNN_UNROLL
      for (int i = 0; i < t; ++i) {
        x += bfloat16_of(a.x[k][e / 2].term[i], e % 2);
        z += bfloat16_of(b.x[k][e / 2].term[i], e % 2);
      }
      y[k][e] += x * z;
    }
}

// Products of blocks of h steps.
PARARNN_FUNCTION void products_until(const Forms& f, int h, Products& x) {
  start_products(f, x);
#pragma unroll 1
  for (int k = 1; k < h; k *= 2) join(x, k);
}

PARARNN_FUNCTION void pull_level(const Square& grad, int h, const Tile<keys>& rows, const Tile<keys>& columns,
                                 Tile<keys>& grad_rows, Tile<keys>& grad_columns) {
  Square own = grad;
  keep_where(own, [&](int t, int s) { return is_pair(h, t, s); });
  const Operand<chunk> masked = operand_of(own);
  grad_rows.fill(constant(0));
  add_mixed(grad_rows, masked, turned(operand_of(columns)));
  add_mixed_back(grad_columns, turned(masked), turned(operand_of(rows)));
}

PARARNN_FUNCTION void pull_decays(const Forms& f, const Operands&, const Couplings& of, const CouplingGradients& couplings,
                                  const ProductGradients& g, Forms& gradient) {
  const Tile<keys>& decay = f.decay[0][0];
  Tile<keys>& grad = gradient.decay[0][0];
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      Square own = couplings.query[q][c];
      keep_where(own, [](int t, int s) { return t == s; });
      Row same{{0, 0}};
      own.each([&](real& x, int i, int) { same[i] += x; });
      same = Row{{sum_of_row(same[0]), sum_of_row(same[1])}};
      add_scaled(gradient.query[q][0], f.column[c][0], same);
      add_scaled(gradient.column[c][0], f.query[q][0], same);
    }
  add_scaled(grad, g.until[0][0], of.products.before[0][0]);
  Tile<keys> before = g.before[0][0], after = g.after[0][0], total = g.total[0][0];
  add_scaled(before, g.until[0][0], decay);
#pragma unroll 1
  for (int h = chunk / 2; h > 0; h /= 2) {
    Products x;
    products_until(f, h, x);
    const Tile<keys>&b = x.before[0][0], &a = x.after[0][0], &own = x.total[0][0], other = partner(own, h);
    Tile<keys> grad_other = scaled(total, own);
    all_of<keys>([&](int k, int e) {
      const bool second = is_second(h, e / 2);
      grad_other[k][e] += second ? before[k][e] * b[k][e] : after[k][e] * a[k][e];
      before[k][e] *= second ? other[k][e] : constant(1);
      after[k][e] *= second ? constant(1) : other[k][e];
      total[k][e] *= other[k][e];
    });
    const Tile<keys> sent = partner(grad_other, h);
    all_of<keys>([&](int k, int e) { total[k][e] += sent[k][e]; });
    const Tile<keys> until = scaled(decay, b);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      const Tile<keys>& column = f.column[c][0];
      const Tile<keys> columns = scaled(column, a);
      Tile<keys> grad_columns, grad_rows;
      grad_columns.fill(constant(0));
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) {
        const Tile<keys>& read = f.read[r][0];
        pull_level(couplings.read[r][c], h, scaled(read, b), columns, grad_rows, grad_columns);
        add_scaled(gradient.read[r][0], grad_rows, b);
        add_scaled(before, grad_rows, read);
      }
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) {
        const Tile<keys>& query = f.query[q][0];
        pull_level(couplings.query[q][c], h, scaled(query, until), columns, grad_rows, grad_columns);
        add_scaled(gradient.query[q][0], grad_rows, until);
        const Tile<keys> grad_until = scaled(grad_rows, query);
        add_scaled(grad, grad_until, b);
        add_scaled(before, grad_until, decay);
      }
      add_scaled(gradient.column[c][0], grad_columns, a);
      add_scaled(after, grad_columns, column);
    }
  }
  all_of<keys>([&](int k, int e) { grad[k][e] += total[k][e]; });
}

}  // namespace pararnn
