// The backward pass: the linear recurrence of the adjoint, from the last step to the first. Gates are
// recomputed from the saved states, and every gradient is made here.
//
// Needs, besides problem.h: arriving (by state: whether gradients of its sequence arrive),
// backward_reads_gates (whether gradients depend on the gates' values).
#pragma once
#include "linear.h"

namespace pararnn {

constexpr int sum_block = 64;  // steps summed apart, so that long sums stay exact
constexpr bool paired_gates = chunk >= per_lane * (int)sizeof(io);

// A row a step of one state's tensor.
struct StateStream {
  using Rows = Stream<io, 1, tile, chunk>;
  Rows rows;
  int64 time;

  // `origin`: the row of step 0 of processing. `stride`: from step to step of processing.
  PARARNN_FUNCTION void start(char* place, const io* origin, int64 stride, const Place& at) {
    time = stride;
    rows.start(place, time, [&](int e) -> const io* {
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
  real previous[num_states][per_lane], grad[num_states][per_lane];
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
    char* next = place + OwnInputs::bytes;
#pragma unroll
    for (int n = 0; n < num_states; ++n, next += state_bytes)
      saved[n].start(next, p.states[n] + (at.row * length + t + direction) * channels,
                     direction * channels, at);
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      if (!arriving[n]) continue;
      grads[n].start(next, p.grad_states[n] + at.row * p.grad_row[n] + t * p.grad_time[n],
                     direction * p.grad_time[n], at);
      next += state_bytes;
    }
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const {
    inputs.copy(slot, s, left);
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      saved[n].copy(slot, s, left - without);
      if (arriving[n]) grads[n].copy(slot, s, left);
    }
  }
  PARARNN_FUNCTION void read(int slot, int s, BackwardInputs& values) const {
    inputs.read(slot, s, values.step);
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      saved[n].rows.read(slot, s, 0, values.previous[n]);
      if (arriving[n]) grads[n].rows.read(slot, s, 0, values.grad[n]);
    }
  }
  PARARNN_FUNCTION void next_stage() {
    inputs.next_stage();
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      saved[n].next_stage();
      if (arriving[n]) grads[n].next_stage();
    }
  }
};

PARARNN_FUNCTION void store_gate_gradient(const Inputs& in, io* to, const real (&x)[per_lane],
                                          const Place& at) {
  if constexpr (paired_gates) {
    store<true>(to, x, at.active);
  } else {  // the lane's channels may be of two heads
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
      if (c < at.active) to[gate_offset(in, at.own + c) - gate_offset(in, at.own)] = narrow<io>(x[c]);
  }
}

struct BackwardPass {
  using Launch = BackwardLaunch;
  static constexpr int direction = reverse ? 1 : -1;
  using Ring = BackwardRing<direction>;
  static constexpr int sum_bytes = num_weights * tile * (int)sizeof(real);
  static constexpr int bytes = Ring::bytes + sum_bytes;

  const BackwardProblem& p;
  const Place& at;
  const Weights& weights;
  char* memory;

  PARARNN_FUNCTION BackwardPass(const BackwardProblem& p, const Place& at, const Weights& weights,
                                char* memory)
      : p(p), at(at), weights(weights), memory(memory) {}

  PARARNN_FUNCTION void report(int, int, bool) const {}
  PARARNN_FUNCTION void report_none() const {}

  // The gradient that arrives for the last state of all.
  PARARNN_FUNCTION void origin(real (&adjoint)[num_states][per_lane]) const {
    load_states(adjoint, p.grad_final, at.row, at);
  }

  // Runs a span from `adjoint`, the gradient of the state after it, which becomes that of the state
  // before it. `linear` learns how the result depends on the adjoint at span.first. `slot`: of the
  // span's sums.
  template <class Linear>
  PARARNN_FUNCTION void sweep(const Span& span, real (&adjoint)[num_states][per_lane],
                              Linear& linear, int64 slot) const {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    real(&total)[num_weights][tile] = *reinterpret_cast<real(*)[num_weights][tile]>(memory);
    Ring ring(memory + sum_bytes, p, at, weights, span);
    Events event(in, at, -1, span.begin);
    const int64 start = time_of(in, direction, span.begin), time = direction * time_stride(in);
    io* grad_gates = p.grad_gates + at.row * in.gate_strides.row + start * time_stride(in) +
                     gate_offset(in, at.own);
    int64 field_place = (at.row * in.length + start) * channels + at.own;
    real recent[num_weights][per_lane] = {};
#pragma unroll
    for (int i = 0; i < num_weights; ++i)
#pragma unroll
      for (int c = 0; c < per_lane; ++c) total[i][lane() * per_lane + c] = constant(0);

    const auto begin_stage = [&](int j) {
      if (events) event.at_stage(j, span.begin);
    };
    const auto ready = [&] { linear.begin(adjoint); };
    const auto run_step = [&](const BackwardInputs& values, int s, int j, auto inner,
                              auto burning) {
      constexpr bool burns = decltype(burning)::value;
      real previous[num_states][per_lane], cotangent[num_states][per_lane];
      if (events && event.end(j) && !event.pad(j)) {
        load_states(adjoint, p.grad_final, event.number_of(j), at);
        if (!burns) linear.forget();
      }
#pragma unroll
      for (int n = 0; n < num_states; ++n)
#pragma unroll
        for (int c = 0; c < per_lane; ++c) {
          previous[n][c] = values.previous[n][c];
          cotangent[n][c] = adjoint[n][c] + (arriving[n] ? values.grad[n][c] : constant(0));
        }
      if (!events && !decltype(inner)::value && j == length - 1)
        load_states(previous, in.initial, at.row, at);
      if (events && event.any(j)) {
        if (event.reset(j)) clear(previous);
        else if (event.begin(j) && !event.pad(j))
          load_states(previous, in.initial, event.number_of(j), at);
      }
      const bool pad = events && event.pad(j);
      real grad_gate[num_gates][per_lane], grad_field[field_slots][per_lane];
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        real own_state[num_states], own_gate[num_gates], own_field[field_slots];
        real own_param[param_slots], own_cotangent[num_states];
        real own_grad_state[num_states], own_grad_gate[num_gates], own_grad_field[field_slots];
        real own_grad_param[param_slots];
        column(previous, c, own_state);
        column(values.step.gate, c, own_gate);
        column(values.step.field, c, own_field);
        column(weights.params, c, own_param);
        column(cotangent, c, own_cotangent);
        if constexpr (!burns) linear.note(c, own_cotangent);
        vjp(own_state, own_gate, own_field, own_param, own_cotangent, own_grad_state,
            own_grad_gate, own_grad_field, own_grad_param);
        if constexpr (Linear::wanted && !burns) {
          real own_next[num_states], own_jacobian[num_states * num_states];
          jacobian(own_state, own_gate, own_field, own_param, own_next, own_jacobian);
          linear.follow_back(c, own_jacobian);
        }
#pragma unroll
        for (int n = 0; n < num_states; ++n) adjoint[n][c] = own_grad_state[n];
        if constexpr (!burns) {
#pragma unroll
          for (int g = 0; g < num_gates; ++g) {
            grad_gate[g][c] = pad ? constant(0) : own_grad_gate[g];
            recent[g][c] += grad_gate[g][c];
          }
#pragma unroll
          for (int f = 0; f < num_fields; ++f)
            grad_field[f][c] = pad ? constant(0) : own_grad_field[f];
#pragma unroll
          for (int i = 0; i < num_params; ++i)
            recent[num_gates + i][c] += pad ? constant(0) : own_grad_param[i];
        }
      }
      if constexpr (!burns) {
#pragma unroll
        for (int g = 0; g < num_gates; ++g)
          store_gate_gradient(in, grad_gates + s * time + g * gate_stride(in), grad_gate[g], at);
#pragma unroll
        for (int f = 0; f < num_fields; ++f)
          store<paired_channels>(p.grad_fields[f] + field_place + s * direction * channels,
                                 grad_field[f], at.active);
      }
      if (events && event.any(j)) {
        const bool stops = event.reset(j) || event.pad(j);
        if (stops) clear(adjoint);
        if (!burns && stops) linear.forget();
        if (!burns && event.begin(j) && !event.pad(j))
          store_states(p.grad_initial, adjoint, event.number_of(j), at);
      }
    };
    const auto end_stage = [&](int j) {
      grad_gates += steps * time;
      field_place += steps * direction * channels;
      if (j % sum_block != 0) return;
#pragma unroll
      for (int i = 0; i < num_weights; ++i)
#pragma unroll
        for (int c = 0; c < per_lane; ++c) {
          total[i][lane() * per_lane + c] += recent[i][c];
          recent[i][c] = constant(0);
        }
    };
    // The first step of the sequence, the last one here, has no state before it.
    for_each_step<1>(ring, span, begin_stage, ready, run_step, end_stage);
    if (!events && span.end == length) store_states(p.grad_initial, adjoint, at.row, at);
#pragma unroll
    for (int i = 0; i < num_weights; ++i) {
      real sum[per_lane];
#pragma unroll
      for (int c = 0; c < per_lane; ++c) sum[c] = total[i][lane() * per_lane + c] + recent[i][c];
      store<paired_channels>(p.partial + (slot * num_weights + i) * channels + at.own, sum,
                             at.active);
    }
  }

  // One channel, for lanes that each run some consecutive steps of it. See mend.h.
  struct Strand {
    static constexpr int words = Channel::words + 2 * num_states;
    struct Sums {
      real of[num_weights] = {};

      PARARNN_FUNCTION void clear() {
#pragma unroll
        for (int i = 0; i < num_weights; ++i) of[i] = constant(0);
      }
      PARARNN_FUNCTION void add(const Sums& more) {
#pragma unroll
        for (int i = 0; i < num_weights; ++i) of[i] += more.of[i];
      }
    };

    const BackwardProblem& p;
    const Channel own;

    PARARNN_FUNCTION Strand(const BackwardPass& pass, int channel)
        : p(pass.p), own(pass.p.in, pass.at, channel) {}

    PARARNN_FUNCTION void gather(int j, real (&x)[words]) const {
      const int64 t = time_of(p.in, direction, j);
      own.gather(t, x);
#pragma unroll
      for (int n = 0; n < num_states; ++n) {
        const bool first = j == (int)p.in.length - 1;
        x[Channel::words + n] =
            first ? own.initial(n) : widen(p.states[n][own.place(t + direction)]);
        x[Channel::words + num_states + n] =
            arriving[n] ? widen(p.grad_states[n][own.at.row * p.grad_row[n] + t * p.grad_time[n] +
                                                 own.number])
                        : constant(0);
      }
    }
    PARARNN_FUNCTION void guess(int, real (&adjoint)[num_states]) const {
#pragma unroll
      for (int n = 0; n < num_states; ++n) adjoint[n] = constant(0);
    }
    template <int size>
    PARARNN_FUNCTION void step(int j, const real (&x)[words], real (&adjoint)[num_states],
                               real (&product)[size], Sums& sums) const {
      real gate[num_gates], field[field_slots], previous[num_states], cotangent[num_states];
      real grad_gate[num_gates], grad_field[field_slots], grad_param[param_slots];
      real next[num_states], own_jacobian[num_states * num_states];
      part<num_gates>(x, 0, gate);
      part<num_fields>(x, num_gates, field);
      part<num_states>(x, Channel::words, previous);
#pragma unroll
      for (int n = 0; n < num_states; ++n)
        cotangent[n] = adjoint[n] + x[Channel::words + num_states + n];
      vjp(previous, gate, field, own.param, cotangent, adjoint, grad_gate, grad_field, grad_param);
      jacobian(previous, gate, field, own.param, next, own_jacobian);
      multiply<true>(own_jacobian, product);
      note_sizes(product, cotangent);
      const int64 t = time_of(p.in, direction, j);
      io* to = p.grad_gates + own.at.row * p.in.gate_strides.row + t * time_stride(p.in) +
               gate_offset(p.in, own.number);
#pragma unroll
      for (int g = 0; g < num_gates; ++g) {
        to[g * gate_stride(p.in)] = narrow<io>(grad_gate[g]);
        sums.of[g] += grad_gate[g];
      }
#pragma unroll
      for (int f = 0; f < num_fields; ++f) p.grad_fields[f][own.place(t)] = grad_field[f];
#pragma unroll
      for (int i = 0; i < num_params; ++i) sums.of[num_gates + i] += grad_param[i];
    }
    // The end of a span: `adjoint` is the last one, `sums` what the lane's steps have summed up.
    PARARNN_FUNCTION void finish(const Span& span, int64 slot, const real (&adjoint)[num_states],
                                 const Sums& sums) const {
#pragma unroll
      for (int i = 0; i < num_weights; ++i) {
        real sum = sums.of[i];
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane() == 0) p.partial[(slot * num_weights + i) * channels + own.number] = sum;
      }
      if (lane() > 0 || span.end < (int)p.in.length) return;
#pragma unroll
      for (int n = 0; n < num_states; ++n)
        if (p.grad_initial[n] != nullptr)
          p.grad_initial[n][own.at.row * channels + own.number] = adjoint[n];
    }
  };
};

constexpr int sum_ways = 8;  // rows summed side by side

// A block sums 32 channels of one weight over the rows, always in the same order.
PARARNN_FUNCTION void run_sum(const SumProblem& p) {
  __shared__ real sums[sum_ways][lanes];
  const int channel = blockIdx.x * lanes + threadIdx.x, weight = blockIdx.y;
  if (weight < num_gates && p.bias == nullptr) return;
  real sum = constant(0);
  if (channel < channels) {
#pragma unroll 4
    for (int64 row = threadIdx.y; row < p.rows; row += sum_ways)
      sum += p.partial[(row * num_weights + weight) * channels + channel];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || channel >= channels) return;
#pragma unroll
  for (int i = 1; i < sum_ways; ++i) sum += sums[i][threadIdx.x];
  if (weight < num_gates) p.bias[weight * channels + channel] = narrow<weight_io>(sum);
#pragma unroll
  for (int i = 0; i < num_params; ++i)
    if (weight == num_gates + i) p.params[i][channel] = narrow<weight_io>(sum);
}

}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(256)
sum_weights(const __grid_constant__ pararnn::SumProblem problem) {
  pararnn::run_sum(problem);
}
