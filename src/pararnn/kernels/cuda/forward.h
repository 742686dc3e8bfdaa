// The forward pass: a warp runs a tile of channels of one row from the first step to the last.
#pragma once
#include "problem.h"

namespace pararnn {

struct ForwardProblem {
  Inputs in;
  io* states[num_states];      // (row, time, channel)
  scalar* final[num_states];   // (sequence, channel)
  int64* info;                 // sweeps, mended columns
};

PARARNN_FUNCTION void run_forward(const ForwardProblem& p) {
  constexpr int direction = reverse ? -1 : 1;
  using Ring = InputRing<direction>;
  __shared__ __align__(16) char memory[Ring::bytes];
  const Inputs& in = p.in;
  const Place at;
  const int length = (int)in.length;
  const Weights weights(in, at);
  Ring ring(memory, in, at, weights);
  Events event(in, at, 1);
  io* out[num_states];
#pragma unroll
  for (int n = 0; n < num_states; ++n)
    out[n] = p.states[n] + (at.row * in.length + start_time(in, direction)) * channels + at.own;
  real state[num_states][per_lane];
  load_states(state, in.initial, at.row, at);

  const auto begin_stage = [&](int j) {
    if (events && j % lanes == 0) event.refresh(j);
  };
  const auto run_step = [&](const StepInputs& values, int s, int j, auto) {
    if (events && event.any(j)) {
      if (event.pad(j) || event.reset(j)) clear(state);
      else if (event.begin(j)) load_states(state, in.initial, event.number_of(j), at);
    }
    real next[num_states][per_lane];
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
      real own_state[num_states], own_gate[num_gates], own_field[field_slots];
      real own_param[param_slots], own_next[num_states];
      column(state, c, own_state);
      column(values.gate, c, own_gate);
      column(values.field, c, own_field);
      column(weights.params, c, own_param);
      step(own_state, own_gate, own_field, own_param, own_next);
#pragma unroll
      for (int n = 0; n < num_states; ++n) next[n][c] = own_next[n];
    }
    if (events && event.pad(j)) clear(next);
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      store<paired_channels>(out[n] + s * direction * channels, next[n], at.active);
#pragma unroll
      for (int c = 0; c < per_lane; ++c) state[n][c] = next[n][c];
    }
    if (events && event.end(j) && !event.pad(j))
      store_states(p.final, state, event.number_of(j), at);
  };
  const auto end_stage = [&](int) {
#pragma unroll
    for (int n = 0; n < num_states; ++n) out[n] += steps * direction * channels;
  };
  for_each_step<0>(ring, length, begin_stage, run_step, end_stage);
  if (!events) store_states(p.final, state, at.row, at);
  if (blockIdx.x == 0 && lane() < 2) p.info[lane()] = 0;
}

}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(32)
forward(const __grid_constant__ pararnn::ForwardProblem problem) {
  pararnn::run_forward(problem);
}
