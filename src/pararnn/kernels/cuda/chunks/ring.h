// A ring of chunks in shared memory: a warp prepares every so-many-th chunk into a stage of its own, and warps that hold
// states read all stages in order.
//
// Needs, in addition to chunk.h: producers (warps that prepare, and stages), stage_bytes.
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

// The decays over a chunk, by [state to][state from][key].
PARARNN_FUNCTION void put_full(const Products& products, char* memory) {
  real* full = reinterpret_cast<real*>(memory);
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      real* const target = full + (i * num_states + j) * keys;
      if constexpr (vector_decay) {
        if (lane_row() == 0)
          PARARNN_UNROLL
          for (int k = 0; k < keys / 8; ++k)
            PARARNN_UNROLL
            for (int e = 0; e < 2; ++e) target[8 * k + lane_column() + e] = products.total[i][j][k][e];
      } else if (threadIdx.x % 32 == 0) {
        target[0] = products.total[i][j][0];
      }
    }
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
  x.each([&](real& y, int, auto...) { sum += y - y; });
  return sum == constant(0);
}

}  // namespace pararnn
