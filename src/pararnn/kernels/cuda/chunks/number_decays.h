// Couplings of the steps of a chunk by decays that are numbers: products of vectors under masks of decays.
#pragma once
#include "products.h"

namespace pararnn {

// With one state, a step's decay may come after products: it is the same for all keys. Operands then stay as they are.
constexpr bool scales_late = num_states == 1;

// Decays of all pairs of steps, by levels of a middle between the two.
struct Decays {
  Factors decay;
  Products products;
  Square mask_before[num_states][num_states], mask[num_states][num_states];

  Decays() = default;
  PARARNN_FUNCTION explicit Decays(const Forms& f) {
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) {
        decay[i][j] = f.decay[i][j];
        mask_before[i][j].fill(constant(0));
      }
    start_products(decay, products);
    PARARNN_UNROLL
    for (int h = 1; h < chunk; h *= 2) {
      PARARNN_FOR(l, num_states)
        PARARNN_FOR(j, num_states) {
          real after[2][2];
          by_column(products.after[l][j], after);
          PARARNN_FOR(i, num_states)
            all_of<chunk>([&](int k, int e) {
              const int t = lane_row() + e / 2 * 8, s = 8 * k + lane_column() + e % 2;
              if (is_pair(h, t, s)) mask_before[i][j][k][e] += products.before[i][l][e / 2] * after[k][e % 2];
            });
        }
      join(products, h);
    }
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) {
        mask[i][j].each([&](real& x, int h, int s) { x = i == j && lane_row() + 8 * h == s ? constant(1) : constant(0); });
        PARARNN_FOR(l, num_states) add_scaled(mask[i][j], mask_before[l][j], decay[i][l]);
      }
  }
};

// The same in memory.
constexpr int gradient_stride = operand_bytes<chunk>;  // of 16 keys
constexpr int num_factors = num_states * num_states, kept_grams = num_factors, decay_shares = 4 * num_factors;
constexpr int kept_decay_bytes = num_factors * (2 * tile_bytes_of<chunk> + 4 * row_bytes);
template <class S, class R> PARARNN_FUNCTION void for_kept(Decays& x, char* memory, const S& square, const R& row) {
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(j, num_states) {
      char* const place = memory + (i * num_states + j) * (2 * tile_bytes_of<chunk> + 4 * row_bytes);
      char* const rows = place + 2 * tile_bytes_of<chunk>;
      square(x.mask_before[i][j], place, 0);
      square(x.mask[i][j], place, 1);
      row(x.decay[i][j], rows);
      row(x.products.before[i][j], rows + row_bytes);
      row(x.products.after[i][j], rows + 2 * row_bytes);
      row(x.products.total[i][j], rows + 3 * row_bytes);
    }
}
PARARNN_FUNCTION void keep_decays(Decays x, char* memory) {
  for_kept(x, memory, [](const Square& y, char* at, int block) { put_block(y, at, block); }, [](const Row& y, char* at) { put_row(y, at); });
}
PARARNN_FUNCTION Decays kept_decays(char* memory) {
  Decays x;
  for_kept(x, memory, [](Square& y, char* at, int block) { y = get_block(at, block); }, [](Row& y, char* at) { y = get_row(at); });
  return x;
}

// Inner products of reads and queries with columns.
struct Grams {
  Square read[reads][num_columns][num_states][num_states], query[num_queries][num_columns][num_states][num_states];
  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(c, num_columns)
      PARARNN_FOR(i, num_states)
        PARARNN_FOR(j, num_states) {
          PARARNN_FOR(r, num_reads) read[r][c][i][j].fill(constant(0));
          PARARNN_FOR(q, num_queries) query[q][c][i][j].fill(constant(0));
        }
  }
  // Adds the keys 16 k to 16 k + 15.
  PARARNN_FUNCTION void add(const KeyMemory& of, int k) {
    PARARNN_FOR(c, num_columns)
      PARARNN_FOR(j, num_states) {
        const Operand<chunk> column = get(of.column(c, j), k);
        PARARNN_FOR(i, num_states) {
          PARARNN_FOR(r, num_reads) add_inner(read[r][c][i][j], get(of.read(r, i), k), column);
          PARARNN_FOR(q, num_queries) add_inner(query[q][c][i][j], get(of.query(q, i), k), column);
        }
      }
  }
};

// Decays 16 keys of operands in memory: reads and queries from before the chunk, columns to its end.
PARARNN_FUNCTION void decay_operands(const KeyMemory& of, const Factors& until, const Products& x, int k) {
  Square all[num_states];
  const auto replace = [&](const auto& at, const auto& decayed) {
    PARARNN_FOR(i, num_states) all[i] = numbers_of(get(at(i), k));
    PARARNN_FOR(i, num_states) put_at(operand_of(decayed(i)), at(i), k);
  };
  PARARNN_FOR(r, num_reads)
    replace([&](int i) { return of.read(r, i); }, [&](int j) { return decayed_rows(all, x.before, j); });
  PARARNN_FOR(q, num_queries)
    replace([&](int i) { return of.query(q, i); }, [&](int j) { return decayed_rows(all, until, j); });
  PARARNN_FOR(c, num_columns)
    replace([&](int i) { return of.column(c, i); }, [&](int i) { return decayed_columns(x.after, all, i); });
}

// Fills couplings of operands in memory, and decays these unless decays come late.
PARARNN_FUNCTION void fill_couplings(const KeyMemory& of, const Decays& decays, Couplings& y, Grams& grams) {
  grams.clear();
  Factors until;
  decays_until(decays.decay, decays.products, until);
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) {
    grams.add(of, k);
    if constexpr (!scales_late) decay_operands(of, until, decays.products, k);
  }
  y.clear();
  PARARNN_FOR(c, num_columns)
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) {
        PARARNN_FOR(r, num_reads) add_scaled(y.read[r][c], grams.read[r][c][i][j], decays.mask_before[i][j]);
        PARARNN_FOR(q, num_queries) add_scaled(y.query[q][c], grams.query[q][c][i][j], decays.mask[i][j]);
      }
  y.keep_earlier();
}
// The same, and the decays over the chunk.
PARARNN_FUNCTION void fill_couplings(const KeyMemory& of, const Decays& decays, Couplings& y, char* full) {
  Grams grams;
  fill_couplings(of, decays, y, grams);
  if (threadIdx.x % 32 == 0)
    PARARNN_FOR(i, num_states * num_states)
      reinterpret_cast<real*>(full)[i * keys] = decays.products.total[i / num_states][i % num_states][0];
}

// The decay before a step, until it, and after it, where they come late; else 1.
PARARNN_FUNCTION Row late(const Row& x) { return scales_late ? x : Row{{1, 1}}; }
PARARNN_FUNCTION Row late_before(const Decays& x) { return late(x.products.before[0][0]); }
PARARNN_FUNCTION Row late_until(const Decays& x) { return late(scaled(x.decay[0][0], x.products.before[0][0])); }
PARARNN_FUNCTION Row late_after(const Decays& x) { return late(x.products.after[0][0]); }

// Adds a lane's share of a sum over 16 values and 16 keys: of the diagonal of a product.
template <int t> PARARNN_FUNCTION void add_states_product(Row& y, const Operand<chunk, t>& a, const Operand<chunk, t>& b) {
  Square products = inner(a, b);
  products.each([&](real& x, int i, int s) { y[i] += lane_row() + 8 * i == s ? x : constant(0); });
}
}  // namespace pararnn
