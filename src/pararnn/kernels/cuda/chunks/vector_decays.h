// Couplings of the steps of a chunk by decays for each key: products of matrices, a level of the decays' products at a time.
#pragma once
#include "chunk.h"

namespace pararnn {

constexpr bool scales_late = false;

struct Decays {
  Decays() = default;
  PARARNN_FUNCTION explicit Decays(const Forms&) {}
};
constexpr int kept_decay_bytes = 0, kept_grams = 0, decay_shares = 0;
PARARNN_FUNCTION void keep_decays(const Decays&, char*) {}
PARARNN_FUNCTION Decays kept_decays(char*) { return Decays(); }

PARARNN_FUNCTION void get_decays(const KeyMemory& of, int k, Factors& decay) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) decay[i][j] = get_block(of.decay(i, j), k);
}

// Couplings of steps in both halves of blocks of 2 h steps, of 16 keys.
PARARNN_FUNCTION void add_level(const KeyMemory& of, const Factors& decay, const Products& x, int h, int k, Couplings& y) {
  Factors until;
  decays_until(decay, x, until);
  Square all[num_states];
  Operand<chunk> columns[num_columns][num_states];
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) all[i] = numbers_of(get(of.column(c, i), k));
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) columns[c][i] = operand_of(decayed_columns(x.after, all, i));
  }
  const auto add = [&](const auto& at, const Factors& p, Square (&sums)[num_columns]) {
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) all[i] = numbers_of(get(at(i), k));
    Operand<chunk> rows[num_states];
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) rows[j] = operand_of(decayed_rows(all, p, j));
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      Square level;
      level.fill(constant(0));
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) add_inner(level, rows[j], columns[c][j]);
      keep_where(level, [&](int t, int s) { return is_pair(h, t, s); });
      all_of<chunk>([&](int j, int e) { sums[c][j][e] += level[j][e]; });
    }
  };
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) add([&](int i) { return of.read(r, i); }, x.before, y.read[r]);
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) add([&](int i) { return of.query(q, i); }, until, y.query[q]);
}

// Adds what a step's query finds of what the step wrote, of 16 keys.
PARARNN_FUNCTION void add_same(const KeyMemory& of, int k, Couplings& y) {
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      Row same{{0, 0}};
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) {
        const Row x = sum_of_products(numbers_of(get(of.query(q, i), k)), numbers_of(get(of.column(c, i), k)));
        same[0] += x[0];
        same[1] += x[1];
      }
      y.query[q][c].each([&](real& x, int h, int s) { x += lane_row() + 8 * h == s ? same[h] : constant(0); });
    }
}

PARARNN_FUNCTION void fill_couplings(const KeyMemory& of, const Decays&, Couplings& y, char* full) {
  y.clear();
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) {
    Factors decay, until;
    Products x;
    get_decays(of, k, decay);
    start_products(decay, x);
    add_same(of, k, y);
#pragma unroll 1
    for (int h = 1; h < chunk; h *= 2) {
      add_level(of, decay, x, h, k, y);
      join(x, h);
    }
    decays_until(decay, x, until);
    decay_operands(of, until, x, k);
    if (full != nullptr && lane_row() == 0)
      PARARNN_UNROLL
      for (int i = 0; i < num_states * num_states; ++i)
        PARARNN_UNROLL
        for (int j = 0; j < 2; ++j)
          PARARNN_UNROLL
          for (int e = 0; e < 2; ++e)
            reinterpret_cast<real*>(full)[i * keys + k * chunk + 8 * j + lane_column() + e] =
                x.total[i / num_states][i % num_states][j][e];
  }
}

PARARNN_FUNCTION Row late_before(const Decays&) { return Row{{1, 1}}; }
PARARNN_FUNCTION Row late_until(const Decays&) { return Row{{1, 1}}; }
PARARNN_FUNCTION Row late_after(const Decays&) { return Row{{1, 1}}; }

// Adds a lane's share of a sum over 16 values, by key.
template <int t> PARARNN_FUNCTION void add_states_product(Square& y, const Operand<chunk, t>& a, const Operand<chunk, t>& b) {
  add_scaled(y, numbers_of(a), numbers_of(b));
}
}  // namespace pararnn
