// Couplings of the steps of a chunk by a decay for each key, of one state. Lanes carry columns from step to step, so that no
// product of decays is divided by another, and sums are of float32.
#pragma once
#include "chunk.h"

namespace pararnn {

static_assert(num_states == 1, "decays for each key");

constexpr bool scales_late = false;

struct Decays {
  Decays() = default;
  PARARNN_FUNCTION explicit Decays(const Forms&) {}
};
constexpr int gradient_stride = tile_bytes_of<chunk>;  // of 16 keys: operands lie so too
constexpr int kept_decay_bytes = 0, kept_grams = 0, decay_shares = 0;
PARARNN_FUNCTION void keep_decays(const Decays&, char*) {}
PARARNN_FUNCTION Decays kept_decays(char*) { return Decays(); }

// A lane's share of the keys of its columns: every fourth run of 4 keys.
struct Columns {
  const KeyMemory& of;
  const int quarter;
  real x[num_columns][keys / chunk][4];

  PARARNN_FUNCTION int place(int step) const { return place_of(step, 4 * quarter); }
  template <class F> PARARNN_FUNCTION void for_runs(int step, const F& f) {
    PARARNN_FOR(c, num_columns)
      PARARNN_FOR(k, keys / chunk) f(four_at(numbers_at(of.column(c, 0), k), place(step)), x[c][k]);
  }
  PARARNN_FUNCTION void load(int step) {
    for_runs(step, [](const Four& four, real (&run)[4]) { unpack(four, run); });
  }
  PARARNN_FUNCTION void store(int step) {
    for_runs(step, [](Four& four, const real (&run)[4]) { four = Four{{run[0], run[1], run[2], run[3]}}; });
  }
  PARARNN_FUNCTION void decay(int step) {
    PARARNN_FOR(k, keys / chunk) {
      const Four decay = four_at(numbers_at(of.decay(0, 0), k), place(step));
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(e, 4) x[c][k][e] *= decay.items[e];
    }
  }
  // Sums over the lane's keys of a row with each column, by two chains of sums.
  PARARNN_FUNCTION void multiply(char* row, int step, real (&sums)[num_columns]) const {
    real chains[num_columns][2] = {};
    PARARNN_FOR(k, keys / chunk) {
      const Four four = four_at(numbers_at(row, k), place(step));
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(e, 4) chains[c][e % 2] += four.items[e] * x[c][k][e];
    }
    PARARNN_FOR(c, num_columns) sums[c] = chains[c][0] + chains[c][1];
  }
  // Puts the sums of 4 lanes into scratch squares.
  template <int rows> PARARNN_FUNCTION void put(real (&sums)[rows][num_columns], int count, int to, int from) const {
    PARARNN_UNROLL
    for (int by = 1; by < 4; by *= 2)
      PARARNN_FOR(i, count)
        PARARNN_FOR(c, num_columns) sums[i][c] += __shfl_xor_sync(~0u, sums[i][c], by);
    PARARNN_FOR(i, count)
      PARARNN_FOR(c, num_columns) {
        const int square = i * num_columns + c;
        if (quarter == square % 4) numbers_at(of.scratch, square)[place_of(to, from)] = sums[i][c];
      }
  }
};

// Puts couplings into scratch squares by [number][column]: those of queries, and above their diagonals those of reads. Columns
// decay to the chunk's end.
//
// 4 lanes have two columns, s and 15 - s, which have 15 later steps together. Lanes that read at once have one step, or an even
// one and an odd one (but once, where they change columns).
PARARNN_FUNCTION void walk_pairs(const KeyMemory& of) {
  const int first = threadIdx.x % 32 / 4, second = chunk - 1 - first;
  Columns columns{of, (int)threadIdx.x % 4};
  real read[reads][num_columns], query[num_queries][num_columns];
  const auto find = [&](int step) {
    PARARNN_FOR(q, num_queries) columns.multiply(of.query(q, 0), step, query[q]);
  };
  PARARNN_FOR(i, 2) {
    const int s = i == 0 ? second : first;
    columns.load(s);
    find(s);
    columns.put(query, num_queries, s, s);
  }
  int s = first, t = first + 1;
#pragma unroll 1
  for (int visit = 1; visit < chunk; ++visit) {
    PARARNN_FOR(r, num_reads) columns.multiply(of.read(r, 0), t, read[r]);
    columns.decay(t);
    find(t);
    columns.put(read, num_reads, s, t);
    columns.put(query, num_queries, t, s);
    if (++t == chunk) {
      columns.store(s);
      s = second;
      t = second + 1;
      columns.load(s);
    }
  }
}

PARARNN_FUNCTION void get_couplings(char* scratch, Couplings& y) {
  PARARNN_FOR(c, num_columns) {
    PARARNN_FOR(r, num_reads)
      y.read[r][c].each([&](real& x, int i, int s) {
        x = numbers_at(scratch, r * num_columns + c)[place_of(s, lane_row() + 8 * i)];
      });
    PARARNN_FOR(q, num_queries) y.query[q][c] = get_rows(scratch, q * num_columns + c);
  }
  y.keep_earlier();
}

// Decays reads and queries from before the chunk; a lane has pairs of keys. `full`: for the decays over the chunk.
PARARNN_FUNCTION void decay_rows(const KeyMemory& of, char* full) {
#pragma unroll 1
  for (int pair = threadIdx.x % 32; pair < keys / 2; pair += 32) {
    const int block = pair / 8, key = pair % 8 * 2;
    real until[chunk + 1][2] = {{constant(1), constant(1)}};
    PARARNN_FOR(t, chunk) {
      const Pack<real, 2> decay = two_at(numbers_at(of.decay(0, 0), block), place_of(t, key));
      PARARNN_FOR(e, 2) until[t + 1][e] = until[t][e] * decay.items[e];
    }
    const auto scale = [&](char* row, int offset) {
      real* const numbers = numbers_at(row, block);
      Pack<real, 2> x[chunk];
      PARARNN_FOR(t, chunk) x[t] = two_at(numbers, place_of(t, key));
      PARARNN_FOR(t, chunk)
        two_at(numbers, place_of(t, key)) =
            Pack<real, 2>{{x[t].items[0] * until[t + offset][0], x[t].items[1] * until[t + offset][1]}};
    };
    PARARNN_FOR(r, num_reads) scale(of.read(r, 0), 0);
    PARARNN_FOR(q, num_queries) scale(of.query(q, 0), 1);
    if (full != nullptr) two_at(numbers_at(full), 2 * pair) = Pack<real, 2>{{until[chunk][0], until[chunk][1]}};
  }
}

// Puts operands in place of tiles: from the last keys on, as operands may be longer.
PARARNN_FUNCTION void put_operands(const KeyMemory& of) {
#pragma unroll 1
  for (int k = keys / chunk - 1; k >= 0; --k) {
    Square read[reads], column[num_columns], query[num_queries];
    const auto for_forms = [&](const auto& f) {
      PARARNN_FOR(r, num_reads) f(of.read(r, 0), read[r]);
      PARARNN_FOR(c, num_columns) f(of.column(c, 0), column[c]);
      PARARNN_FOR(q, num_queries) f(of.query(q, 0), query[q]);
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
