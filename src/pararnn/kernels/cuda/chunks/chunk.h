// What a chunk makes of the forms of its steps: couplings of pairs of steps, and the inverse of the system of corrections
// by substitution. Forms of keys go through memory, 16 keys at a time, so that registers hold none of them.
#pragma once
#include "rows.h"

namespace pararnn {

using Gains = Row[corrected][reads];

PARARNN_FUNCTION bool is_before(int t, int s) { return s < t; }
PARARNN_FUNCTION bool is_until(int t, int s) { return s <= t; }

// Couplings of the steps of a chunk: of a read, or a query, at t with what s wrote.
struct Couplings {
  Square read[reads][num_columns], query[num_queries][num_columns];
  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(c, num_columns) {
      PARARNN_FOR(r, num_reads) read[r][c].fill(constant(0));
      PARARNN_FOR(q, num_queries) query[q][c].fill(constant(0));
    }
  }
  PARARNN_FUNCTION void keep_earlier() {
    PARARNN_FOR(c, num_columns) {
      PARARNN_FOR(r, num_reads) keep_where(read[r][c], is_before);
      PARARNN_FOR(q, num_queries) keep_where(query[q][c], is_until);
    }
  }
};

// Memory of a warp: operands of reads, columns and queries by [number][state], and decays of keys by [to][from]. With decays of
// keys, tiles by step and key come before operands.
struct KeyMemory {
  char *reads, *columns, *queries, *decays, *scratch;
  PARARNN_FUNCTION char* read(int r, int i) const { return reads + (r * num_states + i) * operand_bytes<keys>; }
  PARARNN_FUNCTION char* column(int c, int i) const { return columns + (c * num_states + i) * operand_bytes<keys>; }
  PARARNN_FUNCTION char* query(int q, int i) const { return queries + (q * num_states + i) * operand_bytes<keys>; }
  PARARNN_FUNCTION char* decay(int i, int j) const { return decays + (i * num_states + j) * tile_bytes_of<keys>; }
};
constexpr int decay_bytes = PARARNN_VECTOR_DECAY ? num_states * num_states * tile_bytes_of<keys> : 0;

PARARNN_FUNCTION void put_decay(const Row&, char*) {}
PARARNN_FUNCTION void put_decay(const Tile<keys>& x, char* memory) { put_rows(x, memory); }
PARARNN_FUNCTION void put_form(const Tile<keys>& x, char* memory) {
  if constexpr (vector_decay) put_rows(x, memory);
  else put(operand_of(x), memory);
}

// More than 96 numbers of a lane spill at a branch.
constexpr bool forms_fit = !vector_decay || (num_reads + num_columns + 1) * keys <= 192;

// Puts the forms of keys that writes need.
PARARNN_FUNCTION void put_keys(const Steps& steps, const KeyMemory& of) {
  if (vector_decay) __syncwarp();  // tiles lie across what lanes have of operands
  Forms f;
  forms_of_keys(steps, f);
  f.adapt(steps, forms_fit);
  PARARNN_FOR(i, num_states) {
    PARARNN_FOR(r, num_reads) put_form(f.read[r][i], of.read(r, i));
    PARARNN_FOR(c, num_columns) put_form(f.column[c][i], of.column(c, i));
    PARARNN_FOR(j, num_states) put_decay(f.decay[i][j], of.decay(i, j));
  }
  load_again();
}
// Puts queries.
PARARNN_FUNCTION void put_queries(const Steps& steps, const KeyMemory& of) {
  Forms f;
  forms_of_queries(steps, f);
  f.adapt(steps);
  PARARNN_FOR(i, num_states) {
    PARARNN_FOR(q, num_queries) put_form(f.query[q][i], of.query(q, i));
  }
  load_again();
}

// Puts all forms of keys, and computes those that are numbers. Gates are not read after it.
PARARNN_FUNCTION void put_forms(const Steps& steps, const KeyMemory& of, Forms& numbers) {
  put_keys(steps, of);
  put_queries(steps, of);
  forms_of_numbers(steps, numbers);
  numbers.adapt(steps);
  __syncwarp();
}

// sum_r gain_cr read_rd.
PARARNN_FUNCTION Square correction(const Gains& gain, const Couplings& of, int c, int d) {
  Square y;
  y.fill(constant(0));
  PARARNN_FOR(r, num_reads) add_scaled(y, of.read[r][d], gain[c][r]);
  return y;
}

constexpr int system_size = chunk * corrected, system_row = system_size + 4;
constexpr int system_bytes = num_corrected ? system_size * system_row * (int)sizeof(real) : 0;
// With decays of keys: squares of couplings, or of their gradients.
constexpr int coupling_squares = PARARNN_PASS == 2 ? (num_reads + num_queries) * num_columns
                                                   : (num_reads > num_queries ? num_reads : num_queries) * num_columns;
constexpr int scratch_squares = vector_decay ? coupling_squares : 0;
constexpr int scratch_bytes = scratch_squares * square_bytes > system_bytes ? scratch_squares * square_bytes : system_bytes;

// The inverse of 1 - corrections, a column a lane. `memory` is the warp's.
PARARNN_FUNCTION void invert(const Gains& gain, const Couplings& of, real* memory, Square (&inverse)[corrected][corrected]) {
  const auto at = [&](int c, int t, int d, int s) { return (c * chunk + t) * system_row + d * chunk + s; };
  const auto for_blocks = [&](const auto& visit) {
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(d, num_corrected) visit(c, d);
  };
  __syncwarp();
  for_blocks([&](int c, int d) {
    Square m = correction(gain, of, c, d);
    m.each([&](real& x, int i, int s) { memory[at(c, lane_row() + 8 * i, d, s)] = x; });
  });
  __syncwarp();
  constexpr int per_lane = (system_size + 31) / 32;
  real x[per_lane][corrected][chunk];
  PARARNN_FOR(k, per_lane) {
    const int column = threadIdx.x % 32 + 32 * k;
    PARARNN_FOR(t, chunk)
      PARARNN_FOR(c, num_corrected) {
        real sum = column == c * chunk + t ? constant(1) : constant(0);
        PARARNN_FOR(d, num_corrected)
          PARARNN_FOR(s, t) sum += memory[at(c, t, d, s)] * x[k][d][s];
        x[k][c][t] = sum;
      }
  }
  __syncwarp();
  PARARNN_FOR(k, per_lane) {
    const int column = threadIdx.x % 32 + 32 * k;
    if (column < system_size) {
      PARARNN_FOR(c, num_corrected)
        PARARNN_FOR(t, chunk) memory[(c * chunk + t) * system_row + column] = x[k][c][t];
    }
  }
  __syncwarp();
  for_blocks([&](int c, int d) {
    inverse[c][d].each([&](real& x, int i, int s) { x = memory[at(c, lane_row() + 8 * i, d, s)]; });
  });
}

// What corrections leave for values.
struct Corrections {
  Square squares[corrected][corrected];
  Operand<chunk> inverse[corrected][corrected], of_pure[corrected][pure];
};
PARARNN_FUNCTION void fill_corrections(const Gains& gain, const Couplings& of, real* scratch, Corrections& y) {
  invert(gain, of, scratch, y.squares);
  PARARNN_FOR(c, num_corrected) {
    PARARNN_FOR(d, num_corrected) y.inverse[c][d] = operand_of(y.squares[c][d]);
    PARARNN_FOR(d, num_pure) y.of_pure[c][d] = operand_of(correction(gain, of, c, num_corrected + d));
  }
}

// The gradient of an answer.
template <class P> PARARNN_FUNCTION Tile<values> grad_answers_of(const P& p, const Steps& steps, int query) {
  Tile<values> x;
  const answer_io* source = p.grad_answers + query * p.answer_stride + steps.span.row * p.answer_row +
                            steps.span.head * p.answer_head;
  x.each([&](real& y, int i, int value) {
    const bool exists = steps.valid[i] && value < size_values;
    y = exists ? widen(source[steps.time[i] * p.answer_time + value]) : constant(0);
  });
  return x;
}

}  // namespace pararnn

#if PARARNN_VECTOR_DECAY
#include "vector_decays.h"
#else
#include "number_decays.h"
#endif
