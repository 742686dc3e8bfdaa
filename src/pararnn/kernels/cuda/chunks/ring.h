// A ring of chunks in shared memory: a warp prepares every so-many-th chunk into the next free stage, and warps that hold
// states read all stages in order.
//
// Needs, in addition to chunk.h: producers (warps that prepare), stages, stage_bytes, splits (blocks that divide the values of
// a head), key_stride, value_stride (of a state in memory).
#pragma once
#include "chunk.h"

namespace pararnn {

constexpr int readers = blocks_of_values / splits, split_values = values / splits;
constexpr int barrier_bytes = (2 * stages * (int)sizeof(Barrier) + 15) / 16 * 16;
constexpr int reach_slots = num_reads > num_corrected ? num_reads : num_corrected;  // reads are where reaches will be
constexpr int full_bytes = num_states * num_states * keys * (int)sizeof(real);  // decays over a chunk, by key

struct Ring {
  char* const memory;
  Barrier *const filled, *const emptied;

  PARARNN_FUNCTION explicit Ring(char* memory)
      : memory(memory + barrier_bytes), filled(reinterpret_cast<Barrier*>(memory)), emptied(filled + stages) {
    if (threadIdx.x == 0)
      for (int i = 0; i < stages; ++i) {
        open_barrier(filled[i], 32);
        open_barrier(emptied[i], 32 * readers);
      }
    __syncthreads();
  }
  PARARNN_FUNCTION char* stage(int turn) const { return memory + turn % stages * stage_bytes; }
  PARARNN_FUNCTION real* scratch() const {
    return reinterpret_cast<real*>(memory + stages * stage_bytes + (warp_number() - readers) * scratch_bytes);
  }
  PARARNN_FUNCTION char* gates() const {
    return memory + stages * stage_bytes + producers * scratch_bytes + (warp_number() - readers) * gates_bytes;
  }
  static PARARNN_FUNCTION void await(Barrier& barrier, int number) {
    while (!has_arrived(barrier, number)) {}
  }
  // Waits for a chunk, by its turn; or until its stage is free.
  PARARNN_FUNCTION void await_filled(int turn) const { await(filled[turn % stages], turn / stages); }
  PARARNN_FUNCTION void await_free(int turn) const {
    if (turn >= stages) await(emptied[turn % stages], turn / stages - 1);
  }
};

// Puts a block's share of a tile of values, turned.
PARARNN_FUNCTION void put_split(const Tile<values>& x, int split, char* memory) {
  if constexpr (splits == 1) {
    put(turned(operand_of(x)), memory);
    return;
  }
  PARARNN_FOR(v, blocks_of_values)
    if (v / readers == split) put_at(turned(operand_at(x, v)), memory, v % readers);
}

// With decays that come late: those until a step of a chunk, then those after it.
constexpr int scale_bytes = chunk * (int)sizeof(real), scales_bytes = scales_late ? 2 * scale_bytes : 0;
PARARNN_FUNCTION void put_scales(const Decays& decays, char* memory) {
  if (!scales_late || lane_column() != 0) return;
  const Row until = late_until(decays), after = late_after(decays);
  real* const target = reinterpret_cast<real*>(memory);
  PARARNN_FOR(i, 2) {
    target[lane_row() + 8 * i] = until[i];
    target[chunk + lane_row() + 8 * i] = after[i];
  }
}

// Puts what steps before the chunk reach, with the corrections inside of it, in place of reads.
template <bool is_turned>
PARARNN_FUNCTION void put_reaches(const Gains& gain, const Decays& decays, const Corrections& of, const KeyMemory& memory) {
  Operand<chunk> left[corrected][reads];
  PARARNN_FOR(c, num_corrected)
    PARARNN_FOR(r, num_reads) {
      Square x;
      x.fill(constant(0));
      PARARNN_FOR(d, num_corrected) {
        real scale[2][2];
        by_column(scaled(gain[d][r], late_before(decays)), scale);
        all_of<chunk>([&](int k, int e) { x[k][e] += of.squares[c][d][k][e] * scale[k][e % 2]; });
      }
      left[c][r] = operand_of(x);
    }
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) {
    Square reach[corrected][num_states];
    PARARNN_FOR(j, num_states) {
      PARARNN_FOR(c, num_corrected) reach[c][j].fill(constant(0));
      PARARNN_FOR(r, num_reads) {
        const Operand<chunk> read = turned(get(memory.read(r, j), k));
        PARARNN_FOR(c, num_corrected) add_mixed(reach[c][j], left[c][r], read);
      }
    }
    PARARNN_FOR(j, num_states)
      PARARNN_FOR(c, num_corrected) {
        const Operand<chunk> x = operand_of(reach[c][j]);
        put_at(is_turned ? turned(x) : x, memory.read(c, j), k);
      }
  }
}
// Transposes the tiles of an operand in memory.
PARARNN_FUNCTION void turn(char* memory) {
#pragma unroll 1
  for (int k = 0; k < keys / chunk; ++k) put_at(turned(get(memory, k)), memory, k);
}

// Decays states over a chunk; `back`: their adjoint.
PARARNN_FUNCTION void decay_states(Tile<keys> (&x)[num_states], const char* memory, bool back) {
  const real* full = reinterpret_cast<const real*>(memory);
  PARARNN_FOR(k, keys / 8)
    PARARNN_FOR(e, 4) {
      real y[num_states];
      PARARNN_FOR(i, num_states) {
        y[i] = constant(0);
        PARARNN_FOR(j, num_states) {
          const int place = (back ? j * num_states + i : i * num_states + j) * keys;
          y[i] += x[j][k][e] * full[place + (vector_decay ? 8 * k + lane_column() + e % 2 : 0)];
        }
      }
      PARARNN_FOR(i, num_states) x[i][k][e] = y[i];
    }
}
// The channels 16 k to 16 k + 15 of y[t] += sum over s of a[t][s] x[s]; `x` has these channels, and is turned.
template <int t, int u>
PARARNN_FUNCTION void add_mixed_at(Tile<keys>& y, const Operand<chunk, t>& a, const Operand<chunk, u>& x, int k) {
  PARARNN_FOR(j, 2)
    add_terms(y.x[2 * k + j], a.x[0][0], a.x[0][1], a.x[1][0], a.x[1][1], x.x[j][0], x.x[j][1]);
}

// Has readers go through the chunks of a sequence, and other warps prepare them. `back`: from the last chunk.
template <bool back, class Launch> PARARNN_FUNCTION void run_chunks(const Launch& p, char* memory) {
  const Span span(p.in, blockIdx.x / splits);
  const Ring ring(memory);
  const int warp = warp_number(), split = blockIdx.x % splits;
  if (warp < readers) {
    go(p, span, ring, split, warp);
  } else {
    const int count = span.chunks();
    const auto number = [&](int turn) { return back ? count - 1 - turn : turn; };
    if (warp - readers < count) copy_gates<1>(p.in, span, number(warp - readers), ring.gates());
    for (int turn = warp - readers; turn < count; turn += producers) prepare(p, span, ring, split, turn, number(turn));
  }
}

// Scales the columns of a square by numbers of steps.
PARARNN_FUNCTION void scale_columns(Square& x, const char* memory) {
  const real* scale = reinterpret_cast<const real*>(memory);
  x.each([&](real& y, int, int s) { y *= scale[s]; });
}

}  // namespace pararnn
