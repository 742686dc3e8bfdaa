// Gradients of forms of keys, and of a decay for each key, of one state: lanes carry columns from step to step, and their
// gradients back. The decays from before the chunk are one column more, which begins as 1.
#pragma once
#include "chunk.h"

namespace pararnn {

static_assert(num_states == 1, "decays for each key");

PARARNN_FUNCTION void get_decay_gradient(const Chunk& at, int i, int j, Tile<keys>& x) { get_tile(x, at.keys_memory().decay(i, j)); }

PARARNN_FUNCTION void couple(const Chunk& at, const Decays& decays, Couplings& y) {
  fill_couplings(at.keys_memory(), decays, y, static_cast<char*>(nullptr));
}

// A lane has a key, and of each column those of even steps, or of odd ones: 2 m + half.
constexpr int num_rows = num_reads + num_queries, per_half = chunk / 2;
constexpr int steps_at_once = 4, blocks_of_steps = chunk / steps_at_once;

// Puts gradients of couplings, by [row][column]: [t][half][m].
PARARNN_FUNCTION void put_couplings(const Couplings& of, char* memory) {
  const auto put = [&](const Square& x, int square) {
    all_of<chunk>([&](int j, int e) {
      const int m = 4 * j + lane_column() / 2;
      numbers_at(memory, square)[place_of(lane_row() + e / 2 * 8, e % 2 * per_half + m)] = x[j][e];
    });
  };
  PARARNN_FOR(c, num_columns) {
    PARARNN_FOR(r, num_reads) put(of.read[r][c], r * num_columns + c);
    PARARNN_FOR(q, num_queries) put(of.query[q][c], (num_reads + q) * num_columns + c);
  }
}

// Calls f(m, gradient of the coupling of step t with step 2 m + half) for the first `count` of these.
template <class F> PARARNN_FUNCTION void for_pairs(char* couplings, int row, int c, int t, int half, int count, const F& f) {
  real* const numbers = numbers_at(couplings, row * num_columns + c);
  PARARNN_UNROLL
  for (int m = 0; m < count; m += 4) {
    const Four four = four_at(numbers, place_of(t, half * per_half + m));
    PARARNN_FOR(e, 4)
      if (m + e < count) f(m + e, four.items[e]);
  }
}

// Sum over 16 steps, of a lane's key.
PARARNN_FUNCTION real sum_of_key(const Square& x, int key) {
  real y = constant(0);
  PARARNN_FOR(j, 2)
    PARARNN_FOR(e, 2) {
      const real sum = __shfl_sync(~0u, sum_of_column(x[j][e] + x[j][e + 2]), key % 8 / 2);
      y = key / 8 == j && key % 2 == e ? sum : y;
    }
  return y;
}

// The sum of both halves of a pair: the first one's in the first half, the second one's in the other.
PARARNN_FUNCTION real exchange(real first, real second, int half) {
  return (half ? second : first) + __shfl_xor_sync(~0u, half ? first : second, chunk);
}

// Pulls back to 16 keys, and puts gradients in place of reads, queries, columns and decays. `couplings`: their gradients, as
// put above. `scratch`: for the sums of these keys.
PARARNN_FUNCTION void pull_block(const Chunk& at, char* couplings, char* scratch, int k) {
  const KeyMemory of = at.keys_memory();
  const int key = threadIdx.x % chunk, half = threadIdx.x % 32 / chunk;
  const auto row_of = [&](int i) { return i < num_reads ? of.read(i, 0) : of.query(i - num_reads, 0); };
  const auto number = [&](char* tile, int t) { return numbers_at(tile, k)[place_of(t, key)]; };
  const auto sum_of = [&](int i, int t) { return numbers_at(scratch, i)[place_of(t, key)]; };
  real through;  // gradient of the decays from before the chunk until a step
  {
    KeySums sums;
    add_key_sums(at, k, sums);
    __syncwarp();
    PARARNN_FOR(r, num_reads) put_rows(sums.read[r][0], scratch + r * square_bytes);
    PARARNN_FOR(q, num_queries) put_rows(sums.query[q][0], scratch + (num_reads + q) * square_bytes);
    PARARNN_FOR(c, num_columns) put_rows(sums.column[c][0], scratch + (num_rows + c) * square_bytes);
    through = sum_of_key(sums.total[0][0], key);
    __syncwarp();
  }

  // Forward: columns, and with them the gradients of rows, of which a half keeps every other row. Before each 4 steps columns
  // are kept.
  real kept[num_columns][blocks_of_steps][per_half], kept_product[blocks_of_steps], grad_row[(num_rows + 1) / 2][chunk];
  {
    real columns[num_columns][per_half], product = constant(1);
    PARARNN_FOR(t, chunk) {
      if (t % steps_at_once == 0) {
        kept_product[t / steps_at_once] = half ? constant(0) : product;
        PARARNN_FOR(c, num_columns)
          PARARNN_FOR(m, t / 2) kept[c][t / steps_at_once][m] = columns[c][m];
      }
      real sums[num_rows + 1];
      sums[num_rows] = constant(0);
      const auto sum_row = [&](int i, int count) {
        sums[i] = constant(0);
        PARARNN_FOR(c, num_columns)
          for_pairs(couplings, i, c, t, half, count, [&](int m, real x) { sums[i] += x * columns[c][m]; });
      };
      PARARNN_FOR(i, num_reads) sum_row(i, (t + 1) / 2);
      const real before = product, decay = number(of.decay(0, 0), t);
      product *= decay;
      PARARNN_FOR(c, num_columns) {
        const real x = number(of.column(c, 0), t);
        PARARNN_FOR(m, (t + 1) / 2) columns[c][m] *= decay;
        columns[c][t / 2] = half == t % 2 ? x : t % 2 ? columns[c][t / 2] : constant(0);
      }
      PARARNN_UNROLL
      for (int i = num_reads; i < num_rows; ++i) sum_row(i, t / 2 + 1);
      PARARNN_UNROLL
      for (int i = 0; i < num_rows; i += 2) {
        const int row = half && i + 1 < num_rows ? i + 1 : i;
        grad_row[i / 2][t] = exchange(sums[i], sums[i + 1], half) + sum_of(row, t) * (row < num_reads ? before : product);
      }
    }
  }

  // Back: gradients of columns, which stay as they are once a column has begun.
  real grad_column[num_columns][per_half], grad_decay[per_half], odd;
  PARARNN_FOR(c, num_columns)
    PARARNN_FOR(m, per_half) grad_column[c][m] = sum_of(num_rows + c, 2 * m + half);
  PARARNN_UNROLL
  for (int block = blocks_of_steps - 1; block >= 0; --block) {
    const int start = block * steps_at_once;
    real decay[steps_at_once], product[steps_at_once];  // of the block's earlier decays
    PARARNN_FOR(i, steps_at_once) {
      decay[i] = number(of.decay(0, 0), start + i);
      product[i] = i == 0 ? constant(1) : product[i - 1] * decay[i - 1];
    }
    real first[num_columns][steps_at_once], last[num_columns];  // columns that begin in the block, before a step
    PARARNN_FOR(c, num_columns) {
      char* const column = of.column(c, 0);
      const real x[3] = {number(column, start), number(column, start + 1), number(column, start + 2)};
      first[c][1] = half ? constant(0) : x[0];
      first[c][2] = half ? x[1] : x[0] * decay[1];
      first[c][3] = first[c][2] * decay[2];
      last[c] = half ? constant(0) : x[2];
    }
    PARARNN_UNROLL
    for (int i = steps_at_once - 1; i >= 0; --i) {
      const int t = start + i;
      PARARNN_UNROLL
      for (int row = num_reads; row < num_rows; ++row) {
        const real query = number(row_of(row), t);
        through += sum_of(row, t) * query;
        PARARNN_FOR(c, num_columns)
          for_pairs(couplings, row, c, t, half, t / 2 + 1, [&](int m, real x) { grad_column[c][m] += x * query; });
      }
      real sum = kept_product[block] * through;
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(m, start / 2) sum += kept[c][block][m] * grad_column[c][m];
      sum *= product[i];
      PARARNN_FOR(c, num_columns) {
        if (i > 0) sum += first[c][i] * grad_column[c][start / 2];
        if (i == 3) sum += last[c] * grad_column[c][start / 2 + 1];
      }
      if (t % 2) odd = sum;
      else grad_decay[t / 2] = exchange(sum, odd, half);
      through *= decay[i];
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(m, (t + 1) / 2) grad_column[c][m] *= 2 * m + 1 == t && half ? constant(1) : decay[i];
      PARARNN_FOR(row, num_reads) {
        const real read = number(row_of(row), t);
        through += sum_of(row, t) * read;
        PARARNN_FOR(c, num_columns)
          for_pairs(couplings, row, c, t, half, (t + 1) / 2, [&](int m, real x) { grad_column[c][m] += x * read; });
      }
    }
  }
  __syncwarp();
  const auto put_number = [&](real x, char* tile, int t) { numbers_at(tile, k)[place_in_block(t, key)] = x; };
  PARARNN_UNROLL
  for (int i = 0; i < num_rows; i += 2)
    if (i + half < num_rows)
      PARARNN_FOR(t, chunk) put_number(grad_row[i / 2][t], row_of(i + half), t);
  PARARNN_FOR(m, per_half) {
    PARARNN_FOR(c, num_columns) put_number(grad_column[c][m], of.column(c, 0), 2 * m + half);
    put_number(grad_decay[m], of.decay(0, 0), 2 * m + half);
  }
}

PARARNN_FUNCTION void pull_keys(const Chunk& at, const Decays&, const Couplings& couplings) {
  char* const scratch = at.keys_memory().scratch;
  if (warp_number() == 0) put_couplings(couplings, scratch);
  __syncthreads();
#pragma unroll 1
  for (int k = warp_number(); k < keys / chunk; k += warps) pull_block(at, scratch, at.share(warp_number()), k);
  __syncwarp();
}
PARARNN_FUNCTION void pull_decays(const Chunk&, const Decays&, const Couplings&) {}  // with their keys

}  // namespace pararnn
