// Replaces kernels/cuda/tiles.h on a CPU: a product of tiles is a loop over a warp's fragments.
#pragma once
#include "machine.h"

#define PARARNN_LAUNCH_MEMORY(name) static thread_local char name[227 * 1024] __attribute__((aligned(16)))

namespace pararnn {

inline char* shared_bytes_at(unsigned address) { return &emulator::anchor + (int)address; }

constexpr int tile_bytes = 128, lanes = 32;

inline int lane() { return threadIdx.x % lanes; }
inline int warp() { return threadIdx.x / lanes; }

inline void load_tiles(unsigned tiles, unsigned (&fragment)[2]) {
  const int lane = emulated_lane();
  for (int i = 0; i < 2; ++i)
    std::memcpy(&fragment[i], shared_bytes_at(tiles + i * tile_bytes + lane * 4), 4);
}

inline void load_pairs(unsigned tiles, unsigned (&first)[2], unsigned (&second)[2]) {
  load_tiles(tiles, first);
  load_tiles(tiles + 2 * tile_bytes, second);
}

inline void store_transposed(unsigned tile, unsigned fragment) {
  const int lane = emulated_lane();
  for (int i = 0; i < 2; ++i) {
    const unsigned short half = (unsigned short)(fragment >> 16 * i);
    std::memcpy(shared_bytes_at(tile + (lane % 4 * 2 + i) * 16 + lane / 4 * 2), &half, 2);
  }
}

inline unsigned transpose(unsigned fragment) {
  const auto* all = emulator::show_fragments({fragment});
  const int lane = emulated_lane();
  unsigned transposed = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = all[(lane % 4 * 2 + i) * 4 + lane / 4 / 2][0];
    transposed |= (word >> lane / 4 % 2 * 16 & 0xffffu) << 16 * i;
  }
  return transposed;
}

// The number of a fragment's column, in the lower or upper half of a word.
inline float bfloat16_at(uint32_t word, int column) {
  return __uint_as_float(column % 2 ? word & 0xffff0000u : word << 16);
}

inline void add_product(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const auto* all = emulator::show_fragments({a[0], a[1], a[2], a[3], b[0], b[1]});
  const int lane = emulated_lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2, upper = i / 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t own = all[row * 4 + k % 8 / 2][upper + 2 * (k / 8)];
      const uint32_t other = all[column * 4 + k % 8 / 2][4 + k / 8];
      sum[i] += bfloat16_at(own, k) * bfloat16_at(other, k);
    }
  }
}

}  // namespace pararnn
