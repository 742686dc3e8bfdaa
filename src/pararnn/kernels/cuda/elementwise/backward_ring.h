// The ring that feeds the backward pass: inputs, saved states, and incoming gradients of the states.
//
// Needs, in addition to problem.h: arriving (by state: true if gradients of its sequence come in),
// backward_reads_gates (true if gradients depend on the gates' values).
#pragma once
#include "linear.h"

namespace pararnn {

// Stream of one state's tensor, a row per step.
struct StateStream {
  using Rows = Stream<io, 1, tile_channels, chunk>;
  Rows rows;
  int64 time;

  // `origin`: the row of step 0 in processing order. `stride`: between steps in processing order.
  PARARNN_FUNCTION void start(char* ring, int start_byte, const io* origin, int64 stride,
                              const Tile& tile) {
    time = stride;
    rows.start(ring, start_byte, time, [&](int e) -> const io* {
      return tile.first + e < channels ? origin + tile.first + e : nullptr;
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

// Inputs, saved states h_{l-1}, and incoming gradients of the states.
template <int direction> struct BackwardRing {
  using OwnInputs = InputRing<direction, backward_reads_gates>;
  static constexpr int state_bytes = StateStream::Rows::bytes;
  static constexpr int bytes = OwnInputs::bytes + (num_states + count_arriving()) * state_bytes;

  using Values = BackwardInputs;

  OwnInputs inputs;
  StateStream states[num_states], grads[num_states];
  int stateless;  // steps at the end that have no state before them

  PARARNN_FUNCTION BackwardRing(char* ring, const BackwardProblem& p, const Tile& tile,
                                const Weights& weights, const Span& span)
      : inputs(ring, p.in, tile, weights, span.begin), stateless(span.end == (int)p.in.length) {
    const int64 length = p.in.length, t = time_of(p.in, direction, span.begin);
    int next = OwnInputs::bytes;
    each<num_states>([&](int n) {
      states[n].start(ring, next, p.states[n] + (tile.row * length + t + direction) * channels,
                     direction * channels, tile);
      next += state_bytes;
    });
    each<num_states>([&](int n) {
      if (!arriving[n]) return;
      grads[n].start(ring, next, p.grad_states[n] + tile.row * p.grad_row[n] + t * p.grad_time[n],
                     direction * p.grad_time[n], tile);
      next += state_bytes;
    });
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const {
    inputs.copy(slot, s, left);
    each<num_states>([&](int n) {
      states[n].copy(slot, s, left - stateless);
      if (arriving[n]) grads[n].copy(slot, s, left);
    });
  }
  PARARNN_FUNCTION void read(int slot, int s, BackwardInputs& values) const {
    inputs.read(slot, s, values.step);
    each<num_states>([&](int n) {
      states[n].rows.read(slot, s, 0, values.previous[n]);
      if (arriving[n]) grads[n].rows.read(slot, s, 0, values.grad[n]);
    });
  }
  PARARNN_FUNCTION void next_stage() {
    inputs.next_stage();
    each<num_states>([&](int n) {
      states[n].next_stage();
      if (arriving[n]) grads[n].next_stage();
    });
  }
};

}  // namespace pararnn
