// Tiles of a warp in memory by step and key: lanes find the numbers of any step, 4 neighbouring keys by one instruction.
#pragma once
#include "words.h"

namespace pararnn {

using Four = Pack<real, 4>;
constexpr int square_numbers = chunk * chunk, square_bytes = tile_bytes_of<chunk>;

// Where a number of 16 keys is. Two steps fill the banks of memory; the next two are exchanged, so that lanes which put pairs
// of keys of four steps meet none twice.
PARARNN_FUNCTION int place_of(int step, int key) { return chunk * step + (key ^ 4 * (step & 2)); }
template <class T> PARARNN_FUNCTION real* numbers_at(T* tile, int block = 0) {
  return reinterpret_cast<real*>(tile) + block * square_numbers;
}
PARARNN_FUNCTION Four& four_at(real* numbers, int place) { return *reinterpret_cast<Four*>(numbers + place); }
PARARNN_FUNCTION Pack<real, 2>& two_at(real* numbers, int place) { return *reinterpret_cast<Pack<real, 2>*>(numbers + place); }

template <int n> PARARNN_FUNCTION void put_rows(const Tile<n>& x, char* tile) {
  PARARNN_FOR(j, n / 8)
    PARARNN_FOR(i, 2)
      two_at(numbers_at(tile, j / 2), place_of(lane_row() + 8 * i, j % 2 * 8 + lane_column())) =
          Pack<real, 2>{{x[j][2 * i], x[j][2 * i + 1]}};
}
PARARNN_FUNCTION Square get_rows(char* tile, int block = 0) {
  Square x;
  PARARNN_FOR(j, 2)
    PARARNN_FOR(i, 2) {
      const Pack<real, 2> two = two_at(numbers_at(tile, block), place_of(lane_row() + 8 * i, 8 * j + lane_column()));
      x[j][2 * i] = two.items[0];
      x[j][2 * i + 1] = two.items[1];
    }
  return x;
}
// Where `put_block` has a number.
PARARNN_FUNCTION int place_in_block(int step, int key) {
  return key / 8 * 128 + step % 8 * 16 + key % 8 / 2 * 4 + step / 8 * 2 + key % 2;
}

}  // namespace pararnn
