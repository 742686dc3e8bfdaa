// The forward pass: a block runs one head of one row from the first step to the last. States stay in registers:
// memory gets the outputs, and the states before every checkpoint-th step. The output of a step is read while the
// next one runs, so that neither waits for what the other exchanges.
#pragma once
#include "inputs.h"

namespace pararnn {

using Problem = ForwardLaunch;
static_assert(feeds_at + GateFeed::memory_bytes == shared_bytes);

PARARNN_FUNCTION void run_pass(const ForwardLaunch& p, char* memory) {
  const Place place(p.in);
  Head own(place, memory);
  GateFeed gates = gates_of(place, memory + feeds_at);
  const int length = place.length;
  if (length == 0) return;
  gates.copy(place, 0, -1);
  end_group_of_copies();
  States state, last;  // before a step, and after the one before it
  if (events) fill_all(state, constant(0));
  else load_states(place, p.in.initial, (int)place.row, state);
  const int64 step_numbers = p.in.heads * size_V;
  io* const outputs = p.output + place.row * length * step_numbers + place.head * size_V;
  Gates gate, last_gate, ahead;
  bool waits = false;  // true if the output of the step before is not yet read
  const auto read_last = [&](int l) {
    Output output;
    readout_step(own.block, own.matrices, own.param, last, last_gate, output);
    store_all(output, outputs + place.time(l) * step_numbers);
  };
  for (int l = 0; l < length; ++l) {
    if (window > 0 ? l % (window > 0 ? window : 1) == 0 : l == 0) {
      wait_for_copies<0>();
      __syncthreads();
      const int next = window_of(l) + 1;
      gates.copy(place, next * window < length ? next : -1, next - 1);
      end_group_of_copies();
      load_gates(gates.at(place, l), own.bias, ahead);
    }
    if (l % checkpoint == 0) store_all(state, p.memory + place.at_chunk(l / checkpoint));
    gate = ahead;
    load_gates(gates.at(place, l + 1 < length ? l + 1 : l), own.bias, ahead);
    const int sequence = place.sequence(l);
    if (events) {
      if (sequence < 0) {
        if (waits) read_last(l - 1);
        waits = false;
        Output output;
        fill_all(output, constant(0));
        store_all(output, outputs + place.time(l) * step_numbers);
        continue;
      }
      begin(place, l, sequence, state);
    }
    States next;
    advance_step(own.block, own.matrices, own.param, state, gate, next);
    if (events ? waits : l > 0) read_last(l - 1);
    waits = true;
    state = last = next;
    last_gate = gate;
    if (events && place.sequence(l + 1) != sequence) store_states(place, state, sequence, p.final);
  }
  if (!events || waits) read_last(length - 1);
  if (!events) store_states(place, state, (int)place.row, p.final);
}

}  // namespace pararnn
