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
  template <int size, int n> PARARNN_FUNCTION void grad_field(Tile<n>& x, int number) {
    x.each([&](real& y, int i, int channel) {
      if (!steps.valid[i] || channel >= size) return;
      finite = is_finite(y) && finite;
      p.grad_fields[number][steps.field_place(i) * size + channel] = y;
    });
  }
  template <int> PARARNN_FUNCTION void grad_field(const Row& x, int number) {
    PARARNN_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (!steps.valid[i]) continue;
      finite = is_finite(x[i]) && finite;
      if (lane_column() == 0) p.grad_fields[number][steps.field_place(i)] = x[i];
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

// Memory of a warp, for a chunk.
constexpr int at_read = 0;                                                          // then gradients of reads
constexpr int at_column = at_read + num_reads * num_states * operand_bytes<keys>;   // then those of columns
constexpr int at_query = at_column + num_columns * num_states * operand_bytes<keys>;
constexpr int at_decay = at_query + num_queries * num_states * operand_bytes<keys>;
constexpr int at_value = at_decay + decay_bytes;                                    // [column], then gradients
constexpr int at_written = at_value + num_columns * tile_bytes_of<values>;          // [column], operands of sums
constexpr int at_grad_read = at_written + num_columns * operand_bytes<values>;  // [read]
constexpr int at_system = at_grad_read + num_reads * operand_bytes<values>;
static_assert(at_system + system_bytes == warp_bytes);

// Blocks whose loads are in flight together.
constexpr int key_blocks_at_once = keys <= 64 ? keys / chunk : 2, value_blocks_at_once = values <= 64 ? values / chunk : 4;
// Answers of bfloat16 have one term.
constexpr int answer_terms = same<answer_io, bfloat16>::value ? 1 : terms;

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

// Operands of a chunk's pairs of steps.
struct Pairs {
  Operand<chunk> inverse[corrected][corrected], of_pure[corrected][pure], read[reads][num_columns], query[num_queries][num_columns];
};

// Where a warp's chunk is.
struct Chunk {
  const GradientLaunch& p;
  const Steps& steps;
  char* const memory;
  const int64 at;

  PARARNN_FUNCTION KeyMemory keys_memory() const {
    return KeyMemory{memory + at_read, memory + at_column, memory + at_query, memory + at_decay};
  }
  PARARNN_FUNCTION int64 place(int i, int block) const {
    return ((at * num_states + i) * blocks_of_values + block) * operand_bytes<keys>;
  }
  PARARNN_FUNCTION char* value(int c) const { return memory + at_value + c * tile_bytes_of<values>; }
  PARARNN_FUNCTION char* written(int c) const { return memory + at_written + c * operand_bytes<values>; }
  PARARNN_FUNCTION char* grad_read(int r) const { return memory + at_grad_read + r * operand_bytes<values>; }
};

// Computes what only keys and numbers give.
PARARNN_FUNCTION void prepare(const Chunk& of, const Forms& f, const Decays& decays, Pairs& y) {
  Couplings couplings;
  fill_couplings(of.keys_memory(), decays, couplings, static_cast<char*>(nullptr));
  if constexpr (num_corrected > 0) {
    Corrections corrections;
    fill_corrections(f.gain, couplings, reinterpret_cast<real*>(of.memory + at_system), corrections);
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      PARARNN_UNROLL
      for (int d = 0; d < num_corrected; ++d) y.inverse[c][d] = corrections.inverse[c][d];
      PARARNN_UNROLL
      for (int d = 0; d < num_pure; ++d) y.of_pure[c][d] = corrections.of_pure[c][d];
    }
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][c] = operand_of(couplings.read[r][c]);
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) y.query[q][c] = operand_of(couplings.query[q][c]);
  }
}

// Adds what 16 values give: what was written and its gradient, and with them those of couplings and gains.
PARARNN_FUNCTION void add_values(const Chunk& at, const Gains& gain, const Row& before, const Row& after, const Pairs& of,
                                 int block, Couplings& couplings, Gains& grad_gain) {
  const KeyMemory memory = at.keys_memory();
  Square read[reads], grad[num_columns];
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) read[r].fill(constant(0));
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) grad[c].fill(constant(0));
#pragma unroll key_blocks_at_once
  for (int k = 0; k < keys / chunk; ++k)
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) {
      const Operand<chunk> state = get(at.p.states + at.place(i, block), k);
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) add_inner(read[r], get(memory.read(r, i), k), state);
      const Operand<chunk> adjoint = get(at.p.adjoints + at.place(i, block), k);
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) add_inner(grad[c], get(memory.column(c, i), k), adjoint);
    }
  if constexpr (scales_late) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) read[r] = scaled(read[r], before);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) grad[c] = scaled(grad[c], after);
  }
  Operand<chunk> written[num_columns], turned_written[num_columns], right[corrected];
  PARARNN_UNROLL
  for (int c = num_corrected; c < num_columns; ++c) {
    written[c] = operand_of(get_block(at.value(c), block));
    turned_written[c] = turned(written[c]);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c) {
    Square x = get_block(at.value(c), block);
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
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q) answer[q] = operand_of<answer_terms>(grad_answers_of(at.p, at.steps, q, block));
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) {
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) add_mixed_back(grad[c], turned(of.query[q][c]), turned(answer[q]));
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
  for (int c = 0; c < num_columns; ++c) put_block(grad[c], at.value(c), block);

  // Sums over values.
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) put_at(written[c], at.written(c), block);
  PARARNN_UNROLL
  for (int r = 0; r < num_reads; ++r) {
    Square x;
    x.fill(constant(0));
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c) {
      all_of<chunk>([&](int j, int e) { grad_gain[c][r][e / 2] += grad[c][j][e] * read[r][j][e]; });
      add_scaled(x, grad[c], gain[c][r]);
    }
    const Operand<chunk> of_read = operand_of(x);
    put_at(of_read, at.grad_read(r), block);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) add_inner(couplings.read[r][c], of_read, written[c]);
  }
  PARARNN_UNROLL
  for (int q = 0; q < num_queries; ++q)
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c)
      add_inner(couplings.query[q][c], answer[q], written[c]);
}

// Gradients of decayed forms of 16 keys, as sums over values: of reads and queries by the states before the chunk, of
// columns by the adjoint after it; and shares of that of the decays over the chunk.
struct KeySums {
  Square read[reads][num_states], query[num_queries][num_states], column[num_columns][num_states];
  Factors total;
};
PARARNN_FUNCTION void add_key_sums(const Chunk& at, int k, KeySums& y) {
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) y.read[r][i].fill(constant(0));
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) y.query[q][i].fill(constant(0));
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) y.column[c][i].fill(constant(0));
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) y.total[i][j].fill(constant(0));
  }
#pragma unroll value_blocks_at_once
  for (int v = 0; v < blocks_of_values; ++v) {
    Operand<chunk> state[num_states], adjoint[num_states];
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) {
      state[i] = get(at.p.states + at.place(i, v), k);
      adjoint[i] = get(at.p.adjoints + at.place(i, v), k);
    }
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i)
      PARARNN_UNROLL
      for (int j = 0; j < num_states; ++j) add_states_product(y.total[i][j], adjoint[i], state[j]);
    PARARNN_UNROLL
    for (int i = 0; i < num_states; ++i) {
      state[i] = turned(state[i]);
      adjoint[i] = turned(adjoint[i]);
      PARARNN_UNROLL
      for (int c = 0; c < num_columns; ++c) add_mixed(y.column[c][i], get(at.written(c), v), adjoint[i]);
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) add_mixed(y.read[r][i], get(at.grad_read(r), v), state[i]);
    }
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) {
      const Operand<chunk, answer_terms> answer = operand_of<answer_terms>(grad_answers_of(at.p, at.steps, q, v));
      PARARNN_UNROLL
      for (int i = 0; i < num_states; ++i) add_mixed(y.query[q][i], answer, state[i]);
    }
  }
}

}  // namespace pararnn

#if PARARNN_VECTOR_DECAY
#include "vector_gradients.h"
#else
#include "number_gradients.h"
#endif

namespace pararnn {

PARARNN_FUNCTION void differentiate(const GradientLaunch& p, const Span& span, int number, char* memory) {
  const Steps steps(p.in, span, number);
  const Chunk at{p, steps, memory, span.at(p.in, number)};
  const KeyMemory keys_memory = at.keys_memory();
  {
    Forms f;
    forms_of(steps, f);
    f.adapt(steps);
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) put_tile(f.value[c], at.value(c));
  }
  load_again();
  put_keys(steps, keys_memory);
  Forms g;
  Gains gain;
  Couplings couplings;
  couplings.clear();
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c)
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) g.gain[c][r].fill(constant(0));
  {
    Forms f;
    forms_of(steps, f);
    f.adapt(steps);
    const Decays decays(f);
    Pairs pairs_of_steps;
    prepare(at, f, decays, pairs_of_steps);
    PARARNN_UNROLL
    for (int c = 0; c < num_corrected; ++c)
      PARARNN_UNROLL
      for (int r = 0; r < num_reads; ++r) gain[c][r] = f.gain[c][r];
    const Row before = late_before(decays), after = late_after(decays);
#pragma unroll 1
    for (int v = 0; v < blocks_of_values; ++v)
      add_values(at, gain, before, after, pairs_of_steps, v, couplings, g.gain);
  }
  couplings.keep_earlier();
  if constexpr (!scales_late) put_keys(steps, keys_memory);
  {
    Forms f;
    forms_of(steps, f);
    f.adapt(steps);
    pull_keys(at, f, couplings, g);
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_corrected; ++c)
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r)
      g.gain[c][r] = Row{{sum_of_row(g.gain[c][r][0]), sum_of_row(g.gain[c][r][1])}};
  load_again();
  PARARNN_UNROLL
  for (int i = 0; i < num_states; ++i) {
    PARARNN_UNROLL
    for (int r = 0; r < num_reads; ++r) get_tile(g.read[r][i], keys_memory.read(r, i));
    PARARNN_UNROLL
    for (int q = 0; q < num_queries; ++q) get_tile(g.query[q][i], keys_memory.query(q, i));
    PARARNN_UNROLL
    for (int c = 0; c < num_columns; ++c) get_tile(g.column[c][i], keys_memory.column(c, i));
    PARARNN_UNROLL
    for (int j = 0; j < num_states; ++j) get_decay_gradient(g.decay[i][j], keys_memory.decay(i, j));
  }
  PARARNN_UNROLL
  for (int c = 0; c < num_columns; ++c) get_tile(g.value[c], at.value(c));
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
