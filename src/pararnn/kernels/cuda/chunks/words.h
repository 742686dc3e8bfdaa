// Operands and tiles of a warp in memory: 16 bytes a lane for 16 channels and a term, which only the lane itself or
// products need to find.
#pragma once
#include "inputs.h"

namespace pararnn {

static_assert(terms >= 2, "sums take the place of operands, in ascending order");

struct alignas(16) Words { unsigned word[4]; };
template <int n, int t = terms> constexpr int operand_bytes = n / 16 * t * 32 * (int)sizeof(Words);
template <int n, int t, class T> PARARNN_FUNCTION void put(const Operand<n, t>& x, T* memory) {
  Words* words = reinterpret_cast<Words*>(memory) + threadIdx.x % 32;
  PARARNN_FOR(k, n / 16)
    PARARNN_FOR(i, t)
      words[(k * t + i) * 32] = Words{{x.x[2 * k][0].term[i], x.x[2 * k][1].term[i], x.x[2 * k + 1][0].term[i],
                                           x.x[2 * k + 1][1].term[i]}};
}
template <int t, class T> PARARNN_FUNCTION void put_at(const Operand<chunk, t>& x, T* memory, int k) {
  put(x, memory + k * operand_bytes<chunk, t>);
}
// The channels 16 k to 16 k + 15.
template <int t = terms, class T> PARARNN_FUNCTION Operand<chunk, t> get(const T* memory, int k = 0) {
  const Words* words = reinterpret_cast<const Words*>(memory) + threadIdx.x % 32;
  Operand<chunk, t> x;
  PARARNN_FOR(i, t) {
    const Words w = words[(k * t + i) * 32];
    PARARNN_FOR(h, 4) x.x[h / 2][h % 2].term[i] = w.word[h];
  }
  return x;
}
// 16 channels of a turned operand, as rows: the operand of a product on their left.
template <int n, int t> PARARNN_FUNCTION Operand<chunk, t> rows_of(const Operand<n, t>& turned, int block) {
  Operand<chunk, t> y;
  PARARNN_FOR(j, 2)
    PARARNN_FOR(h, 2) y.x[h][j] = turned.x[2 * block + j][h];
  return y;
}
// The same of an operand in memory.
template <class T> PARARNN_FUNCTION Operand<chunk> rows_of_stage(const T* memory, int block) {
  return rows_of(get(memory, block), 0);
}
// The operand of 16 channels of a tile.
template <int n> PARARNN_FUNCTION Operand<chunk> operand_at(const Tile<n>& x, int k) {
  Operand<chunk> y;
  PARARNN_FOR(h, 4)
    y.x[h / 2][h % 2] = pair_of(x[2 * k + h / 2][h % 2 * 2], x[2 * k + h / 2][h % 2 * 2 + 1]);
  return y;
}
// An operand's numbers.
template <int n, int t> PARARNN_FUNCTION Tile<n> numbers_of(const Operand<n, t>& x) {
  Tile<n> y;
  all_of<n>([&](int j, int e) {
    y[j][e] = bfloat16_of(x.x[j][e / 2].term[0], e % 2);
    PARARNN_UNROLL
    for (int i = 1; i < t; ++i) y[j][e] += bfloat16_of(x.x[j][e / 2].term[i], e % 2);
  });
  return y;
}

// States of a sequence and head, (K, V) or (V, K), as rows of values: those from 16 `block` on.
template <class T> PARARNN_FUNCTION void load_state(const T* source, int block, Tile<keys>& x) {
  x.each([&](real& y, int i, int key) {
    const int value = block * chunk + lane_row() + 8 * i;
    const bool exists = source != nullptr && key < size_keys && value < size_values;
    y = exists ? source[key * key_stride + value * value_stride] : constant(0);
  });
}
template <class T> PARARNN_FUNCTION void store_state(Tile<keys>& x, int block, T* target) {
  x.each([&](real& y, int i, int key) {
    const int value = block * chunk + lane_row() + 8 * i;
    if (key < size_keys && value < size_values) target[key * key_stride + value * value_stride] = y;
  });
}
constexpr int state_numbers = size_keys * size_values;

PARARNN_FUNCTION bool is_finite(real x) { return x - x == constant(0); }
template <int n> PARARNN_FUNCTION bool all_finite(Tile<n>& x) {
  real sum = constant(0);
  x.each([&](real& y, int, auto...) { sum += constant(0) * y; });
  return sum == constant(0);
}

template <int n> constexpr int tile_bytes_of = chunk * n * (int)sizeof(real);
// 16 channels of a tile in memory, in the place of an operand.
template <class T> PARARNN_FUNCTION Pack<real, 4>* packs_of(T* tile, int block) {
  return reinterpret_cast<Pack<real, 4>*>(tile) + block * 64 + threadIdx.x % 32;
}
template <class T> PARARNN_FUNCTION Square get_block(T* tile, int block) {
  Square x;
  PARARNN_FOR(j, 2) {
    const Pack<real, 4> pack = packs_of(tile, block)[32 * j];
    PARARNN_FOR(e, 4) x[j][e] = pack.items[e];
  }
  return x;
}
PARARNN_FUNCTION void put_block(const Square& x, char* tile, int block) {
  PARARNN_FOR(j, 2) packs_of(tile, block)[32 * j] = Pack<real, 4>{{x[j][0], x[j][1], x[j][2], x[j][3]}};
}
template <int n> PARARNN_FUNCTION void put_tile(const Tile<n>& x, char* tile) {
  PARARNN_FOR(k, n / chunk) {
    Square y;
    all_of<chunk>([&](int j, int e) { y[j][e] = x[2 * k + j][e]; });
    put_block(y, tile, k);
  }
}
// `stride`: from 16 channels to the next.
template <int n> PARARNN_FUNCTION void get_tile(Tile<n>& x, char* tile, int stride = tile_bytes_of<chunk>) {
  PARARNN_FOR(k, n / chunk) {
    const Square y = get_block(tile + k * stride, 0);
    all_of<chunk>([&](int j, int e) { x[2 * k + j][e] = y[j][e]; });
  }
}

// A number for each step, in memory.
constexpr int row_bytes = chunk * (int)sizeof(real);
PARARNN_FUNCTION void put_row(const Row& x, char* memory) {
  if (lane_column() != 0) return;
  real* const row = reinterpret_cast<real*>(memory);
  row[lane_row()] = x[0];
  row[lane_row() + 8] = x[1];
}
PARARNN_FUNCTION Row get_row(const char* memory) {
  const real* const row = reinterpret_cast<const real*>(memory);
  return Row{{row[lane_row()], row[lane_row() + 8]}};
}

}  // namespace pararnn
