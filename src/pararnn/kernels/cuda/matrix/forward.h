// The forward pass: a block runs one head of one row from the first step to the last. States stay in registers:
// memory gets the outputs, and the states before every checkpoint-th step. The output of a step is read while the
// next one runs, so that neither waits for what the other exchanges. What it reads is finished once a window: a warp
// then has an output of its own.
#pragma once
#include "inputs.h"

namespace pararnn {

using Problem = ForwardLaunch;
static_assert(feeds_at + GateFeed::memory_bytes == shared_bytes);

struct ForwardPass {
  const ForwardLaunch& p;
  const Place place;
  Head own;
  GateFeed gates;
  real* const slots;
  const int64 step_numbers;
  io* const outputs;

  PARARNN_FUNCTION ForwardPass(const ForwardLaunch& p, char* memory)
      : p(p), place(p.in), own(place, memory), gates(gates_of(place, memory + feeds_at)),
        slots(reinterpret_cast<real*>(memory + slots_at)), step_numbers(p.in.heads * size_V),
        outputs(p.output + place.row * place.length * step_numbers + place.head * size_V) {}

  PARARNN_FUNCTION real* slot(int l) const { return slots + l % span * slot_numbers; }

  // Writes the outputs of a window.
  PARARNN_FUNCTION void finish(int first, int end) {
    finish::Gates bias;
    load_bias(place, bias);
    for (int l = first + warp(); l < end; l += warps) {
      finish::Links links;
      finish::Gates gate;
      finish::Output output;
      links.load(slot(l));
      load_gates(gates.cursor(place, l).at(), bias, gate);
      if (events && place.sequence(l) < 0) fill_all(output, constant(0));
      else finish::finish_step(links, gate, output);
      store_all_by_lanes(output, outputs + place.time(l) * step_numbers);
    }
  }

  PARARNN_FUNCTION void run() {
    const int length = place.length;
    if (length == 0) return;
    gates.copy(place, 0, -1);
    end_group_of_copies();
    States state, last;  // before a step, and after the one before it
    if (events) fill_all(state, constant(0));
    else load_states(place, p.in.initial, (int)place.row, state);
    Gates last_gate, ahead;
    for (int first = 0; first < length; first += span) {
      const int end = first + span < length ? first + span : length;
      wait_for_copies<0>();
      __syncthreads();
      if (first > 0) {
        finish(first - span, first);
        __syncthreads();
      }
      const int number = window_of(first);
      gates.copy(place, end < length ? number + 1 : -1, number);
      end_group_of_copies();
      auto source = gates.cursor(place, first);
      load_gates(source.at(), own.bias, ahead);
      bool waits = false;  // true if the output of the step before is not yet read
      for (int l = first; l < end; ++l) {
        if (l % checkpoint == 0) store_all(state, p.memory + place.at_chunk(l / checkpoint));
        const Gates gate = ahead;
        gates.move(place, source, l + 1 < end ? 1 : 0);
        load_gates(source.at(), own.bias, ahead);
        const int sequence = place.sequence(l);
        if (events && sequence < 0) {
          if (waits) read(last, last_gate, l - 1);
          waits = false;
          continue;
        }
        if (events) begin(place, l, sequence, state);
        States next;
        advance_step(own.block, own.matrices, own.param, state, gate, next);
        if (events ? waits : l > first) read(last, last_gate, l - 1);
        waits = true;
        state = last = next;
        last_gate = gate;
        if (events && place.sequence(l + 1) != sequence) store_states(place, state, sequence, p.final);
      }
      if (waits) read(last, last_gate, end - 1);
    }
    __syncthreads();
    finish((length - 1) / span * span, length);
    if (!events) store_states(place, state, (int)place.row, p.final);
  }
  PARARNN_FUNCTION void read(const States& state, const Gates& gate, int l) {
    WideOutput output;  // none: outputs are vectors
    readout_step(own.block, own.matrices, own.param, state, gate, output, slot(l));
  }
};

PARARNN_FUNCTION void run_pass(const ForwardLaunch& p, char* memory) { ForwardPass(p, memory).run(); }

}  // namespace pararnn
