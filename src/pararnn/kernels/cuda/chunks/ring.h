// A ring of chunks in shared memory: a warp prepares every so-many-th chunk into a stage of its own, and warps that hold
// states read all stages in order.
//
// Needs, in addition to chunk.h: producers (warps that prepare, and stages), stage_bytes, key_stride,
// value_stride (of a state in memory).
#pragma once
#include "chunk.h"

namespace pararnn {

constexpr int readers = blocks_of_values, ring_warps = producers + readers;
constexpr int barrier_bytes = (2 * producers * (int)sizeof(Barrier) + 15) / 16 * 16;
constexpr int full_bytes = num_states * num_states * keys * (int)sizeof(real);  // decays over a chunk, by key

struct Ring {
  char* const stages;
  Barrier *const filled, *const emptied;

  PARARNN_FUNCTION explicit Ring(char* memory)
      : stages(memory + barrier_bytes), filled(reinterpret_cast<Barrier*>(memory)), emptied(filled + producers) {
    if (threadIdx.x == 0)
      for (int i = 0; i < producers; ++i) {
        open_barrier(filled[i], 32);
        open_barrier(emptied[i], 32 * readers);
      }
    __syncthreads();
  }
  PARARNN_FUNCTION char* stage(int i) const { return stages + i * stage_bytes; }
  PARARNN_FUNCTION real* scratch() const {
    return reinterpret_cast<real*>(stages + producers * stage_bytes + (warp_number() - readers) * system_bytes);
  }
  static PARARNN_FUNCTION void await(Barrier& barrier, int number) {
    while (!has_arrived(barrier, number)) {}
  }
};
constexpr int ring_bytes = barrier_bytes + producers * (stage_bytes + system_bytes);

// A decay over a chunk, by key if it depends on the key.
PARARNN_FUNCTION void put_total(const Row& x, real* target) {
  if (threadIdx.x % 32 == 0) target[0] = x[0];
}
PARARNN_FUNCTION void put_total(const Tile<keys>& x, real* target) {
  if (lane_row() != 0) return;
  PARARNN_UNROLL
  for (int k = 0; k < keys / 8; ++k)
    PARARNN_UNROLL
    for (int e = 0; e < 2; ++e) target[8 * k + lane_column() + e] = x[k][e];
}
// All of them, by [state to][state from].
PARARNN_FUNCTION void put_full(const Products& products, char* memory) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j)
      put_total(products.total[i][j], reinterpret_cast<real*>(memory) + (i * num_states + j) * keys);
}
// y += x times the decay from `from` to `to`.
PARARNN_FUNCTION void add_decayed(Tile<keys>& y, const Tile<keys>& x, const char* memory, int to, int from) {
  const real* full = reinterpret_cast<const real*>(memory) + (to * num_states + from) * keys;
  PARARNN_UNROLL
  for (int k = 0; k < keys / 8; ++k)
    PARARNN_UNROLL
    for (int e = 0; e < 2; ++e) {
      const real decay = full[vector_decay ? 8 * k + lane_column() + e : 0];
      y[k][e] += x[k][e] * decay;
      y[k][e + 2] += x[k][e + 2] * decay;
    }
}

// Scales the columns of a square by numbers of steps.
PARARNN_FUNCTION void scale_columns(Square& x, const char* memory) {
  const real* scale = reinterpret_cast<const real*>(memory);
  x.each([&](real& y, int, int s) { y *= scale[s]; });
}

}  // namespace pararnn
