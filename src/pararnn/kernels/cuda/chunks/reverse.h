// The adjoint of the states: as the forward pass, from the last chunk to the first. Memory gets it after each chunk.
#pragma once
#include "ring.h"

namespace pararnn {

using Problem = ReverseLaunch;

// What is in a stage.
constexpr int at_column = 0;                                                               // [column][state]
constexpr int at_reach = at_column + num_columns * num_states * operand_bytes<keys>;       // [column][state], turned
constexpr int at_query = at_reach + reach_slots * num_states * operand_bytes<keys>;        // [query][state], turned
constexpr int at_coupling = at_query + num_queries * num_states * operand_bytes<keys>;     // [query][column], turned
constexpr int at_answer = at_coupling + num_queries * num_corrected * operand_bytes<chunk>;  // [query], turned
constexpr int at_full = at_answer + num_queries * operand_bytes<split_values>;
constexpr int at_scales = at_full + full_bytes;
constexpr int at_decay = at_scales + scales_bytes;  // while a chunk is prepared
static_assert(at_decay + decay_bytes == stage_bytes);

PARARNN_FUNCTION void fill_keys(const Forms& f, const KeyMemory& memory, char* stage, real* scratch) {
  const Decays decays(f);
  Couplings couplings;
  fill_couplings(memory, decays, couplings, stage + at_full);
  put_scales(decays, stage + at_scales);
  PARARNN_FOR(q, num_queries)
    PARARNN_FOR(c, num_corrected)
      put(turned(operand_of(couplings.query[q][c])), stage + at_coupling + (q * num_corrected + c) * operand_bytes<chunk>);
  if constexpr (num_corrected > 0) {
    Corrections corrections;
    fill_corrections(f.gain, couplings, scratch, corrections);
    put_reaches<true>(f.gain, decays, corrections, memory);
  }
  PARARNN_FOR(i, num_states)
    PARARNN_FOR(q, num_queries) turn(memory.query(q, i));
}

PARARNN_FUNCTION void prepare(const ReverseLaunch& p, const Span& span, const Ring& ring, int split, int turn_number, int number) {
  const Steps steps(p.in, span, number, ring.gates());
  char* const stage = ring.stage(turn_number);
  const KeyMemory memory{stage + at_reach, stage + at_column, stage + at_query, stage + at_decay,
                         reinterpret_cast<char*>(ring.scratch())};
  wait_for_copies<0>();
  __syncwarp();
  ring.await_free(turn_number);
  PARARNN_FOR(q, num_queries)
    put_split(grad_answers_of(p, steps, q), split, stage + at_answer + q * operand_bytes<split_values>);
  Forms f;
  put_forms(steps, memory, f);
  if (number - producers >= 0) copy_gates<1>(p.in, span, number - producers, ring.gates());
  fill_keys(f, memory, stage, ring.scratch());
  arrive(ring.filled[turn_number % stages]);
}

PARARNN_FUNCTION void go(const ReverseLaunch& p, const Span& span, const Ring& ring, int split, int reader) {
  const int block = split * readers + reader;
  const int64 sequence = span.sequence * p.in.heads + span.head;
  Tile<keys> adjoint[num_states];
  PARARNN_FOR(i, num_states)
    load_state(p.grad_final[i] == nullptr ? nullptr : p.grad_final[i] + sequence * state_numbers, block, adjoint[i]);
  const int count = span.chunks();
  for (int turn = 0; turn < count; ++turn) {
    const int number = count - 1 - turn;
    char* const stage = ring.stage(turn);
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(k, keys / 16)
        put_at(operand_at(adjoint[i], k),
               p.memory + ((span.at(p.in, number) * num_states + i) * blocks_of_values + block) * operand_bytes<keys>, k);
    ring.await_filled(turn);
    Operand<chunk> answer[num_queries];
    PARARNN_FOR(q, num_queries)
      answer[q] = rows_of_stage(stage + at_answer + q * operand_bytes<split_values>, reader);
    Operand<chunk> written[corrected];
    PARARNN_FOR(c, num_corrected) {
      Square sums, odd;
      sums.fill(constant(0));
      odd.fill(constant(0));
      PARARNN_FOR(i, num_states)
        PARARNN_FOR(k, keys / 16)
          add_inner(k % 2 ? odd : sums, operand_at(adjoint[i], k),
                    get(stage + at_column + (c * num_states + i) * operand_bytes<keys>, k));
      all_of<chunk>([&](int j, int e) { sums[j][e] += odd[j][e]; });
      if (scales_late) scale_columns(sums, stage + at_scales + scale_bytes);
      PARARNN_FOR(q, num_queries)
        add_mixed(sums, answer[q], get(stage + at_coupling + (q * num_corrected + c) * operand_bytes<chunk>));
      written[c] = operand_of(sums);
    }
    PARARNN_FOR(q, num_queries)
      if constexpr (scales_late) {
        Square x = numbers_of(answer[q]);
        scale_columns(x, stage + at_scales);
        answer[q] = operand_of(x);
      }
    decay_states(adjoint, stage + at_full, true);
    PARARNN_FOR(j, num_states)
      PARARNN_FOR(k, keys / 16) {
        PARARNN_FOR(q, num_queries)
          add_mixed_at(adjoint[j], answer[q], get(stage + at_query + (q * num_states + j) * operand_bytes<keys>, k), k);
        PARARNN_FOR(c, num_corrected)
          add_mixed_at(adjoint[j], written[c], get(stage + at_reach + (c * num_states + j) * operand_bytes<keys>, k), k);
      }
    arrive(ring.emptied[turn % stages]);
  }
  bool finite = true;
  PARARNN_FOR(i, num_states) {
    finite = all_finite(adjoint[i]) && finite;
    if (p.grad_initial[i] != nullptr) store_state(adjoint[i], block, p.grad_initial[i] + sequence * state_numbers);
  }
  if (!finite) p.flags[span.row * p.in.heads + span.head] = 1;
}

PARARNN_FUNCTION void run_pass(const ReverseLaunch& p, char* memory) { run_chunks<true>(p, memory); }

}  // namespace pararnn
