// What a chunk makes of the forms of its steps: couplings of pairs of steps, the inverse of the system of corrections by
// substitution, and operands in memory.
#pragma once
#if PARARNN_VECTOR_DECAY
#include "vector_decays.h"
#else
#include "number_decays.h"
#endif

namespace pararnn {

// sum_r gain_cr read_rd.
PARARNN_FUNCTION Square correction(const Forms& f, const Couplings& of, int c, int d) {
  Square y;
  y.fill(constant(0));
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) add_scaled(y, of.read[r][d], f.gain[c][r]);
  return y;
}

constexpr int system_size = chunk * corrected, system_row = system_size + 4;
constexpr int system_bytes = num_corrected ? system_size * system_row * (int)sizeof(real) : 0;

// The inverse of 1 - corrections, a column a lane. `memory` is the warp's.
PARARNN_FUNCTION void invert(const Forms& f, const Couplings& of, real* memory, Square (&inverse)[corrected][corrected]) {
  const auto at = [&](int c, int t, int d, int s) { return (c * chunk + t) * system_row + d * chunk + s; };
  const auto each = [&](const auto& visit) {
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) visit(c, d);
  };
  __syncwarp();
  each([&](int c, int d) {
    Square m = correction(f, of, c, d);
    m.each([&](real& x, int i, int s) { memory[at(c, lane_row() + 8 * i, d, s)] = x; });
  });
  __syncwarp();
  constexpr int per_lane = (system_size + 31) / 32;
  real x[per_lane][corrected][chunk];
  PARARNN_UNROLL
  for (int k = 0; k < per_lane; ++k) {
    const int column = threadIdx.x % 32 + 32 * k;
    PARARNN_UNROLL
    for (int t = 0; t < chunk; ++t)
      PARARNN_UNROLL
      for (int c = 0; c < num_corrected; ++c) {
        real sum = column == c * chunk + t ? constant(1) : constant(0);
        PARARNN_UNROLL
        for (int d = 0; d < num_corrected; ++d)
          PARARNN_UNROLL
          for (int s = 0; s < t; ++s) sum += memory[at(c, t, d, s)] * x[k][d][s];
        x[k][c][t] = sum;
      }
  }
  __syncwarp();
  PARARNN_UNROLL
  for (int k = 0; k < per_lane; ++k) {
    const int column = threadIdx.x % 32 + 32 * k;
    if (column < system_size) {
      PARARNN_UNROLL
      for (int c = 0; c < num_corrected; ++c)
        PARARNN_UNROLL
        for (int t = 0; t < chunk; ++t) memory[(c * chunk + t) * system_row + column] = x[k][c][t];
    }
  }
  __syncwarp();
  each([&](int c, int d) {
    inverse[c][d].each([&](real& x, int i, int s) { x = memory[at(c, lane_row() + 8 * i, d, s)]; });
  });
}

// The gradient of an answer.
template <class P> PARARNN_FUNCTION Tile<values> grad_answers_of(const P& p, const Steps& steps, int query) {
  Tile<values> x;
  const answer_io* source = p.grad_answers + query * p.answer_stride + steps.span.row * p.answer_row +
                            steps.span.head * p.answer_head;
  x.each([&](real& y, int i, int value) {
    const bool exists = steps.valid[i] && value < size_values;
    y = exists ? widen(source[steps.time[i] * p.answer_time + value]) : constant(0);
  });
  return x;
}

// Operands of a warp, where others read them: 16 bytes a lane for two tiles and a term.
struct Words { unsigned word[4]; };
template <int n, int t = terms> constexpr int operand_bytes = n / 16 * t * 32 * (int)sizeof(Words);
template <int n, int t, class T> PARARNN_FUNCTION void put(const Operand<n, t>& x, T* memory) {
  Words* words = reinterpret_cast<Words*>(memory) + threadIdx.x % 32;
  PARARNN_UNROLL
  for (int k = 0; k < n / 16; ++k)
    PARARNN_UNROLL
    for (int i = 0; i < t; ++i)
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
  PARARNN_UNROLL
  for (int i = 0; i < t; ++i) {
    const Words w = words[(k * t + i) * 32];
    PARARNN_UNROLL
    for (int h = 0; h < 4; ++h) x.x[h / 2][h % 2].term[i] = w.word[h];
  }
  return x;
}
template <int n, class T> PARARNN_FUNCTION Operand<n> get_all(const T* memory) {
  Operand<n> y;
  PARARNN_UNROLL
  for (int k = 0; k < n / 16; ++k) {
    const Operand<chunk> x = get(memory, k);
    PARARNN_UNROLL
    for (int h = 0; h < 4; ++h) y.x[2 * k + h / 2][h % 2] = x.x[h / 2][h % 2];
  }
  return y;
}
// 16 channels of a turned operand, as rows: the operand of a product on their left.
template <int n, int t> PARARNN_FUNCTION Operand<chunk, t> rows_of(const Operand<n, t>& turned, int block) {
  Operand<chunk, t> y;
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j)
    PARARNN_UNROLL
    for (int h = 0; h < 2; ++h) y.x[h][j] = turned.x[2 * block + j][h];
  return y;
}
// The same of an operand in memory.
template <class T> PARARNN_FUNCTION Operand<chunk> rows_of_stage(const T* memory, int block) {
  return rows_of(get(memory, block), 0);
}
template <int n, int t> PARARNN_FUNCTION Operand<chunk, t> block_of(const Operand<n, t>& x, int k) {
  Operand<chunk, t> y;
  PARARNN_UNROLL
  for (int h = 0; h < 4; ++h) y.x[h / 2][h % 2] = x.x[2 * k + h / 2][h % 2];
  return y;
}

PARARNN_FUNCTION Tile<keys> query_of(const Forms& f, const Couplings& of, int p, int j) {
  Factor until[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) until[i][j] = product_of(f.decay, of.products.before, i, j);
  return decayed_rows(f.query[p], until, j);
}

// The operand of 16 channels of a tile.
template <int n> PARARNN_FUNCTION Operand<chunk> operand_at(const Tile<n>& x, int k) {
  Operand<chunk> y;
  PARARNN_UNROLL
  for (int h = 0; h < 4; ++h)
    y.x[h / 2][h % 2] = pair_of(x[2 * k + h / 2][h % 2 * 2], x[2 * k + h / 2][h % 2 * 2 + 1]);
  return y;
}
// An operand's numbers.
template <int n, int t> PARARNN_FUNCTION Tile<n> numbers_of(const Operand<n, t>& x) {
  Tile<n> y;
  y.fill(constant(0));
  all_of<n>([&](int j, int e) {
    PARARNN_UNROLL
    for (int i = 0; i < t; ++i) y[j][e] += bfloat16_of(x.x[j][e / 2].term[i], e % 2);
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
  x.each([&](real& y, int, auto...) { sum += y - y; });
  return sum == constant(0);
}

}  // namespace pararnn
