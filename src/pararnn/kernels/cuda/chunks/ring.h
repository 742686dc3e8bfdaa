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
// Decays states over a chunk; `back`: their adjoint.
PARARNN_FUNCTION void decay_states(Tile<keys> (&x)[num_states], const char* memory, bool back) {
  const real* full = reinterpret_cast<const real*>(memory);
  PARARNN_UNROLL
  for (int k = 0; k < keys / 8; ++k)
    PARARNN_UNROLL
    for (int e = 0; e < 4; ++e) {
      real y[num_states];
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) {
        y[i] = constant(0);
        PARARNN_UNROLL
        for (int j = 0; j < num_states; ++j) {
          const int place = (back ? j * num_states + i : i * num_states + j) * keys;
          y[i] += x[j][k][e] * full[place + (vector_decay ? 8 * k + lane_column() + e % 2 : 0)];
        }
      }
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) x[i][k][e] = y[i];
    }
}
// The channels 16 k to 16 k + 15 of y[t] += sum over s of a[t][s] x[s]; `x` has these channels, and is turned.
template <int t, int u>
PARARNN_FUNCTION void add_mixed_at(Tile<keys>& y, const Operand<chunk, t>& a, const Operand<chunk, u>& x, int k) {
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j)
    add_terms(y.x[2 * k + j], a.x[0][0], a.x[0][1], a.x[1][0], a.x[1][1], x.x[j][0], x.x[j][1]);
}

// Scales the columns of a square by numbers of steps.
PARARNN_FUNCTION void scale_columns(Square& x, const char* memory) {
  const real* scale = reinterpret_cast<const real*>(memory);
  x.each([&](real& y, int, int s) { y *= scale[s]; });
}

}  // namespace pararnn
