// Gradients of gates and parameters: a block has a chunk, with the states before it and their adjoint after it. Its warps
// share the chunk's forms and squares in memory, and divide blocks of values, blocks of keys and gates.
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
    PARARNN_FOR(i, 2)
      gates[i] = p.grad_gates + span.row * p.grad_row + steps.time[i] * p.grad_time + span.head * p.grad_head;
    partial = p.partial + span.at(p.in, number) * param_numbers;
  }
  template <int size, int n> PARARNN_FUNCTION void grad_gate(Tile<n>& x, int offset) {
    Row sum{{0, 0}};
    x.each([&](real& y, int i, int) { sum[i] += constant(0) * y; });
    PARARNN_FOR(i, 2) finite = (!steps.valid[i] || sum[i] == constant(0)) && finite;
    PARARNN_FOR(j, n / 8)
      PARARNN_FOR(i, 2) {
        const int channel = 8 * j + lane_column();
        io* const target = gates[i] + offset + channel;
        if (!steps.valid[i]) continue;
        if (pairs && sizeof(io) == 2 && size % 2 == 0) {
          const real pair[2] = {x[j][2 * i], x[j][2 * i + 1]};
          if (size == n || channel < size) *reinterpret_cast<Pack<io, 2>*>(target) = packed<io, 2>(pair);
        } else {
          PARARNN_FOR(e, 2)
            if (size == n || channel + e < size) target[e] = narrow<io>(x[j][2 * i + e]);
        }
      }
  }
  template <int> PARARNN_FUNCTION void grad_gate(const Row& x, int offset) {
    PARARNN_FOR(i, 2) {
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
    PARARNN_FOR(i, 2) {
      if (!steps.valid[i]) continue;
      finite = is_finite(x[i]) && finite;
      if (lane_column() == 0) p.grad_fields[number][steps.field_place(i)] = x[i];
    }
  }
  template <int size, int n> PARARNN_FUNCTION void grad_param(const Tile<n>& x, int offset) {
    PARARNN_FOR(j, n / 8)
      PARARNN_FOR(e, 2) {
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

// Answers of bfloat16 have one term.
constexpr int answer_terms = same<answer_io, bfloat16>::value ? 1 : terms;
// Memory of a block.
constexpr int at_read = 0;                                                          // then gradients of reads
constexpr int at_column = at_read + num_reads * num_states * operand_bytes<keys>;   // then those of columns
constexpr int at_query = at_column + num_columns * num_states * operand_bytes<keys>;
constexpr int at_decay = at_query + num_queries * num_states * operand_bytes<keys>;
constexpr int at_value = at_decay + decay_bytes;                                    // [column], then gradients
constexpr int at_written = at_value + num_columns * tile_bytes_of<values>;          // [column], operands of sums
constexpr int at_grad_read = at_written + num_columns * operand_bytes<values>;      // [read]
constexpr int at_decays = at_grad_read + num_reads * operand_bytes<values>;
// Operands of pairs of steps: inverses [column][column], corrections of pure columns, reads and queries by [column].
constexpr int at_inverse = at_decays + kept_decay_bytes;
constexpr int at_of_pure = at_inverse + num_corrected * num_corrected * operand_bytes<chunk>;
constexpr int at_read_pairs = at_of_pure + num_corrected * num_pure * operand_bytes<chunk>;
constexpr int at_query_pairs = at_read_pairs + num_reads * num_columns * operand_bytes<chunk>;
// What warps add up: gradients of couplings, of gains, and of decays over the chunk. With decays of keys, couplings give way to
// sums of 16 keys.
constexpr int num_couplings = (num_reads + num_queries) * num_columns, num_gains = num_corrected * num_reads;
constexpr int at_grams = at_query_pairs + num_queries * num_columns * operand_bytes<chunk>;
constexpr int at_shares = at_grams + num_couplings * kept_grams * tile_bytes_of<chunk>;  // [warp]
constexpr int sum_tiles = vector_decay ? num_reads + num_queries + num_columns : 0;
constexpr int share_squares = num_couplings > sum_tiles ? num_couplings : sum_tiles;
constexpr int at_gain_shares = share_squares * tile_bytes_of<chunk>, at_decay_shares = at_gain_shares + num_gains * row_bytes;
constexpr int share_bytes = at_decay_shares + decay_shares * row_bytes;
// The states before the chunk, and the adjoint after it, where there is room.
constexpr bool scratch_is_shared = !vector_decay && scratch_bytes <= warps * share_bytes;
constexpr int at_scratch = at_shares + (scratch_is_shared ? 0 : warps * share_bytes);
constexpr int at_states = at_shares + warps * share_bytes + (scratch_is_shared ? 0 : scratch_bytes);
constexpr int state_bytes = num_states * blocks_of_values * operand_bytes<keys>;
constexpr int at_gates = at_states + (copies_states ? 2 * state_bytes : 0);
constexpr int at_answers = at_gates + gates_bytes;  // gradients of answers, operands
static_assert(at_answers + num_queries * operand_bytes<values, answer_terms> == block_bytes);

// Blocks whose loads are in flight together.
constexpr int key_blocks_at_once = keys <= 64 ? keys / chunk : 2, value_blocks_at_once = values <= 64 ? values / chunk : 4;

// Where a block's chunk is.
struct Chunk {
  const GradientLaunch& p;
  const Steps& steps;
  char* const memory;
  const int64 number;  // among all chunks and heads

  PARARNN_FUNCTION KeyMemory keys_memory() const {
    return KeyMemory{memory + at_read, memory + at_column, memory + at_query, memory + at_decay, memory + at_scratch};
  }
  // Operands of 16 values of a state, and of its adjoint.
  PARARNN_FUNCTION const char* state(int i, int block) const {
    const int place = (i * blocks_of_values + block) * operand_bytes<keys>;
    return (copies_states ? memory + at_states : p.states + number * state_bytes) + place;
  }
  PARARNN_FUNCTION const char* adjoint(int i, int block) const {
    const int place = (i * blocks_of_values + block) * operand_bytes<keys>;
    return (copies_states ? memory + at_states + state_bytes : p.adjoints + number * state_bytes) + place;
  }
  PARARNN_FUNCTION char* answer(int q) const { return memory + at_answers + q * operand_bytes<values, answer_terms>; }
  PARARNN_FUNCTION void copy_states() const {
    if constexpr (copies_states)
      for (int byte = 16 * threadIdx.x; byte < state_bytes; byte += 16 * threads) {
        const unsigned target = shared_address(memory + at_states + byte);
        copy_async<16>(target, p.states + number * state_bytes + byte);
        copy_async<16>(target + state_bytes, p.adjoints + number * state_bytes + byte);
      }
    end_group_of_copies();
  }
  PARARNN_FUNCTION char* value(int c) const { return memory + at_value + c * tile_bytes_of<values>; }
  PARARNN_FUNCTION char* written(int c) const { return memory + at_written + c * operand_bytes<values>; }
  PARARNN_FUNCTION char* grad_read(int r) const { return memory + at_grad_read + r * operand_bytes<values>; }
  PARARNN_FUNCTION char* inverse(int c, int d) const { return memory + at_inverse + (c * num_corrected + d) * operand_bytes<chunk>; }
  PARARNN_FUNCTION char* of_pure(int c, int d) const { return memory + at_of_pure + (c * num_pure + d) * operand_bytes<chunk>; }
  PARARNN_FUNCTION char* read_pairs(int r, int c) const { return memory + at_read_pairs + (r * num_columns + c) * operand_bytes<chunk>; }
  PARARNN_FUNCTION char* query_pairs(int q, int c) const { return memory + at_query_pairs + (q * num_columns + c) * operand_bytes<chunk>; }
  PARARNN_FUNCTION char* gram(int i, int j) const {
    return memory + at_grams + (i * num_states + j) * num_couplings * tile_bytes_of<chunk>;
  }
  PARARNN_FUNCTION Decays decays() const { return kept_decays(memory + at_decays); }
  // In place of the first row of decays that were kept.
  PARARNN_FUNCTION char* decay_gradient(int i, int j) const {
    return memory + at_decays + (i * num_states + j) * kept_decay_bytes / num_states / num_states;
  }
  PARARNN_FUNCTION char* share(int warp) const { return memory + at_shares + warp * share_bytes; }
};

// The sum of what warps put at a place of their shares.
PARARNN_FUNCTION Square sum_of_squares(const Chunk& at, int place) {
  Square sum = get_block(at.share(0) + place, 0);
  PARARNN_UNROLL
  for (int w = 1; w < warps; ++w) {
    const Square x = get_block(at.share(w) + place, 0);
    all_of<chunk>([&](int j, int e) { sum[j][e] += x[j][e]; });
  }
  return sum;
}
PARARNN_FUNCTION Row sum_of_rows(const Chunk& at, int place) {
  Row sum = get_row(at.share(0) + place);
  PARARNN_UNROLL
  for (int w = 1; w < warps; ++w) {
    const Row x = get_row(at.share(w) + place);
    sum[0] += x[0];
    sum[1] += x[1];
  }
  return sum;
}

// Gradients of decayed forms of 16 keys, as sums over values: of reads and queries by the states before the chunk, of
// columns by the adjoint after it; and shares of that of the decays over the chunk.
struct KeySums {
  Square read[reads][num_states], query[num_queries][num_states], column[num_columns][num_states];
  Factors total;
};
PARARNN_FUNCTION void add_key_sums(const Chunk& at, int k, KeySums& y) {
  PARARNN_FOR(i, num_states) {
    PARARNN_FOR(r, num_reads) y.read[r][i].fill(constant(0));
    PARARNN_FOR(q, num_queries) y.query[q][i].fill(constant(0));
    PARARNN_FOR(c, num_columns) y.column[c][i].fill(constant(0));
    PARARNN_FOR(j, num_states) y.total[i][j].fill(constant(0));
  }
#pragma unroll value_blocks_at_once
  for (int v = 0; v < blocks_of_values; ++v) {
    Operand<chunk> state[num_states], adjoint[num_states];
    PARARNN_FOR(i, num_states) {
      state[i] = get(at.state(i, v), k);
      adjoint[i] = get(at.adjoint(i, v), k);
    }
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states) add_states_product(y.total[i][j], adjoint[i], state[j]);
    PARARNN_FOR(i, num_states) {
      state[i] = turned(state[i]);
      adjoint[i] = turned(adjoint[i]);
      PARARNN_FOR(c, num_columns) add_mixed(y.column[c][i], get(at.written(c), v), adjoint[i]);
      PARARNN_FOR(r, num_reads) add_mixed(y.read[r][i], get(at.grad_read(r), v), state[i]);
    }
    PARARNN_FOR(q, num_queries) {
      const Operand<chunk, answer_terms> answer = get<answer_terms>(at.answer(q), v);
      PARARNN_FOR(i, num_states) add_mixed(y.query[q][i], answer, state[i]);
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

// Puts what only keys and numbers give: operands of pairs of steps.
PARARNN_FUNCTION void put_pairs(const Chunk& at, const Gains& gain, const Decays& decays) {
  Couplings couplings;
  couple(at, decays, couplings);
  if constexpr (num_corrected > 0) {
    Corrections corrections;
    fill_corrections(gain, couplings, reinterpret_cast<real*>(at.memory + at_scratch), corrections);
    PARARNN_FOR(c, num_corrected) {
      PARARNN_FOR(d, num_corrected) put(corrections.inverse[c][d], at.inverse(c, d));
      PARARNN_FOR(d, num_pure) put(corrections.of_pure[c][d], at.of_pure(c, d));
    }
  }
  PARARNN_FOR(c, num_columns) {
    PARARNN_FOR(r, num_reads) put(operand_of(couplings.read[r][c]), at.read_pairs(r, c));
    PARARNN_FOR(q, num_queries) put(operand_of(couplings.query[q][c]), at.query_pairs(q, c));
  }
}

// Adds what 16 values give: what was written and its gradient, and with them those of couplings and gains.
PARARNN_FUNCTION void add_values(const Chunk& at, const Gains& gain, const Row& before, const Row& after, int block,
                                 Couplings& couplings, Gains& grad_gain) {
  const KeyMemory memory = at.keys_memory();
  Square read[reads], grad[num_columns];
  PARARNN_FOR(r, num_reads) read[r].fill(constant(0));
  PARARNN_FOR(c, num_columns) grad[c].fill(constant(0));
#pragma unroll key_blocks_at_once
  for (int k = 0; k < keys / chunk; ++k)
    PARARNN_FOR(i, num_states) {
      const Operand<chunk> state = get(at.state(i, block), k);
      PARARNN_FOR(r, num_reads) add_inner(read[r], get(memory.read(r, i), k), state);
      const Operand<chunk> adjoint = get(at.adjoint(i, block), k);
      PARARNN_FOR(c, num_columns) add_inner(grad[c], get(memory.column(c, i), k), adjoint);
    }
  if constexpr (scales_late) {
    PARARNN_FOR(r, num_reads) read[r] = scaled(read[r], before);
    PARARNN_FOR(c, num_columns) grad[c] = scaled(grad[c], after);
  }
  Operand<chunk> written[num_columns], turned_written[num_columns], right[corrected];
  PARARNN_UNROLL
  for (int c = num_corrected; c < num_columns; ++c) {
    written[c] = operand_of(get_block(at.value(c), block));
    turned_written[c] = turned(written[c]);
  }
  PARARNN_FOR(c, num_corrected) {
    Square x = get_block(at.value(c), block);
    PARARNN_FOR(r, num_reads) add_scaled(x, read[r], gain[c][r]);
    PARARNN_FOR(d, num_pure) add_mixed(x, get(at.of_pure(c, d)), turned_written[num_corrected + d]);
    right[c] = turned(operand_of(x));
  }
  PARARNN_FOR(c, num_corrected) {
    Square x;
    x.fill(constant(0));
    PARARNN_FOR(d, num_corrected) add_mixed(x, get(at.inverse(c, d)), right[d]);
    written[c] = operand_of(x);
    turned_written[c] = turned(written[c]);
  }
  PARARNN_FOR(r, num_reads)
    PARARNN_FOR(c, num_columns) add_mixed(read[r], get(at.read_pairs(r, c)), turned_written[c]);

  // Gradients of what was written.
  Operand<chunk, answer_terms> answer[num_queries];
  Operand<chunk> left[corrected];
  PARARNN_FOR(q, num_queries) answer[q] = get<answer_terms>(at.answer(q), block);
  PARARNN_FOR(c, num_columns) {
    PARARNN_FOR(q, num_queries) add_mixed_back(grad[c], turned(get(at.query_pairs(q, c))), turned(answer[q]));
    if (c < num_corrected) left[c < num_corrected ? c : 0] = turned(operand_of(grad[c]));
  }
  PARARNN_FOR(c, num_corrected) {
    grad[c].fill(constant(0));
    PARARNN_FOR(d, num_corrected) add_mixed_back(grad[c], turned(get(at.inverse(d, c))), left[d]);
  }
  PARARNN_FOR(d, num_pure)
    PARARNN_FOR(c, num_corrected)
      add_mixed_back(grad[num_corrected + d], turned(get(at.of_pure(c, d))), turned(operand_of(grad[c])));
  PARARNN_FOR(c, num_columns) put_block(grad[c], at.value(c), block);

  // Sums over values.
  PARARNN_FOR(c, num_columns) put_at(written[c], at.written(c), block);
  PARARNN_FOR(r, num_reads) {
    Square x;
    x.fill(constant(0));
    PARARNN_FOR(c, num_corrected) {
      all_of<chunk>([&](int j, int e) { grad_gain[c][r][e / 2] += grad[c][j][e] * read[r][j][e]; });
      add_scaled(x, grad[c], gain[c][r]);
    }
    const Operand<chunk> of_read = operand_of(x);
    put_at(of_read, at.grad_read(r), block);
    PARARNN_FOR(c, num_columns) add_inner(couplings.read[r][c], of_read, written[c]);
  }
  PARARNN_FOR(q, num_queries)
    PARARNN_FOR(c, num_columns)
      add_inner(couplings.query[q][c], answer[q], written[c]);
}

PARARNN_FUNCTION void get_gradients(const Chunk& at, Forms& g) {
  const KeyMemory of = at.keys_memory();
  // They take the place of operands, whose blocks of keys other warps may still read.
  PARARNN_FOR(i, num_states) {
    PARARNN_FOR(r, num_reads) get_tile(g.read[r][i], of.read(r, i), gradient_stride);
    PARARNN_FOR(q, num_queries) get_tile(g.query[q][i], of.query(q, i), gradient_stride);
    PARARNN_FOR(c, num_columns) get_tile(g.column[c][i], of.column(c, i), gradient_stride);
    PARARNN_FOR(j, num_states) get_decay_gradient(at, i, j, g.decay[i][j]);
  }
  PARARNN_FOR(c, num_columns) {
    get_tile(g.value[c], at.value(c));
    PARARNN_FOR(r, num_reads)
      if (c < num_corrected)
        g.gain[c < num_corrected ? c : 0][r] = sum_of_rows(at, at_gain_shares + (c * num_reads + r) * row_bytes);
  }
  g.adapt_gradients(at.steps);
}

// Writes the gradients of a warp's gates.
template <int turn> PARARNN_FUNCTION void write_gradients(const Chunk& at, int number) {
  if (warp_number() == turn) {
    Forms g;
    get_gradients(at, g);
    Gradients out(at.p, at.steps, number);
    gradients_of(Turn<turn>(), at.steps, g, out);
    if (!out.finite) at.p.flags[at.steps.span.row * at.p.in.heads + at.steps.span.head] = 1;
  } else if constexpr (turn + 1 < warps) {
    write_gradients<turn + 1>(at, number);
  }
}

PARARNN_FUNCTION void differentiate(const GradientLaunch& p, const Span& span, int number, char* memory) {
  const Steps steps(p.in, span, number, memory + at_gates);
  const Chunk at{p, steps, memory, span.at(p.in, number)};
  const KeyMemory keys_memory = at.keys_memory();
  const int warp = warp_number();
  const auto put_forms_of_keys = [&]() {
    if (warp == 0) put_keys(steps, keys_memory);
    if (warp == 1 % warps) put_queries(steps, keys_memory);
  };
  copy_gates<warps>(p.in, span, number, memory + at_gates);
  at.copy_states();
  wait_for_copies<1>();
  __syncthreads();
  put_forms_of_keys();
  if (warp == 2 % warps) {
    Forms f;
    forms_of_values(steps, f);
    f.adapt(steps);
    PARARNN_FOR(c, num_columns) put_tile(f.value[c], at.value(c));
  }
  if (warp == 3 % warps)
    PARARNN_FOR(q, num_queries) put(operand_of<answer_terms>(grad_answers_of(p, steps, q)), at.answer(q));
  Gains gain;
  {
    Forms f;
    forms_of_numbers(steps, f);
    f.adapt(steps);
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(r, num_reads) gain[c][r] = f.gain[c][r];
    if (warp == warps - 1) keep_decays(Decays(f), memory + at_decays);
  }
  __syncthreads();
  if (warp == 0) put_pairs(at, gain, at.decays());
  wait_for_copies<0>();
  __syncthreads();
  {
    const Row before = late_before(at.decays()), after = late_after(at.decays());
    Couplings couplings;
    couplings.clear();
    Gains grad_gain;
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(r, num_reads) grad_gain[c][r].fill(constant(0));
#pragma unroll 1
    for (int v = warp; v < blocks_of_values; v += warps)
      add_values(at, gain, before, after, v, couplings, grad_gain);
    couplings.keep_earlier();
    PARARNN_FOR(c, num_columns) {
      PARARNN_FOR(r, num_reads) put_block(couplings.read[r][c], at.share(warp), r * num_columns + c);
      PARARNN_FOR(q, num_queries) put_block(couplings.query[q][c], at.share(warp), (num_reads + q) * num_columns + c);
      PARARNN_FOR(r, num_reads)
        if (c < num_corrected) {
          const Row x = grad_gain[c < num_corrected ? c : 0][r];
          put_row(Row{{sum_of_row(x[0]), sum_of_row(x[1])}}, at.share(warp) + at_gain_shares + (c * num_reads + r) * row_bytes);
        }
    }
  }
  __syncthreads();
  if constexpr (!scales_late) {
    put_forms_of_keys();
    __syncthreads();
  }
  Couplings couplings;
  PARARNN_FOR(c, num_columns) {
    PARARNN_FOR(r, num_reads) couplings.read[r][c] = sum_of_squares(at, (r * num_columns + c) * tile_bytes_of<chunk>);
    PARARNN_FOR(q, num_queries)
      couplings.query[q][c] = sum_of_squares(at, ((num_reads + q) * num_columns + c) * tile_bytes_of<chunk>);
  }
  pull_keys(at, at.decays(), couplings);
  __syncthreads();
  if constexpr (decay_shares > 0) {
    if (warp == warps - 1) pull_decays(at, at.decays(), couplings);
    __syncthreads();
  }
  write_gradients<0>(at, number);
}

PARARNN_FUNCTION void run_pass(const GradientLaunch& p, char* memory) {
  const int64 most = p.chunks, index = (int64)blockIdx.x;  // of chunks, then heads, then sequences
  const Span span(p.in, index / most);
  const int number = (int)(index % most);
  if (number < span.chunks()) differentiate(p, span, number, memory);
}

}  // namespace pararnn
