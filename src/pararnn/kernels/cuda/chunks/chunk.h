// What a chunk makes of the forms of its steps: products of decays without a quotient, couplings of pairs of steps, and
// the inverse of the system of corrections, by substitution.
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
PARARNN_FUNCTION void operands_of(const Forms& f, Operands& y) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) y.column[c][i] = operand_of(f.column[c][i]);
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][i] = operand_of(f.read[r][i]);
    PARARNN_UNROLL
    for (int p = 0; p < num_queries; ++p) y.query[p][i] = operand_of(f.query[p][i]);
  }
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

// Decays that are numbers: their products of all pairs of steps, by levels of a middle between the two.
PARARNN_FUNCTION void fill_masks(const Forms& f, Couplings& y) {
  start_products(f, y.products);
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) y.mask_before[i][j].fill(constant(0));
  PARARNN_UNROLL
  for (int h = 1; h < chunk; h *= 2) {
    if constexpr (!vector_decay) {
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
    }
    join(y.products, h);
  }
  if constexpr (!vector_decay) {
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i)
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) {
        y.mask[i][j].each([&](real& x, int h, int s) { x = i == j && lane_row() + 8 * h == s ? constant(1) : constant(0); });
        PARARNN_UNROLL
        for (int l = 0; l < num_states; ++l) add_scaled(y.mask[i][j], y.mask_before[l][j], f.decay[i][l]);
      }
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

// Decays for each key: products of all pairs of steps as products of matrices, a level at a time.
PARARNN_FUNCTION void fill_couplings_by_levels(const Forms& f, Couplings& y) {
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
  PARARNN_UNROLL
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

PARARNN_FUNCTION void fill_couplings(const Forms& f, const Operands& of, Couplings& y) {
  if constexpr (vector_decay) {
    fill_couplings_by_levels(f, y);
    return;
  }
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

// sum_r gain_cr read_rd.
PARARNN_FUNCTION Square correction(const Forms& f, const Couplings& of, int c, int d) {
  Square y;
  y.fill(constant(0));
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) add_scaled(y, of.read[r][d], f.gain[c][r]);
  return y;
}

constexpr int system_size = chunk * corrected, system_row = system_size + 4;
constexpr int system_bytes = num_corrected ? system_size * system_row * (int)sizeof(real) : 0;

// The inverse of 1 - corrections, a column a lane. `memory` is the warp's.
PARARNN_FUNCTION void invert(const Forms& f, const Couplings& of, real* memory, Square (&inverse)[corrected][corrected]) {
  const auto at = [&](int c, int t, int d, int s) { return (c * chunk + t) * system_row + d * chunk + s; };
  const auto each = [&](const auto& visit) {
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) visit(c, d);
  };
  __syncwarp();
  each([&](int c, int d) {
    Square m = correction(f, of, c, d);
    m.each([&](real& x, int i, int s) { memory[at(c, lane_row() + 8 * i, d, s)] = x; });
  });
  __syncwarp();
  constexpr int per_lane = (system_size + 31) / 32;
  real x[per_lane][corrected][chunk];
  PARARNN_UNROLL
  for (int k = 0; k < per_lane; ++k) {
    const int column = threadIdx.x % 32 + 32 * k;
    PARARNN_UNROLL
    for (int t = 0; t < chunk; ++t)
      PARARNN_UNROLL
      for (int c = 0; c < num_corrected; ++c) {
        real sum = column == c * chunk + t ? constant(1) : constant(0);
        PARARNN_UNROLL
        for (int d = 0; d < num_corrected; ++d)
          PARARNN_UNROLL
          for (int s = 0; s < t; ++s) sum += memory[at(c, t, d, s)] * x[k][d][s];
        x[k][c][t] = sum;
      }
  }
  __syncwarp();
  PARARNN_UNROLL
  for (int k = 0; k < per_lane; ++k) {
    const int column = threadIdx.x % 32 + 32 * k;
    if (column < system_size) {
      PARARNN_UNROLL
      for (int c = 0; c < num_corrected; ++c)
        PARARNN_UNROLL
        for (int t = 0; t < chunk; ++t) memory[(c * chunk + t) * system_row + column] = x[k][c][t];
    }
  }
  __syncwarp();
  each([&](int c, int d) {
    inverse[c][d].each([&](real& x, int i, int s) { x = memory[at(c, lane_row() + 8 * i, d, s)]; });
  });
}

// Operands of a warp, where others read them: 16 bytes a lane for two tiles and a term.
struct Words { unsigned word[4]; };
template <int n> constexpr int operand_bytes = n / 16 * terms * 32 * (int)sizeof(Words);
template <int n, class T> PARARNN_FUNCTION void put(const Operand<n>& x, T* memory) {
  Words* words = reinterpret_cast<Words*>(memory) + threadIdx.x % 32;
  PARARNN_UNROLL
  for (int k = 0; k < n / 16; ++k)
    PARARNN_UNROLL
    for (int i = 0; i < terms; ++i)
      words[(k * terms + i) * 32] = Words{{x.x[2 * k][0].term[i], x.x[2 * k][1].term[i], x.x[2 * k + 1][0].term[i],
                                           x.x[2 * k + 1][1].term[i]}};
}
// The channels 16 k to 16 k + 15.
template <class T> PARARNN_FUNCTION Operand<chunk> get(const T* memory, int k = 0) {
  const Words* words = reinterpret_cast<const Words*>(memory) + threadIdx.x % 32;
  Operand<chunk> x;
  PARARNN_UNROLL
  for (int i = 0; i < terms; ++i) {
    const Words w = words[(k * terms + i) * 32];
    PARARNN_UNROLL
    for (int h = 0; h < 4; ++h) x.x[h / 2][h % 2].term[i] = w.word[h];
  }
  return x;
}
template <int n, class T> PARARNN_FUNCTION Operand<n> get_all(const T* memory) {
  Operand<n> y;
  PARARNN_UNROLL
  for (int k = 0; k < n / 16; ++k) {
    const Operand<chunk> x = get(memory, k);
    PARARNN_UNROLL
    for (int h = 0; h < 4; ++h) y.x[2 * k + h / 2][h % 2] = x.x[h / 2][h % 2];
  }
  return y;
}
// 16 channels of a turned operand, as rows: the operand of a product on their left.
template <int n> PARARNN_FUNCTION Operand<chunk> rows_of(const Operand<n>& turned, int block) {
  Operand<chunk> y;
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j)
    PARARNN_UNROLL
    for (int h = 0; h < 2; ++h) y.x[h][j] = turned.x[2 * block + j][h];
  return y;
}
// The same of an operand in memory.
template <class T> PARARNN_FUNCTION Operand<chunk> rows_of_stage(const T* memory, int block) {
  return rows_of(get(memory, block), 0);
}
template <int n> PARARNN_FUNCTION Operand<chunk> block_of(const Operand<n>& x, int k) {
  Operand<chunk> y;
  PARARNN_UNROLL
  for (int h = 0; h < 4; ++h) y.x[h / 2][h % 2] = x.x[2 * k + h / 2][h % 2];
  return y;
}

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
PARARNN_FUNCTION Tile<keys> query_of(const Forms& f, const Couplings& of, int p, int j) {
  Factor until[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) until[i][j] = product_of(f.decay, of.products.before, i, j);
  return decayed_rows(f.query[p], until, j);
}

}  // namespace pararnn
