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
    finite = all_finite(x) && finite;
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
      finite = is_finite(x[i]) && finite;
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

// States before a chunk as operands, rows of values: [state][block].
using States = Operand<keys>[num_states][blocks_of_values];

PARARNN_FUNCTION void add_outer(Square& y, const Operand<values>& a, const Operand<values>& b) { add_inner(y, a, b); }

// y[t][v] += sum over keys of a[t] S[key][v]; states are rows of values.
PARARNN_FUNCTION void add_read(Tile<values>& y, const Operand<keys>& a, const Operand<keys> (&state)[blocks_of_values]) {
  PARARNN_UNROLL
  for (int v = 0; v < blocks_of_values; ++v) {
    Square sums;
    sums.fill(constant(0));
    add_inner(sums, a, state[v]);
    all_of<chunk>([&](int j, int e) { y[2 * v + j][e] += sums[j][e]; });
  }
}
// y[t][key] += sum over values of a[t][v] S[key][v].
PARARNN_FUNCTION void add_written(Tile<keys>& y, const Operand<values>& a, const Operand<keys> (&state)[blocks_of_values]) {
  PARARNN_UNROLL
  for (int v = 0; v < blocks_of_values; ++v) add_mixed(y, block_of(a, v), turned(state[v]));
}

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

PARARNN_FUNCTION void differentiate(const GradientLaunch& p, const Span& span, int number, real* scratch) {
  const Steps steps(p.in, span, number);
  Forms f;
  forms_of(steps, f);
  f.adapt(steps);
  Operands of;
  operands_of(f, of);
  Couplings couplings;
  fill_couplings(f, of, couplings);
  Operand<chunk> inverse[corrected][corrected];
  if constexpr (num_corrected > 0) {
    Square squares[corrected][corrected];
    invert(f, couplings, scratch, squares);
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) inverse[c][d] = operand_of(squares[c][d]);
  }
  States state, adjoint;
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int v = 0; v < blocks_of_values; ++v) {
      Tile<keys> x;
      load_state(p.states + span.at(p.in, number) * memory_numbers + memory_at[i], v, x);
      state[i][v] = operand_of(x);
      adjoint[i][v] = get_all<keys>(
          p.adjoints + ((span.at(p.in, number) * num_states + i) * blocks_of_values + v) * operand_bytes<keys>);
    }

  // What the chunk read before it began, what it wrote, and what it read.
  Tile<values> read[reads];
  Operand<values> written[num_columns], written_turned[num_columns];
  Operand<keys> early[reads][num_states];
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    read[r].fill(constant(0));
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      early[r][j] = operand_of(decayed_rows(f.read[r], couplings.products.before, j));
      add_read(read[r], early[r][j], state[j]);
    }
  }
  PARARNN_UNROLL
  for (int c = num_corrected; c < num_columns; ++c) {
    written[c] = operand_of(f.value[c]);
    written_turned[c] = turned(written[c]);
  }
  if constexpr (num_corrected > 0) {
    Operand<values> right[corrected];
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      Tile<values> x = f.value[c];
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) add_scaled(x, read[r], f.gain[c][r]);
      PARARNN_UNROLL
      for (int d = num_corrected; d < num_columns; ++d)
        add_mixed(x, operand_of(correction(f, couplings, c, d)), written_turned[d]);
      right[c] = turned(operand_of(x));
    }
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      Tile<values> x;
      x.fill(constant(0));
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) add_mixed(x, inverse[c][d], right[d]);
      written[c] = operand_of(x);
      written_turned[c] = turned(written[c]);
    }
  }
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_mixed(read[r], operand_of(couplings.read[r][c]), written_turned[c]);

  // Gradients of what it wrote.
  Forms g;
  g.fill(constant(0));
  Operand<values> answer[num_queries];
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) answer[q] = operand_of(grad_answers_of(p, steps, q));
  Operand<values> left[corrected];
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    Tile<values>& x = g.value[c];
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q)
      add_mixed_back(x, turned(operand_of(couplings.query[q][c])), turned(answer[q]));
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i)
      add_read(x, operand_of(decayed_columns(couplings.products.after, f.column[c], i)), adjoint[i]);
    if (c < num_corrected) left[c < num_corrected ? c : 0] = turned(operand_of(x));
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) {
    g.value[c].fill(constant(0));
    PARARNN_UNROLL
    for (int d = 0; d < num_corrected; ++d) add_mixed_back(g.value[c], turned(inverse[d][c]), left[d]);
  }
  PARARNN_UNROLL
  for (int d = num_corrected; d < num_columns; ++d)
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      add_mixed_back(g.value[d], turned(operand_of(correction(f, couplings, c, d))), turned(operand_of(g.value[c])));

  // Those of reads, and of the couplings.
  ProductGradients products;
  CouplingGradients grads;
  start(products);
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    Tile<values> grad_read;
    grad_read.fill(constant(0));
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      g.gain[c][r] = sum_of_products(g.value[c], read[r]);
      add_scaled(grad_read, g.value[c], f.gain[c][r]);
    }
    const Operand<values> own = operand_of(grad_read);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      Square& grad = grads.read[r][c];
      grad.fill(constant(0));
      add_inner(grad, own, written[c]);
      keep_where(grad, is_before);
    }
    Tile<keys> grad_early[num_states];
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      grad_early[j].fill(constant(0));
      add_written(grad_early[j], own, state[j]);
    }
    pull_rows(grad_early, f.read[r], couplings.products.before, g.read[r], products.before);
  }
  Factor until[num_states][num_states];
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) until[i][j] = product_of(f.decay, couplings.products.before, i, j);
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) {
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) {
      Square& grad = grads.query[q][c];
      grad.fill(constant(0));
      add_inner(grad, answer[q], written[c]);
      keep_where(grad, is_until);
    }
    Tile<keys> grad_early[num_states];
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) {
      grad_early[j].fill(constant(0));
      add_written(grad_early[j], answer[q], state[j]);
    }
    pull_rows(grad_early, f.query[q], until, g.query[q], products.until);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    Tile<keys> grad_late[num_states];
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) {
      grad_late[i].fill(constant(0));
      add_written(grad_late[i], written[c], adjoint[i]);
    }
    pull_columns(grad_late, f.column[c], couplings.products.after, g.column[c], products.after);
  }
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i)
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) add_states_product(products.total[i][j], adjoint[i], state[j]);
  pull_decays(f, of, couplings, grads, products, g);
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
  differentiate(p, span, (int)number, reinterpret_cast<real*>(memory + warp * system_bytes));
}

}  // namespace pararnn
