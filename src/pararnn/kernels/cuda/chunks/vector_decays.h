// Couplings of the steps of a chunk by decays for each key: products of matrices, a level of the decays' products at a time.
#pragma once
#include "products.h"

namespace pararnn {

// All couplings: those of queries need the same products.
PARARNN_FUNCTION void fill_read_couplings(const Forms& f, const Operands&, Couplings& y) {
  start_products(f, y.products);
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][c].fill(constant(0));
    PARARNN_UNROLL
    for (int p = 0; p < num_queries; ++p) {
      Row same{{0, 0}};
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) {
        const Row x = sum_of_products(f.query[p][i], f.column[c][i]);
        same[0] += x[0];
        same[1] += x[1];
      }
      y.query[p][c].each([&](real& x, int h, int s) { x = lane_row() + 8 * h == s ? same[h] : constant(0); });
    }
  }
#pragma unroll 1
  for (int h = 1; h < chunk; h *= 2) {
    Operand<keys> columns[num_columns][num_states];
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c)
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) columns[c][i] = operand_of(decayed_columns(y.products.after, f.column[c], i));
    const auto add = [&](const Tile<keys> (&rows)[num_states], const auto& p, Square (&sums)[num_columns]) {
      Operand<keys> operands[num_states];
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) operands[j] = operand_of(decayed_rows(rows, p, j));
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) {
        Square level;
        level.fill(constant(0));
        PARARNN_UNROLL
        for (int j = 0; j < num_states; ++j) add_inner(level, operands[j], columns[c][j]);
        sums[c].each([&](real& x, int i, int s) {
          const int k = s / 8, e = 2 * i + s % 2;
          x = is_pair(h, lane_row() + 8 * i, s) ? level[k][e] : x;
        });
      }
    };
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) add(f.read[r], y.products.before, y.read[r]);
    Factor until[num_states][num_states];
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i)
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) until[i][j] = product_of(f.decay, y.products.before, i, j);
    PARARNN_UNROLL
    for (int p = 0; p < num_queries; ++p) add(f.query[p], until, y.query[p]);
    join(y.products, h);
  }
}

PARARNN_FUNCTION void fill_query_couplings(const Forms&, const Operands&, Couplings&) {}
PARARNN_FUNCTION void fill_couplings(const Forms& f, const Operands& of, Couplings& y) { fill_read_couplings(f, of, y); }

constexpr bool scales_late = false, by_blocks = false;
constexpr int scale_bytes = 0, scales_bytes = 0;
PARARNN_FUNCTION void put_scales(const Forms&, const Couplings&, char*) {}

}  // namespace pararnn
