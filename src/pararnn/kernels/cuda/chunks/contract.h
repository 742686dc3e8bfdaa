// Gradients of gates and parameters: a warp has a chunk, with the states before it and their adjoint after it.
#pragma once
#include "chunk.h"

namespace pararnn {

using Problem = GradientLaunch;

// Where emitted code puts the gradients of a chunk.
struct Gradients {
  const GradientLaunch& p;
  const Steps& steps;
  io* gates[2];
  scalar* partial;
  bool finite = true;

  PARARNN_FUNCTION Gradients(const GradientLaunch& p, const Steps& steps, int number) : p(p), steps(steps) {
    const Span& span = steps.span;
    PARARNN_UNROLL
    for (int i = 0; i < 2; ++i)
      gates[i] = p.grad_gates + span.row * p.grad_row + steps.time[i] * p.grad_time + span.head * p.grad_head;
    partial = p.partial + span.at(p.in, number) * param_numbers;
  }
  template <int size, int n> PARARNN_FUNCTION void grad_gate(Tile<n>& x, int offset) {
    real sum = constant(0);  // of steps that exist
    x.each([&](real& y, int i, int) { sum += steps.valid[i] ? y - y : constant(0); });
    finite = sum == constant(0) && finite;
    PARARNN_UNROLL
    for (int j = 0; j < n / 8; ++j)
      PARARNN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int channel = 8 * j + lane_column();
        io* const target = gates[i] + offset + channel;
        if (!steps.valid[i]) continue;
        if (pairs && sizeof(io) == 2 && size % 2 == 0) {
          const real pair[2] = {x[j][2 * i], x[j][2 * i + 1]};
          if (size == n || channel < size) *reinterpret_cast<Pack<io, 2>*>(target) = packed<io, 2>(pair);
        } else {
          PARARNN_UNROLL
          for (int e = 0; e < 2; ++e)
            if (size == n || channel + e < size) target[e] = narrow<io>(x[j][2 * i + e]);
        }
      }
  }
  template <int> PARARNN_FUNCTION void grad_gate(const Row& x, int offset) {
    PARARNN_UNROLL
    for (int i = 0; i < 2; ++i) {
      finite = (!steps.valid[i] || is_finite(x[i])) && finite;
      if (steps.valid[i] && lane_column() == 0) gates[i][offset] = narrow<io>(x[i]);
    }
  }
  template <int size, int n> PARARNN_FUNCTION void grad_param(const Tile<n>& x, int offset) {
    PARARNN_UNROLL
    for (int j = 0; j < n / 8; ++j)
      PARARNN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const real first = steps.valid[0] ? x[j][e] : constant(0), second = steps.valid[1] ? x[j][e + 2] : constant(0);
        const real sum = sum_of_column(first + second);
        const int channel = 8 * j + lane_column() + e;
        if (lane_row() == 0 && channel < size) partial[offset + channel] = sum;
      }
  }
  template <int> PARARNN_FUNCTION void grad_param(const Row& x, int offset) {
    const real sum = sum_of_column((steps.valid[0] ? x[0] : constant(0)) + (steps.valid[1] ? x[1] : constant(0)));
    if (threadIdx.x % 32 == 0) partial[offset] = sum;
  }
};

// Gradients of what a chunk made of decays.
struct ProductGradients {
  Factor before[num_states][num_states], until[num_states][num_states], after[num_states][num_states];
  Factor total[num_states][num_states];  // shares, whose sum over steps is the gradient
};

PARARNN_FUNCTION void start(ProductGradients& g) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      g.before[i][j].fill(constant(0));
      g.until[i][j].fill(constant(0));
      g.after[i][j].fill(constant(0));
      g.total[i][j].fill(constant(0));
    }
}

// rows^T P, pulled back to rows and P.
PARARNN_FUNCTION void pull_factor(const Tile<keys>& grad, const Tile<keys>& of, const Row& p, Tile<keys>& grad_of, Row& grad_p) {
  add_scaled(grad_of, grad, p);
  const Row sum = sum_of_products(grad, of);
  grad_p[0] += sum[0];
  grad_p[1] += sum[1];
}
PARARNN_FUNCTION void pull_factor(const Tile<keys>& grad, const Tile<keys>& of, const Tile<keys>& p, Tile<keys>& grad_of,
                                  Tile<keys>& grad_p) {
  add_scaled(grad_of, grad, p);
  add_scaled(grad_p, grad, of);
}
template <class P> PARARNN_FUNCTION void pull_rows(const Tile<keys> (&grad)[num_states], const Tile<keys> (&rows)[num_states],
                                                   const P& p, Tile<keys> (&grad_rows)[num_states], P& grad_p) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) pull_factor(grad[j], rows[i], p[i][j], grad_rows[i], grad_p[i][j]);
}
template <class P> PARARNN_FUNCTION void pull_columns(const Tile<keys> (&grad)[num_states], const Tile<keys> (&columns)[num_states],
                                                      const P& p, Tile<keys> (&grad_columns)[num_states], P& grad_p) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) pull_factor(grad[i], columns[j], p[i][j], grad_columns[j], grad_p[i][j]);
}
// Gradients of couplings.
struct CouplingGradients {
  Square read[reads][num_columns], query[num_queries][num_columns];
};

}  // namespace pararnn

#if PARARNN_VECTOR_DECAY
#include "vector_gradients.h"
#else
#include "number_gradients.h"
#endif

namespace pararnn {

// Memory of a warp: for a chunk, what its steps read before it and wrote after it, and its values, then their gradients.
constexpr int at_early = 0;                                                            // [read][state], operands
constexpr int at_late = at_early + num_reads * num_states * operand_bytes<keys>;       // [column][state], operands
constexpr int at_value = at_late + num_columns * num_states * operand_bytes<keys>;     // [column], tiles
constexpr int tile_of_values_bytes = chunk * values * (int)sizeof(real);
constexpr int at_system = at_value + num_columns * tile_of_values_bytes;
static_assert(at_system + system_bytes == warp_bytes);

// 16 channels of a tile in memory.
template <class T> PARARNN_FUNCTION Pack<real, 4>* packs_of(T* tile, int block) {
  return reinterpret_cast<Pack<real, 4>*>(tile) + block * 64 + threadIdx.x % 32;
}
template <class T> PARARNN_FUNCTION Square get_block(T* tile, int block) {
  Square x;
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j) {
    const Pack<real, 4> pack = packs_of(tile, block)[32 * j];
    PARARNN_UNROLL
    for (int e = 0; e < 4; ++e) x[j][e] = pack.items[e];
  }
  return x;
}
PARARNN_FUNCTION void put_block(const Square& x, char* tile, int block) {
  PARARNN_UNROLL
  for (int j = 0; j < 2; ++j) packs_of(tile, block)[32 * j] = Pack<real, 4>{{x[j][0], x[j][1], x[j][2], x[j][3]}};
}
template <int n> PARARNN_FUNCTION void put_tile(const Tile<n>& x, char* tile) {
  PARARNN_UNROLL
  for (int k = 0; k < n / chunk; ++k) {
    Square y;
    all_of<chunk>([&](int j, int e) { y[j][e] = x[2 * k + j][e]; });
    put_block(y, tile, k);
  }
}
template <int n> PARARNN_FUNCTION void get_tile(Tile<n>& x, char* tile) {
  PARARNN_UNROLL
  for (int k = 0; k < n / chunk; ++k) {
    const Square y = get_block(tile, k);
    all_of<chunk>([&](int j, int e) { x[2 * k + j][e] = y[j][e]; });
  }
}

// Answers of bfloat16 have one term.
constexpr int answer_terms = same<answer_io, bfloat16>::value ? 1 : terms;

// Operands of a chunk's pairs of steps.
struct Pairs {
  Operand<chunk> inverse[corrected][corrected], of_pure[corrected][pure], read[reads][num_columns], query[num_queries][num_columns];
};

// Sums over values that a chunk's gradients are made of.
struct ValueSums {
  Tile<keys> early[reads][num_states], query[num_queries][num_states], late[num_columns][num_states];
  Row gain[corrected][reads];
  CouplingGradients couplings;
  Factor total[num_states][num_states];

  PARARNN_FUNCTION void clear() {
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) {
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) early[r][i].fill(constant(0));
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) query[q][i].fill(constant(0));
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) late[c][i].fill(constant(0));
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) total[i][j].fill(constant(0));
    }
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) {
        couplings.read[r][c].fill(constant(0));
        if (c < num_corrected) gain[c][r].fill(constant(0));
      }
      PARARNN_UNROLL
      for (int q = 0; q < num_queries; ++q) couplings.query[q][c].fill(constant(0));
    }
  }
};

// Computes what only keys and numbers give.
PARARNN_FUNCTION void prepare(const Forms& f, char* memory, Pairs& y) {
  Operands of;
  operands_of(f, of);
  Couplings couplings;
  fill_couplings(f, of, couplings);
  if constexpr (num_corrected > 0) {
    Square squares[corrected][corrected];
    invert(f, couplings, reinterpret_cast<real*>(memory + at_system), squares);
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) y.inverse[c][d] = operand_of(squares[c][d]);
      PARARNN_UNROLL
      for (int d = 0; d < num_pure; ++d) y.of_pure[c][d] = operand_of(correction(f, couplings, c, num_corrected + d));
    }
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][c] = operand_of(couplings.read[r][c]);
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) y.query[q][c] = operand_of(couplings.query[q][c]);
  }
  PARARNN_UNROLL
  for (int j = 0; j < num_states; ++j) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r)
      put(operand_of(decayed_rows(f.read[r], couplings.products.before, j)),
          memory + at_early + (r * num_states + j) * operand_bytes<keys>);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c)
      put(operand_of(decayed_columns(couplings.products.after, f.column[c], j)),
          memory + at_late + (c * num_states + j) * operand_bytes<keys>);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) put_tile(f.value[c], memory + at_value + c * tile_of_values_bytes);
}

// y[t][v] += sum over keys of rows[t] S[key][v], of rows in memory.
PARARNN_FUNCTION void add_read(Square& y, const char* rows, const Operand<keys>& state) {
  PARARNN_UNROLL
  for (int k = 0; k < keys / chunk; ++k) add_inner(y, get(rows, k), block_of(state, k));
}

// The gradient of an answer: 16 values of it.
PARARNN_FUNCTION Square grad_answers_of(const GradientLaunch& p, const Steps& steps, int query, int block) {
  Square x;
  const answer_io* source = p.grad_answers + query * p.answer_stride + steps.span.row * p.answer_row +
                            steps.span.head * p.answer_head;
  x.each([&](real& y, int i, int column) {
    const int value = block * chunk + column;
    const bool exists = steps.valid[i] && (size_values == values || value < size_values);
    y = exists ? widen(source[steps.time[i] * p.answer_time + value]) : constant(0);
  });
  return x;
}

// Adds what 16 values give. `f`: gains are read of it.
PARARNN_FUNCTION void add_values(const GradientLaunch& p, const Steps& steps, int64 at, const Row (&gain)[corrected][reads],
                                 const Pairs& of, char* memory, int block, ValueSums& sums) {
  Operand<keys> state[num_states], adjoint[num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    const int64 place = ((at * num_states + i) * blocks_of_values + block) * operand_bytes<keys>;
    state[i] = get_all<keys>(p.states + place);
    adjoint[i] = get_all<keys>(p.adjoints + place);
  }
  Square read[reads];
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    read[r].fill(constant(0));
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j)
      add_read(read[r], memory + at_early + (r * num_states + j) * operand_bytes<keys>, state[j]);
  }
  Operand<chunk> written[num_columns], turned_written[num_columns], right[corrected];
  PARARNN_UNROLL
  for (int c = num_corrected; c < num_columns; ++c) {
    written[c] = operand_of(get_block(memory + at_value + c * tile_of_values_bytes, block));
    turned_written[c] = turned(written[c]);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) {
    Square x = get_block(memory + at_value + c * tile_of_values_bytes, block);
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) add_scaled(x, read[r], gain[c][r]);
    PARARNN_UNROLL
    for (int d = 0; d < num_pure; ++d) add_mixed(x, of.of_pure[c][d], turned_written[num_corrected + d]);
    right[c] = turned(operand_of(x));
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) {
    Square x;
    x.fill(constant(0));
    PARARNN_UNROLL
    for (int d = 0; d < num_corrected; ++d) add_mixed(x, of.inverse[c][d], right[d]);
    written[c] = operand_of(x);
    turned_written[c] = turned(written[c]);
  }
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_mixed(read[r], of.read[r][c], turned_written[c]);

  // Gradients of what was written.
  Operand<chunk, answer_terms> answer[num_queries];
  Operand<chunk> left[corrected];
  Square grad[num_columns];
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) answer[q] = operand_of<answer_terms>(grad_answers_of(p, steps, q, block));
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    grad[c].fill(constant(0));
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) add_mixed_back(grad[c], turned(of.query[q][c]), turned(answer[q]));
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i)
      add_read(grad[c], memory + at_late + (c * num_states + i) * operand_bytes<keys>, adjoint[i]);
    if (c < num_corrected) left[c < num_corrected ? c : 0] = turned(operand_of(grad[c]));
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) {
    grad[c].fill(constant(0));
    PARARNN_UNROLL
    for (int d = 0; d < num_corrected; ++d) add_mixed_back(grad[c], turned(of.inverse[d][c]), left[d]);
  }
  PARARNN_UNROLL
  for (int d = 0; d < num_pure; ++d)
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      add_mixed_back(grad[num_corrected + d], turned(of.of_pure[c][d]), turned(operand_of(grad[c])));
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) put_block(grad[c], memory + at_value + c * tile_of_values_bytes, block);

  // Sums over values.
  Operand<chunk, sum_terms> short_written[num_columns];
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) short_written[c] = first_terms<sum_terms>(written[c]);
  Operand<keys, sum_terms> turned_state[num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    const Operand<keys, sum_terms> short_adjoint = first_terms<sum_terms>(adjoint[i]);
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j)
      add_states_product(sums.total[i][j], short_adjoint, first_terms<sum_terms>(state[j]));
    const Operand<keys, sum_terms> turned_adjoint = turned(short_adjoint);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_mixed(sums.late[c][i], short_written[c], turned_adjoint);
    turned_state[i] = turned(first_terms<sum_terms>(state[i]));
  }
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    Square x;
    x.fill(constant(0));
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      all_of<chunk>([&](int j, int e) { sums.gain[c][r][e / 2] += grad[c][j][e] * read[r][j][e]; });
      add_scaled(x, grad[c], gain[c][r]);
    }
    const Operand<chunk, sum_terms> own = operand_of<sum_terms>(x);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_inner(sums.couplings.read[r][c], own, short_written[c]);
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) add_mixed(sums.early[r][j], own, turned_state[j]);
  }
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) {
    const Operand<chunk, sum_terms> own = first_terms<sum_terms>(answer[q]);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_inner(sums.couplings.query[q][c], own, short_written[c]);
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) add_mixed(sums.query[q][j], own, turned_state[j]);
  }
}

// Gradients of the forms, by the sums over values.
PARARNN_FUNCTION void pull_forms(const Forms& f, const ValueSums& sums, Forms& g) {
  Operands of;
  operands_of(f, of);
  Couplings couplings;
  fill_couplings(f, of, couplings);
  ProductGradients products;
  CouplingGradients grads = sums.couplings;
  start(products);
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c)
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r)
      g.gain[c][r] = Row{{sum_of_row(sums.gain[c][r][0]), sum_of_row(sums.gain[c][r][1])}};
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) keep_where(grads.read[r][c], is_before);
    pull_rows(sums.early[r], f.read[r], couplings.products.before, g.read[r], products.before);
  }
  Factor until[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      until[i][j] = product_of(f.decay, couplings.products.before, i, j);
      products.total[i][j] = sums.total[i][j];
    }
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) keep_where(grads.query[q][c], is_until);
    pull_rows(sums.query[q], f.query[q], until, g.query[q], products.until);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c)
    pull_columns(sums.late[c], f.column[c], couplings.products.after, g.column[c], products.after);
  pull_decays(f, of, couplings, grads, products, g);
}

PARARNN_FUNCTION void differentiate(const GradientLaunch& p, const Span& span, int number, char* memory) {
  const Steps steps(p.in, span, number);
  Pairs pairs_of_steps;
  Row gain[corrected][reads];
  {
    Forms f;
    forms_of(steps, f);
    f.adapt(steps);
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) gain[c][r] = f.gain[c][r];
    prepare(f, memory, pairs_of_steps);
  }
  __syncwarp();
  ValueSums sums;
  sums.clear();
#pragma unroll 1
  for (int v = 0; v < blocks_of_values; ++v)
    add_values(p, steps, span.at(p.in, number), gain, pairs_of_steps, memory, v, sums);
  __syncwarp();
  Forms f, g;
  forms_of(steps, f);
  f.adapt(steps);
  g.fill(constant(0));
  pull_forms(f, sums, g);
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) get_tile(g.value[c], memory + at_value + c * tile_of_values_bytes);
  g.adapt_gradients(steps);
  Gradients out(p, steps, number);
  gradients_of(steps, g, out);
  if (!out.finite) p.flags[span.row * p.in.heads + span.head] = 1;
}

PARARNN_FUNCTION void run_pass(const GradientLaunch& p, char* memory) {
  const int warps = threads / 32, warp = warp_number();
  const int64 most = p.chunks, index = (int64)blockIdx.x * warps + warp;  // of chunks, then heads, then sequences
  const int64 number = index % most, sequence = index / most;
  if (sequence >= p.spans * p.in.heads) return;
  const Span span(p.in, sequence);
  if (number >= span.chunks()) return;
  differentiate(p, span, (int)number, memory + warp * warp_bytes);
}

}  // namespace pararnn
