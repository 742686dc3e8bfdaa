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
  using Inputs = StepInputs<AdvanceReady>;
  const ForwardLaunch& p;
  const Place place;
  Head own;
  GateFeed gates;
  const int64 step_numbers;
  io* const outputs;

  PARARNN_FUNCTION ForwardPass(const ForwardLaunch& p, char* memory)
      : p(p), place(p.in), own(place, memory), gates(gates_of(place, memory + feeds_at)),
        step_numbers(p.in.heads * Output::numbers),
        outputs(p.output + place.row * place.length * step_numbers + place.head * Output::numbers) {}

  // Writes the outputs of a window.
  PARARNN_FUNCTION void finish(int first, int end) {
    for (int l = first + warp(); l < end; l += warps) {
      finish::Links links;
      finish::AdvanceReady ready;
      finish::Output output;
      links.load(own.slot(l));
      load_all(own.ready(l), ready);
      if (events && place.sequence(l) < 0) fill_all(output, constant(0));
      else finish::finish_step(links, ready, output);
      store_all<true>(output, output_of(l));
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
    Inputs last_inputs, ahead;
    last = state;
    fill_all(last_inputs.ready, constant(0));
    fill_all(last_inputs.gate, constant(0));
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
      prepare<finish::AdvanceReady>(place, own, gates, first, end);
      __syncthreads();
      auto source = gates.cursor(place, first);
      ahead.load(own, first, source.at());
      // True if the output of the step before is not yet read. Without events it is read in any case, though it may
      // be read already or not exist: a branch would keep what follows from running beside it. Large states between
      // products by tiles were slower so.
      bool waits = !events && (States::entries <= 16 || !Columns::in_pairs);
      for (int part = first; part < end; part += checkpoint) {
        const int stop = part + checkpoint < end ? part + checkpoint : end;
        if (part % checkpoint == 0 && p.memory != nullptr) store_all(state, p.memory + place.at_chunk(part / checkpoint));
#pragma unroll turns
        for (int l = part; l < stop; ++l) {
          const Inputs inputs = ahead;
          const int step = l + 1 < end ? 1 : 0;
          gates.move(place, source, step);
          ahead.load(own, l + step, source.at());
          const int sequence = place.sequence(l);
          if (events && sequence < 0) {
            if (waits) read(last, last_inputs, l - 1);
            waits = false;
            WideOutput padding;
            fill_all(padding, constant(0));
            store_all(padding, output_of(l));
            continue;
          }
          if (events) begin(place, l, sequence, state);
          States next;
          advance_step(own.block, own.matrices, own.param, state, inputs.ready, inputs.gate, next);
          if (waits) read(last, last_inputs, l - 1);
          waits = true;
          state = last = next;
          last_inputs = inputs;
          if (events && place.sequence(l + 1) != sequence) store_states(place, state, sequence, p.final);
        }
      }
      if (waits) read(last, last_inputs, end - 1);
    }
    __syncthreads();
    finish((length - 1) / span * span, length);
    if (!events) store_states(place, state, (int)place.row, p.final);
  }
  PARARNN_FUNCTION void read(const States& state, const Inputs& inputs, int l) {
    WideOutput output;
    readout_step(own.block, own.matrices, own.param, state, inputs.ready, inputs.gate, output, own.slot(l + span));
    if (l >= 0) store_all(output, output_of(l));
  }
  PARARNN_FUNCTION io* output_of(int l) const { return outputs + place.time(l) * step_numbers; }
};

PARARNN_FUNCTION void run_pass(const ForwardLaunch& p, char* memory) { ForwardPass(p, memory).run(); }

}  // namespace pararnn
