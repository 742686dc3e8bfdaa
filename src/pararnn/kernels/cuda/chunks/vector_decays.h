// Couplings of the steps of a chunk by a decay for each key, of one state. Lanes carry columns from step to step, so that no
// product of decays is divided by another, and sums are of float32.
#pragma once
#include "chunk.h"

namespace pararnn {

static_assert(num_states == 1, "decays for each key");

constexpr bool scales_late = false;

struct Decays {
  PARARNN_FUNCTION explicit Decays(const Forms&) {}
};

// Puts couplings into scratch squares by [number][column]: those of queries, and in the upper triangle those of reads.
// Columns decay to the chunk's end.
//
// 8 pairs of columns, s and 15 - s, have 17 steps together; 4 lanes have every fourth run of 4 keys of a pair. Lanes that read
// at once have steps of which one is odd, or one step.
PARARNN_FUNCTION void walk_pairs(const KeyMemory& of) {
  const int quarter = threadIdx.x % 4, first = threadIdx.x % 32 / 4;
  real columns[num_columns][keys / chunk][4];
  const auto for_columns = [&](const auto& f) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c)
      PARARNN_UNROLL
      for (int k = 0; k < keys / chunk; ++k) f(numbers_at(of.column(c, 0), k), columns[c][k]);
  };
  const auto load = [&](int s) {
    for_columns([&](real* numbers, real (&x)[4]) {
      const Four four = four_at(numbers, place_of(s, 4 * quarter));
      PARARNN_UNROLL
      for (int e = 0; e < 4; ++e) x[e] = four.items[e];
    });
  };
  int s = first, t = first;
  load(s);
#pragma unroll 1
  for (int visit = 0; visit <= chunk; ++visit) {
    const int place = place_of(t, 4 * quarter);
    const auto sum_into = [&](char* row, real (&sums)[num_columns]) {
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) sums[c] = constant(0);
      PARARNN_UNROLL
      for (int k = 0; k < keys / chunk; ++k) {
        const Four x = four_at(numbers_at(row, k), place);
        PARARNN_UNROLL
        for (int c = 0; c < num_columns; ++c)
          PARARNN_UNROLL
          for (int e = 0; e < 4; ++e) sums[c] += x.items[e] * columns[c][k][e];
      }
    };
    real read[reads][num_columns], query[num_queries][num_columns];
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) sum_into(of.read(r, 0), read[r]);
    if (t > s) {
      PARARNN_UNROLL
      for (int k = 0; k < keys / chunk; ++k) {
        const Four decay = four_at(numbers_at(of.decay(0, 0), k), place);
        PARARNN_UNROLL
        for (int c = 0; c < num_columns; ++c)
          PARARNN_UNROLL
          for (int e = 0; e < 4; ++e) columns[c][k][e] *= decay.items[e];
      }
    }
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) sum_into(of.query(q, 0), query[q]);
    const auto put_sum = [&](real x, int number, int to, int from, bool exists) {
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (exists && quarter == number % 4) numbers_at(of.scratch, number)[place_of(to, from)] = x;
    };
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) put_sum(read[r][c], r * num_columns + c, s, t, s < t);
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) put_sum(query[q][c], q * num_columns + c, t, s, true);
    }
    if (++t == chunk) {
      for_columns([&](real* numbers, real (&x)[4]) { four_at(numbers, place_of(s, 4 * quarter)) = Four{{x[0], x[1], x[2], x[3]}}; });
      s = t = chunk - 1 - first;
      load(s);
    }
  }
}

PARARNN_FUNCTION void get_couplings(char* scratch, Couplings& y) {
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r)
      y.read[r][c].each([&](real& x, int i, int s) {
        x = numbers_at(scratch, r * num_columns + c)[place_of(s, lane_row() + 8 * i)];
      });
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) y.query[q][c] = get_rows(scratch, q * num_columns + c);
  }
  y.keep_earlier();
}

// Decays reads and queries from before the chunk; a lane has pairs of keys. `full`: for the decays over the chunk.
PARARNN_FUNCTION void decay_rows(const KeyMemory& of, char* full) {
#pragma unroll 1
  for (int pair = threadIdx.x % 32; pair < keys / 2; pair += 32) {
    const int block = pair / 8, key = pair % 8 * 2;
    real until[chunk + 1][2] = {{constant(1), constant(1)}};
    PARARNN_UNROLL
    for (int t = 0; t < chunk; ++t) {
      const Pack<real, 2> decay = two_at(numbers_at(of.decay(0, 0), block), place_of(t, key));
      PARARNN_UNROLL
      for (int e = 0; e < 2; ++e) until[t + 1][e] = until[t][e] * decay.items[e];
    }
    const auto scale = [&](char* row, int offset) {
      real* const numbers = numbers_at(row, block);
      Pack<real, 2> x[chunk];
      PARARNN_UNROLL
      for (int t = 0; t < chunk; ++t) x[t] = two_at(numbers, place_of(t, key));
      PARARNN_UNROLL
      for (int t = 0; t < chunk; ++t)
        two_at(numbers, place_of(t, key)) =
            Pack<real, 2>{{x[t].items[0] * until[t + offset][0], x[t].items[1] * until[t + offset][1]}};
    };
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) scale(of.read(r, 0), 0);
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) scale(of.query(q, 0), 1);
    if (full != nullptr) two_at(numbers_at(full), 2 * pair) = Pack<real, 2>{{until[chunk][0], until[chunk][1]}};
  }
}

// Puts operands in place of tiles: from the last keys on, as operands may be longer.
PARARNN_FUNCTION void put_operands(const KeyMemory& of) {
#pragma unroll 1
  for (int k = keys / chunk - 1; k >= 0; --k) {
    Square read[reads], column[num_columns], query[num_queries];
    const auto for_forms = [&](const auto& f) {
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) f(of.read(r, 0), read[r]);
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) f(of.column(c, 0), column[c]);
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) f(of.query(q, 0), query[q]);
    };
    for_forms([&](char* tile, Square& x) { x = get_rows(tile, k); });
    __syncwarp();
    for_forms([&](char* tile, Square& x) { put_at(operand_of(x), tile, k); });
  }
}

// Fills couplings of tiles in memory, and decays these; they are operands then.
PARARNN_FUNCTION void fill_couplings(const KeyMemory& of, const Decays&, Couplings& y, char* full) {
  __syncwarp();
  walk_pairs(of);
  __syncwarp();
  get_couplings(of.scratch, y);
  decay_rows(of, full);
  __syncwarp();
  put_operands(of);
}

PARARNN_FUNCTION Row late_before(const Decays&) { return Row{{1, 1}}; }
PARARNN_FUNCTION Row late_until(const Decays&) { return Row{{1, 1}}; }
PARARNN_FUNCTION Row late_after(const Decays&) { return Row{{1, 1}}; }

// Adds a lane's share of a sum over 16 values, by key.
template <int t> PARARNN_FUNCTION void add_states_product(Square& y, const Operand<chunk, t>& a, const Operand<chunk, t>& b) {
  add_scaled(y, numbers_of(a), numbers_of(b));
}
}  // namespace pararnn
