// The forward pass: a block runs a head of a sequence. Warps prepare chunks, other warps hold 16 values of the states each
// and go from chunk to chunk.
#pragma once
#include "ring.h"

namespace pararnn {

using Problem = ForwardLaunch;

// What is in a stage.
constexpr int at_reach = 0;                                                                // [column][state]
constexpr int at_query = at_reach + reach_slots * num_states * operand_bytes<keys>;        // [query][state]
constexpr int at_column = at_query + num_queries * num_states * operand_bytes<keys>;       // [column][state], turned
constexpr int at_coupling = at_column + num_columns * num_states * operand_bytes<keys>;    // [query][column]
constexpr int at_pure = at_coupling + num_queries * num_columns * operand_bytes<chunk>;    // [column][values], turned
constexpr int at_value = at_pure + num_pure * operand_bytes<split_values>;                 // [column][block], sums
// Sums take the place of operands.
constexpr int values_bytes =
    tile_bytes_of<split_values> > operand_bytes<split_values> ? tile_bytes_of<split_values> : operand_bytes<split_values>;
constexpr int at_full = at_value + num_corrected * values_bytes;
constexpr int at_scales = at_full + full_bytes;
constexpr int at_decay = at_scales + scales_bytes;  // while a chunk is prepared
static_assert(at_decay + decay_bytes == stage_bytes);

// Puts values as rows.
PARARNN_FUNCTION void put_values(const Steps& steps, int split, char* stage) {
  Forms f;
  forms_of_values(steps, f);
  f.adapt(steps);
  PARARNN_FOR(c, num_columns)
    put_split(f.value[c], split, c < num_corrected ? stage + at_value + c * values_bytes
                                                   : stage + at_pure + (c - num_corrected) * operand_bytes<split_values>);
  load_again();
}

// Puts sums with the corrections inside of the chunk in place of corrected values.
PARARNN_FUNCTION void correct_values(const Corrections& of, char* stage) {
  if constexpr (num_corrected > 0) {
    Operand<chunk> of_pure[corrected][pure];
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(p, num_pure) {
        Square x;
        x.fill(constant(0));
        PARARNN_FOR(d, num_corrected) add_mixed(x, of.inverse[c][d], turned(of.of_pure[d][p]));
        of_pure[c][p] = operand_of(x);
      }
#pragma unroll 1
    for (int v = 0; v < readers; ++v) {
      Square sums[corrected];
      PARARNN_FOR(c, num_corrected) sums[c].fill(constant(0));
      PARARNN_FOR(d, num_columns) {
        const Operand<chunk> value = rows_of_stage(d < num_corrected
                                                       ? stage + at_value + d * values_bytes
                                                       : stage + at_pure + (d - num_corrected) * operand_bytes<split_values>, v);
        PARARNN_FOR(c, num_corrected)
          add_inner(sums[c], value, d < num_corrected ? of.inverse[c][d < num_corrected ? d : 0]
                                                      : of_pure[c][d < num_corrected ? 0 : d - num_corrected]);
      }
      PARARNN_FOR(c, num_corrected) put_block(sums[c], stage + at_value + c * values_bytes, v);
    }
  }
}

// What is made of the forms of keys in a stage, and of gains and decays that are numbers.
PARARNN_FUNCTION void fill_keys(const Forms& f, const KeyMemory& memory, char* stage, real* scratch, Corrections& corrections) {
  const Decays decays(f);
  Couplings couplings;
  fill_couplings(memory, decays, couplings, stage + at_full);
  put_scales(decays, stage + at_scales);
  PARARNN_FOR(q, num_queries)
    PARARNN_FOR(c, num_columns)
      put(operand_of(couplings.query[q][c]), stage + at_coupling + (q * num_columns + c) * operand_bytes<chunk>);
  if constexpr (num_corrected > 0) {
    fill_corrections(f.gain, couplings, scratch, corrections);
    put_reaches<false>(f.gain, decays, corrections, memory);
  }
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(c, num_columns) turn(memory.column(c, i));
}

PARARNN_FUNCTION void prepare(const ForwardLaunch& p, const Span& span, const Ring& ring, int split, int, int number) {
  const Steps steps(p.in, span, number, ring.gates());
  char* const stage = ring.stage(number);
  const KeyMemory memory{stage + at_reach, stage + at_column, stage + at_query, stage + at_decay,
                         reinterpret_cast<char*>(ring.scratch())};
  wait_for_copies<0>();
  __syncwarp();
  ring.await_free(number);
  put_values(steps, split, stage);
  Forms f;
  put_forms(steps, memory, f);
  if (number + producers < span.chunks()) copy_gates<1>(p.in, span, number + producers, ring.gates());
  Corrections corrections;
  fill_keys(f, memory, stage, ring.scratch(), corrections);
  load_again();
  correct_values(corrections, stage);
  arrive(ring.filled[number % stages]);
}

// Writes answers (value, step) as rows of a step.
PARARNN_FUNCTION void write_answers(Square& y, answer_io* target, const Span& span, int number, int block, int64 step_stride) {
  // Two values of a step lie next to each other in one lane after its tiles are transposed.
  PARARNN_FOR(j, 2)
    PARARNN_FOR(i, 2) {
      const int l = number * chunk + 8 * j + lane_row(), value = block * chunk + 8 * i + lane_column();
      answer_io* const at = target + span.time(l < span.count ? l : 0) * step_stride + value;
      if constexpr (same<answer_io, bfloat16>::value) {
        const unsigned word = transpose(to_bfloat16s(y[j][2 * i], y[j][2 * i + 1]));
        if (l >= span.count) continue;
        if (size_values % 2 == 0 && value < size_values) {
          *reinterpret_cast<unsigned*>(at) = word;
        } else {
          if (value < size_values) at[0] = answer_io{(unsigned short)word};
          if (value + 1 < size_values) at[1] = answer_io{(unsigned short)(word >> 16)};
        }
      } else {
        PARARNN_FOR(e, 2) {  // a value at two steps
          const int step = number * chunk + 8 * j + lane_column() + e, row = block * chunk + 8 * i + lane_row();
          if (step < span.count && row < size_values)
            target[span.time(step) * step_stride + row] = narrow<answer_io>(y[j][2 * i + e]);
        }
      }
    }
}

PARARNN_FUNCTION void go(const ForwardLaunch& p, const Span& span, const Ring& ring, int split, int reader) {
  const int block = split * readers + reader;
  const int64 sequence = span.sequence * p.in.heads + span.head;
  Tile<keys> state[num_states];
  PARARNN_FOR(i, num_states)
    load_state(p.in.initial[i] == nullptr ? nullptr : p.in.initial[i] + sequence * state_numbers, block, state[i]);
  bool finite = true;
  const int count = span.chunks();
  for (int number = 0; number < count; ++number) {
    char* const stage = ring.stage(number);
    ring.await_filled(number);
    Square write[corrected], low[corrected], answer[num_queries];
    Operand<chunk> written[num_columns];
    PARARNN_FOR(q, num_queries) answer[q].fill(constant(0));
    PARARNN_FOR(c, num_corrected)
      write[c] = get_block(stage + at_value + c * values_bytes, reader);
    PARARNN_FOR(c, num_corrected) low[c].fill(constant(0));
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(k, keys / 16) {
        const Operand<chunk> left = operand_at(state[i], k);
        if (p.memory != nullptr)
          put_at(left, p.memory + ((span.at(p.in, number) * num_states + i) * blocks_of_values + block) * operand_bytes<keys>, k);
        PARARNN_FOR(c, num_corrected)
          add_inner(k % 2 ? low[c] : write[c], left, get(stage + at_reach + (c * num_states + i) * operand_bytes<keys>, k));
        PARARNN_FOR(q, num_queries)
          add_inner(answer[q], left, get(stage + at_query + (q * num_states + i) * operand_bytes<keys>, k));
      }
    Operand<chunk> late[num_columns];
    PARARNN_FOR(c, num_columns) {
      if (c < num_corrected) {
        Square& x = write[c < num_corrected ? c : 0];
        all_of<chunk>([&](int j, int e) { x[j][e] += low[c < num_corrected ? c : 0][j][e]; });
        written[c] = operand_of(x);
      } else {
        written[c] = rows_of_stage(stage + at_pure + (c - num_corrected) * operand_bytes<split_values>, reader);
      }
      late[c] = written[c];
      if constexpr (scales_late) {
        Square x = c < num_corrected ? write[c < num_corrected ? c : 0] : numbers_of(written[c]);
        scale_columns(x, stage + at_scales + scale_bytes);
        late[c] = operand_of(x);
      }
    }
    decay_states(state, stage + at_full, false);
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(c, num_columns)
        PARARNN_FOR(k, keys / 16)
          add_mixed_at(state[i], late[c], get(stage + at_column + (c * num_states + i) * operand_bytes<keys>, k), k);
    PARARNN_FOR(q, num_queries) {
      if (scales_late) scale_columns(answer[q], stage + at_scales);
      PARARNN_FOR(c, num_columns)
        add_inner(answer[q], written[c], get(stage + at_coupling + (q * num_columns + c) * operand_bytes<chunk>));
    }
    arrive(ring.emptied[number % stages]);
    PARARNN_FOR(q, num_queries) {
      finite = all_finite(answer[q]) && finite;
      write_answers(answer[q], p.answers + (span.row * num_queries + q) * p.answer_stride + span.head * size_values,
                    span, number, block, p.in.heads * size_values);
    }
  }
  PARARNN_FOR(i, num_states) {
    finite = all_finite(state[i]) && finite;
    store_state(state[i], block, p.final[i] + sequence * state_numbers);
  }
  if (!finite) p.flags[span.row * p.in.heads + span.head] = 1;
}

PARARNN_FUNCTION void run_pass(const ForwardLaunch& p, char* memory) { run_chunks<false>(p, memory); }

}  // namespace pararnn
