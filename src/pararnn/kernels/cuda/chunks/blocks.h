// Chunks of one state with decays that are numbers: operands of keys go through memory, 16 keys at a time, so that
// registers hold none of them. Decays come after products.
#pragma once
#include "chunk.h"

namespace pararnn {

#if !PARARNN_VECTOR_DECAY

// Where a warp has the operands of reads, columns and queries, each of all keys.
struct KeyOperands {
  char *read, *column, *query;
};

PARARNN_FUNCTION void put_forms(const Steps& steps, const KeyOperands& of) {
  {
    Forms f;
    forms_of(steps, f);
    f.adapt(steps);
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) put(operand_of(f.read[r][0]), of.read + r * operand_bytes<keys>);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) put(operand_of(f.column[c][0]), of.column + c * operand_bytes<keys>);
  }
  load_again();
  Forms f;
  forms_of(steps, f);
  f.adapt(steps);
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) put(operand_of(f.query[q][0]), of.query + q * operand_bytes<keys>);
  load_again();
}

// Couplings of operands in memory; `masks` has those of decays.
PARARNN_FUNCTION void fill_couplings_by_blocks(const KeyOperands& of, const Forms& f, Couplings& y) {
  fill_masks(f, y);
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][c].fill(constant(0));
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) y.query[q][c].fill(constant(0));
  }
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      const Operand<chunk> column = get(of.column + c * operand_bytes<keys>, k);
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) add_inner(y.read[r][c], get(of.read + r * operand_bytes<keys>, k), column);
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) add_inner(y.query[q][c], get(of.query + q * operand_bytes<keys>, k), column);
    }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) {
      y.read[r][c] = scaled(y.read[r][c], y.mask_before[0][0]);
      keep_where(y.read[r][c], is_before);
    }
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) {
      y.query[q][c] = scaled(y.query[q][c], y.mask[0][0]);
      keep_where(y.query[q][c], is_until);
    }
  }
}

// Puts what steps before the chunk reach in place of reads.
template <bool is_turned>
PARARNN_FUNCTION void put_reaches(const Forms& f, const Couplings& of, const Square (&inverse)[corrected][corrected], char* reads_at) {
  Operand<chunk> left[corrected][reads];
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c)
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) {
      Square x;
      x.fill(constant(0));
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) {
        real scale[2][2];
        by_column(scaled(f.gain[d][r], of.products.before[0][0]), scale);
        all_of<chunk>([&](int k, int e) { x[k][e] += inverse[c][d][k][e] * scale[k][e % 2]; });
      }
      left[c][r] = operand_of(x);
    }
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) {
    Square reach[corrected];
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) reach[c].fill(constant(0));
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) {
      const Operand<chunk> read = turned(get(reads_at + r * operand_bytes<keys>, k));
      PARARNN_UNROLL
      for (int c = 0; c < num_corrected; ++c) add_mixed(reach[c], left[c][r], read);
    }
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      const Operand<chunk> x = operand_of(reach[c]);
      put_at(is_turned ? turned(x) : x, reads_at + c * operand_bytes<keys>, k);
    }
  }
}

// Transposes the tiles of an operand in memory.
PARARNN_FUNCTION void turn(char* memory) {
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) put_at(turned(get(memory, k)), memory, k);
}

#endif

}  // namespace pararnn
