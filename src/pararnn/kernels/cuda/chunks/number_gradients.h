// Gradients of forms of keys, and of decays that are numbers: by the products of all pairs of steps. A product with one decay
// left out is the product after it times that before it, also where it is 0.
#pragma once
#include "chunk.h"

namespace pararnn {

PARARNN_FUNCTION void get_decay_gradient(const Chunk& at, int i, int j, Row& x) { x = get_row(at.decay_gradient(i, j)); }

PARARNN_FUNCTION void couple(const Chunk& at, const Decays& decays, Couplings& y) {
  Grams grams;
  fill_couplings(at.keys_memory(), decays, y, grams);
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states)
      PARARNN_FOR(c, num_columns) {
        PARARNN_FOR(r, num_reads) put_block(grams.read[r][c][i][j], at.gram(i, j), r * num_columns + c);
        PARARNN_FOR(q, num_queries) put_block(grams.query[q][c][i][j], at.gram(i, j), (num_reads + q) * num_columns + c);
      }
}

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
  PARARNN_FOR(j, 2)
    PARARNN_FOR(e, 2) column[j][e] = sum_of_column(p[j][e] * x[0] + p[j][e + 2] * x[1]);
  Row y;  // the sum of step s is in lanes whose columns have s
  PARARNN_FOR(j, 2) {
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
// Gradients of what a chunk made of decays: shares of a lane, but for couplings.
struct ProductGradients {
  Factors before, until, after, total;
  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) {
        before[i][j].fill(constant(0));
        until[i][j].fill(constant(0));
        after[i][j].fill(constant(0));
        total[i][j].fill(constant(0));
      }
  }
};
PARARNN_FUNCTION void add_share(Row& y, const Square& a, const Square& b) {
  all_of<chunk>([&](int j, int e) { y[e / 2] += a[j][e] * b[j][e]; });
}
PARARNN_FUNCTION Row whole(const Row& share) { return Row{{sum_of_row(share[0]), sum_of_row(share[1])}}; }

// Pulls decayed rows back to rows and decays; `y` has the sums of couplings already.
PARARNN_FUNCTION void pull_rows(const Square (&grad)[num_states], const Square (&rows)[num_states], const Factors& p,
                                Square (&y)[num_states], Factors& grad_p) {
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) {
      add_scaled(y[i], grad[j], p[i][j]);
      add_share(grad_p[i][j], grad[j], rows[i]);
    }
}

// The gradients of couplings under masks, as operands: [row][column][state of the row][of the column].
struct MaskedGradients {
  Operand<chunk> read[reads][num_columns][num_states][num_states], query[num_queries][num_columns][num_states][num_states];
};

// Pulls back to 16 keys of reads, queries and columns, and puts their gradients in place of these.
PARARNN_FUNCTION void pull_block(const Chunk& at, const Decays& decays, const Factors& until, const MaskedGradients& masked, int k,
                                 ProductGradients& products) {
  const KeyMemory of = at.keys_memory();
  KeySums sums;
  add_key_sums(at, k, sums);
  Operand<chunk> column[num_columns][num_states];
  Square grad_column[num_columns][num_states];
  PARARNN_FOR(c, num_columns)
    PARARNN_FOR(j, num_states) {
      column[c][j] = get(of.column(c, j), k);
      grad_column[c][j].fill(constant(0));
      const Square x = numbers_of(column[c][j]);
      PARARNN_FOR(i, num_states) {
        add_scaled(grad_column[c][j], sums.column[c][i], decays.products.after[i][j]);
        add_share(products.after[i][j], sums.column[c][i], x);
      }
      column[c][j] = turned(column[c][j]);
    }
  const auto pull = [&](const auto& place, const auto& of_masked, const Square (&grad)[num_states], const Factors& p, Factors& grad_p) {
    Square rows[num_states], y[num_states];
    PARARNN_FOR(i, num_states) {
      const Operand<chunk> row = get(place(i), k);
      rows[i] = numbers_of(row);
      const Operand<chunk> turned_row = turned(row);
      y[i].fill(constant(0));
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(j, num_states) {
          add_mixed(y[i], of_masked(c, i, j), column[c][j]);
          add_mixed_back(grad_column[c][j], turned(of_masked(c, i, j)), turned_row);
        }
    }
    pull_rows(grad, rows, p, y, grad_p);
    PARARNN_FOR(i, num_states) put_block(y[i], place(i) + k * gradient_stride, 0);
  };
  PARARNN_FOR(r, num_reads)
    pull([&](int i) { return of.read(r, i); }, [&](int c, int i, int j) { return masked.read[r][c][i][j]; }, sums.read[r],
         decays.products.before, products.before);
  PARARNN_FOR(q, num_queries)
    pull([&](int i) { return of.query(q, i); }, [&](int c, int i, int j) { return masked.query[q][c][i][j]; }, sums.query[q],
         until, products.until);
  PARARNN_FOR(i, num_states) {
    PARARNN_FOR(c, num_columns) put_block(grad_column[c][i], of.column(c, i) + k * gradient_stride, 0);
    PARARNN_FOR(j, num_states) {
      products.total[i][j][0] += sums.total[i][j][0];
      products.total[i][j][1] += sums.total[i][j][1];
    }
  }
}

// Pulls back to a warp's blocks of keys.
PARARNN_FUNCTION void pull_keys(const Chunk& at, const Decays& decays, const Couplings& couplings) {
  Factors until;
  decays_until(decays.decay, decays.products, until);
  MaskedGradients masked;
  PARARNN_FOR(c, num_columns)
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) {
        PARARNN_FOR(r, num_reads)
          masked.read[r][c][i][j] = operand_of(scaled(couplings.read[r][c], decays.mask_before[i][j]));
        PARARNN_FOR(q, num_queries)
          masked.query[q][c][i][j] = operand_of(scaled(couplings.query[q][c], decays.mask[i][j]));
      }
  ProductGradients g;
  g.clear();
#pragma unroll 1
  for (int k = warp_number(); k < keys / chunk; k += warps) pull_block(at, decays, until, masked, k, g);
  PARARNN_FOR(a, num_states)
    PARARNN_FOR(b, num_states) {
      char* const share = at.share(warp_number()) + at_decay_shares + (a * num_states + b) * 4 * row_bytes;
      put_row(whole(g.before[a][b]), share);
      put_row(whole(g.until[a][b]), share + row_bytes);
      put_row(whole(g.after[a][b]), share + 2 * row_bytes);
      put_row(whole(g.total[a][b]), share + 3 * row_bytes);
    }
}

// Puts the gradients of decays in their place.
PARARNN_FUNCTION void pull_decays(const Chunk& at, const Decays& decays, const Couplings& couplings) {
  const Products& of = decays.products;
  Factors gradient;
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) gradient[i][j].fill(constant(0));
  PARARNN_FOR(a, num_states)
    PARARNN_FOR(b, num_states) {
      Square grad_before, grad_until;
      grad_before.fill(constant(0));
      grad_until.fill(constant(0));
      PARARNN_FOR(c, num_columns) {
        PARARNN_FOR(r, num_reads)
          add_scaled(grad_before, couplings.read[r][c], get_block(at.gram(a, b), r * num_columns + c));
        PARARNN_FOR(q, num_queries)
          add_scaled(grad_until, couplings.query[q][c], get_block(at.gram(a, b), (num_reads + q) * num_columns + c));
      }
      const int shares = at_decay_shares + (a * num_states + b) * 4 * row_bytes;
      const Row before = sum_of_rows(at, shares), reached = sum_of_rows(at, shares + row_bytes);
      const Row after = sum_of_rows(at, shares + 2 * row_bytes), totals = sum_of_rows(at, shares + 3 * row_bytes);
      const real total = sum_of_column(totals[0] + totals[1]);
      PARARNN_FOR(i, num_states)
        PARARNN_FOR(j, num_states) {
          Row& y = gradient[i][j];
          add_decay_gradient(y, decays.mask_before[a][i], grad_before, decays.mask_before[j][b]);
          add_decay_gradient(y, decays.mask[a][i], grad_until, decays.mask_before[j][b]);
          add_scaled(y, mixed_back(decays.mask_before[a][i], before), of.before[j][b]);
          add_scaled(y, mixed_back(decays.mask[a][i], reached), of.before[j][b]);
          add_scaled(y, mixed(decays.mask_before[j][b], after), of.after[a][i]);
          y[0] += of.after[a][i][0] * of.before[j][b][0] * total;
          y[1] += of.after[a][i][1] * of.before[j][b][1] * total;
        }
    }
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) put_row(gradient[i][j], at.decay_gradient(i, j));
}

}  // namespace pararnn
