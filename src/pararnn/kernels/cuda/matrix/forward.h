// The forward pass: a block runs one head of one row from the first step to the last. States stay in registers:
// memory gets the outputs, and the states before every checkpoint-th step.
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
  gates.copy(place, 0, -1);
  end_group_of_copies();
  States state;
  fill_all(state, constant(0));
  const int64 step_numbers = p.in.heads * size_V;
  io* const outputs = p.output + place.row * length * step_numbers + place.head * size_V;
  for (int l = 0; l < length; ++l) {
    if (window > 0 && l % (window > 0 ? window : 1) == 0) {
      wait_for_copies<0>();
      __syncthreads();
      const int next = window_of(l) + 1;
      gates.copy(place, next * window < length ? next : -1, next - 1);
      end_group_of_copies();
    }
    if (l % checkpoint == 0) store_all(state, p.memory + place.at_chunk(l / checkpoint));
    Output output;
    io* const target = outputs + place.time(l) * step_numbers;
    const int sequence = place.sequence(l);
    if (sequence < 0) {
      fill_all(output, constant(0));
      store_all(output, target);
      continue;
    }
    begin(place, l, sequence, state);
    Gates gate;
    load_gates(gates.at(place, l), own.bias, gate);
    States next;
    forward_step(own.block, own.matrices, own.param, state, gate, next, output);
    store_all(output, target);
    state = next;
    if (place.sequence(l + 1) != sequence) store_states(place, state, sequence, p.final);
  }
}

}  // namespace pararnn
