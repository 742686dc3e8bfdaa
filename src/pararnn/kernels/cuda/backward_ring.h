// The ring that feeds the backward pass: inputs, saved states, and the gradients that arrive for the states.
//
// Needs, besides problem.h: arriving (by state: whether gradients of its sequence arrive),
// backward_reads_gates (whether gradients depend on the gates' values).
#pragma once
#include "linear.h"

namespace pararnn {

// A row a step of one state's tensor.
struct StateStream {
  using Rows = Stream<io, 1, tile, chunk>;
  Rows rows;
  int64 time;

  // `origin`: the row of step 0 of processing. `stride`: from step to step of processing.
  PARARNN_FUNCTION void start(char* place, int offset, const io* origin, int64 stride,
                              const Place& at) {
    time = stride;
    rows.start(place, offset, time, [&](int e) -> const io* {
      return at.first + e < channels ? origin + at.first + e : nullptr;
    });
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const { rows.copy(slot, s, left, time, 0); }
  PARARNN_FUNCTION void next_stage() { rows.next_stage(time); }
};

PARARNN_FUNCTION constexpr int count_arriving() {
  int count = 0;
  for (int n = 0; n < num_states; ++n) count += arriving[n];
  return count;
}

struct BackwardInputs {
  StepInputs step;
  States previous, grad;
};

// Inputs, saved states h_{l-1}, and the gradients that arrive for the states.
template <int direction> struct BackwardRing {
  using OwnInputs = InputRing<direction, backward_reads_gates>;
  static constexpr int state_bytes = StateStream::Rows::bytes;
  static constexpr int bytes = OwnInputs::bytes + (num_states + count_arriving()) * state_bytes;

  using Values = BackwardInputs;

  OwnInputs inputs;
  StateStream saved[num_states], grads[num_states];
  int without;  // steps at the end that have no state before them

  PARARNN_FUNCTION BackwardRing(char* place, const BackwardProblem& p, const Place& at,
                                const Weights& weights, const Span& span)
      : inputs(place, p.in, at, weights, span.begin), without(span.end == (int)p.in.length) {
    const int64 length = p.in.length, t = time_of(p.in, direction, span.begin);
    int next = OwnInputs::bytes;
    each<num_states>([&](int n) {
      saved[n].start(place, next, p.states[n] + (at.row * length + t + direction) * channels,
                     direction * channels, at);
      next += state_bytes;
    });
    each<num_states>([&](int n) {
      if (!arriving[n]) return;
      grads[n].start(place, next, p.grad_states[n] + at.row * p.grad_row[n] + t * p.grad_time[n],
                     direction * p.grad_time[n], at);
      next += state_bytes;
    });
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const {
    inputs.copy(slot, s, left);
    each<num_states>([&](int n) {
      saved[n].copy(slot, s, left - without);
      if (arriving[n]) grads[n].copy(slot, s, left);
    });
  }
  PARARNN_FUNCTION void read(int slot, int s, BackwardInputs& values) const {
    inputs.read(slot, s, values.step);
    each<num_states>([&](int n) {
      saved[n].rows.read(slot, s, 0, values.previous[n]);
      if (arriving[n]) grads[n].rows.read(slot, s, 0, values.grad[n]);
    });
  }
  PARARNN_FUNCTION void next_stage() {
    inputs.next_stage();
    each<num_states>([&](int n) {
      saved[n].next_stage();
      if (arriving[n]) grads[n].next_stage();
    });
  }
};

}  // namespace pararnn
