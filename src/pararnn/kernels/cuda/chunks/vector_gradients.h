// Gradients of forms of keys, and of decays for each key, of one state: the levels of their products in reverse.
#pragma once
#include "chunk.h"

namespace pararnn {

static_assert(num_states == 1, "decays for each key");

PARARNN_FUNCTION void get_decay_gradient(const Chunk& at, int i, int j, Tile<keys>& x) { get_tile(x, at.keys_memory().decay(i, j)); }

PARARNN_FUNCTION void couple(const Chunk& at, const Decays& decays, Couplings& y) {
  fill_couplings(at.keys_memory(), decays, y, static_cast<char*>(nullptr));
}

// Products of blocks of h steps.
PARARNN_FUNCTION void products_until(const Factors& decay, int h, Products& x) {
  start_products(decay, x);
#pragma unroll 1
  for (int k = 1; k < h; k *= 2) join(x, k);
}

PARARNN_FUNCTION void pull_level(const Square& grad, int h, const Square& rows, const Square& columns, Square& grad_rows,
                                 Square& grad_columns) {
  Square level = grad;
  keep_where(level, [&](int t, int s) { return is_pair(h, t, s); });
  const Operand<chunk> masked = operand_of(level);
  grad_rows.fill(constant(0));
  add_mixed(grad_rows, masked, turned(operand_of(columns)));
  add_mixed_back(grad_columns, turned(masked), turned(operand_of(rows)));
}

// What a step's query finds of what the step wrote.
PARARNN_FUNCTION Row same_of(const Square& grad) {
  Row same{{0, 0}};
  all_of<chunk>([&](int j, int e) { same[e / 2] += lane_row() + e / 2 * 8 == 8 * j + lane_column() + e % 2 ? grad[j][e] : constant(0); });
  return Row{{sum_of_row(same[0]), sum_of_row(same[1])}};
}

// Pulls back to 16 keys, and puts gradients in place of reads, queries, columns and decays.
PARARNN_FUNCTION void pull_block(const Chunk& at, const Couplings& couplings, int k) {
  const KeyMemory of = at.keys_memory();
  KeySums sums;
  add_key_sums(at, k, sums);
  Factors decays;
  get_decays(of, k, decays);
  const Square& decay = decays[0][0];
  Square read[reads], query[num_queries], column[num_columns];
  Square grad_read[reads], grad_query[num_queries], grad_column[num_columns], grad, before, after;
  const Square& total_of_chunk = sums.total[0][0];
  Square total = total_of_chunk;
  {
    Products x;
    products_until(decays, chunk, x);
    const Square &b = x.before[0][0], until = scaled(decay, b);
    before.fill(constant(0));
    after.fill(constant(0));
    grad.fill(constant(0));
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) {
      read[r] = numbers_of(get(of.read(r, 0), k));
      grad_read[r] = scaled(sums.read[r][0], b);
      add_scaled(before, sums.read[r][0], read[r]);
    }
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) {
      query[q] = numbers_of(get(of.query(q, 0), k));
      grad_query[q] = scaled(sums.query[q][0], until);
      const Square grad_until = scaled(sums.query[q][0], query[q]);
      add_scaled(grad, grad_until, b);
      add_scaled(before, grad_until, decay);
    }
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      column[c] = numbers_of(get(of.column(c, 0), k));
      grad_column[c] = scaled(sums.column[c][0], x.after[0][0]);
      add_scaled(after, sums.column[c][0], column[c]);
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) {
        const Row same = same_of(couplings.query[q][c]);
        add_scaled(grad_query[q], column[c], same);
        add_scaled(grad_column[c], query[q], same);
      }
    }
  }
#pragma unroll 1
  for (int h = chunk / 2; h > 0; h /= 2) {
    Products x;
    products_until(decays, h, x);
    const Square &b = x.before[0][0], &a = x.after[0][0], &block = x.total[0][0], other = partner(block, h);
    Square grad_other = scaled(total, block);
    all_of<chunk>([&](int j, int e) {
      const bool second = is_second(h, e / 2);
      grad_other[j][e] += second ? before[j][e] * b[j][e] : after[j][e] * a[j][e];
      before[j][e] *= second ? other[j][e] : constant(1);
      after[j][e] *= second ? constant(1) : other[j][e];
      total[j][e] *= other[j][e];
    });
    const Square sent = partner(grad_other, h);
    all_of<chunk>([&](int j, int e) { total[j][e] += sent[j][e]; });
    const Square until = scaled(decay, b);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      const Square columns = scaled(column[c], a);
      Square grad_columns, grad_rows;
      grad_columns.fill(constant(0));
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) {
        pull_level(couplings.read[r][c], h, scaled(read[r], b), columns, grad_rows, grad_columns);
        add_scaled(grad_read[r], grad_rows, b);
        add_scaled(before, grad_rows, read[r]);
      }
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) {
        pull_level(couplings.query[q][c], h, scaled(query[q], until), columns, grad_rows, grad_columns);
        add_scaled(grad_query[q], grad_rows, until);
        const Square grad_until = scaled(grad_rows, query[q]);
        add_scaled(grad, grad_until, b);
        add_scaled(before, grad_until, decay);
      }
      add_scaled(grad_column[c], grad_columns, a);
      add_scaled(after, grad_columns, column[c]);
    }
  }
  all_of<chunk>([&](int j, int e) { grad[j][e] += total[j][e]; });
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) put_block(grad_read[r], of.read(r, 0), k);
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) put_block(grad_query[q], of.query(q, 0), k);
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) put_block(grad_column[c], of.column(c, 0), k);
  put_block(grad, of.decay(0, 0), k);
}

PARARNN_FUNCTION void pull_keys(const Chunk& at, const Decays&, const Couplings& couplings) {
#pragma unroll 1
  for (int k = warp_number(); k < keys / chunk; k += warps) pull_block(at, couplings, k);
}
PARARNN_FUNCTION void pull_decays(const Chunk&, const Decays&, const Couplings&) {}  // with their keys

}  // namespace pararnn
