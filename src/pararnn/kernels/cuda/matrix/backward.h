// The backward pass: a block runs one head of one row from the last step to the first, in chunks. The states of a
// chunk are computed again from those before it, which the forward pass has left, and are kept for their threads.
// Gradients of gates are finished once a window: a warp then has those of a step of its own.
#pragma once
#include "inputs.h"

namespace pararnn {

using Problem = BackwardLaunch;
using OutputFeed = Feed<io, Output::numbers>;
static_assert(feeds_at + GateFeed::memory_bytes + OutputFeed::memory_bytes == shared_bytes);

// The states of a chunk's steps that a thread has.
struct Trajectory {
  scalar* own;

  PARARNN_FUNCTION explicit Trajectory(scalar* memory)
      : own(memory + (int64)blockIdx.x * checkpoint * States::entries * threads + threadIdx.x) {}
  template <class F> PARARNN_FUNCTION void each(States& state, int step, const F& f) const {
    int entry = step * States::entries;
    States::each(state, [&](auto share, auto& x, int, int) {
      PARARNN_UNROLL
      for (int i = 0; i < share.count; ++i) f(x[i], own[(int64)(entry + i) * threads]);
      entry += share.count;
    });
  }
  PARARNN_FUNCTION void store(States& state, int step) const {
    each(state, step, [](real& x, scalar& memory) { memory = x; });
  }
  PARARNN_FUNCTION void load(States& state, int step) const {
    each(state, step, [](real& x, scalar& memory) { x = memory; });
  }
};

// True if registers have room for the states of the next step too.
constexpr bool has_room = States::entries <= 16;

struct BackwardPass {
  const BackwardLaunch& p;
  const Place place;
  Head own;
  GateFeed gates;
  OutputFeed outputs;
  const Trajectory trajectory;
  const int64 grad_at;

  PARARNN_FUNCTION BackwardPass(const BackwardLaunch& p, char* memory)
      : p(p), place(p.in), own(place, memory), gates(gates_of(place, memory + feeds_at)),
        outputs(p.grad_output == nullptr ? nullptr
                                         : p.grad_output + place.row * p.output_row + place.head * p.output_head,
                p.output_time, memory + feeds_at + GateFeed::memory_bytes),
        trajectory(p.trajectory), grad_at(place.row * p.grad_row + place.head * p.grad_head) {}

  PARARNN_FUNCTION io* grad_gates(int l) const { return p.grad_gates + grad_at + place.time(l) * p.grad_time; }

  // Enters a window: it arrives, all threads have left the one before, and the next one is on its way.
  PARARNN_FUNCTION void enter(int number, int next) {
    wait_for_copies<0>();
    __syncthreads();
    gates.copy(place, next, number);
    outputs.copy(place, next, number);
    end_group_of_copies();
  }

  // Computes the states of the steps from `first` to `end` - 1 again; returns the last ones.
  PARARNN_FUNCTION void recompute(int first, int end, States& state) {
    load_all(p.memory + place.at_chunk(first / checkpoint), state);
    StepInputs<AdvanceReady> ahead;  // of the next step
    for (int start = first; start < end; start += span) {
      const int number = window_of(start), last = window_of(end - 1);
      enter(number, number < last ? number + 1 : number > window_of(first) ? number - 1 : before(first));
      const int stop = start + span < end ? start + span : end;
      prepare<finish::AdvanceReady>(place, own, gates, start, stop);
      __syncthreads();
      auto source = gates.cursor(place, start);
      ahead.load(own, start, source.at());
      for (int l = start; l < (stop < end ? stop : end - 1); ++l) {
        const int sequence = place.sequence(l);
        if (events && sequence >= 0) begin(place, l, sequence, state);
        trajectory.store(state, l - first);
        const auto inputs = ahead;
        const int step = l + 1 < stop ? 1 : 0;
        gates.move(place, source, step);
        ahead.load(own, l + step, source.at());
        if (events && sequence < 0) continue;
        States next;
        advance_step(own.block, own.matrices, own.param, state, inputs.ready, inputs.gate, next);
        state = next;
      }
    }
    const int sequence = place.sequence(end - 1);
    if (events && sequence >= 0) begin(place, end - 1, sequence, state);
  }
  // The window with which the chunk before a step begins, -1 for none.
  PARARNN_FUNCTION static int before(int first) { return first > 0 ? window_of(first - checkpoint) : -1; }

  // Writes the gradients of gates of a window, and adds to sums.
  PARARNN_FUNCTION void finish(int first, int end, finish::Gates& grad_bias, finish::Params& grad_param) {
    for (int l = end - 1 - warp(); l >= first; l -= warps) {
      finish::Links links;
      finish::BackwardReady ready;
      finish::Gates grad_gate;
      links.load(own.slot(l));
      load_all(own.ready(l), ready);
      if (events && place.sequence(l) < 0) {
        fill_all(grad_gate, constant(0));
      } else {
        finish::finish_step(links, ready, grad_gate, grad_param);
        grad_bias += grad_gate;
      }
      store_all_by_lanes(grad_gate, grad_gates(l));
    }
  }

  PARARNN_FUNCTION void run() {
    const int length = place.length;
    constexpr int sums = Gates::numbers + Params::numbers;
    const int64 copy_numbers = p.in.heads * sums;
    real* const partial = p.partial + (place.row * p.copies * p.in.heads + place.head) * sums;
    real* const own_partial = partial + warp() * copy_numbers;
    States adjoint;
    if (events) fill_all(adjoint, constant(0));
    else load_states(place, p.grad_final, (int)place.row, adjoint);
    int first = (length - 1) / checkpoint * checkpoint;
    if (length > 0) {
      gates.copy(place, window_of(first), -1);
      outputs.copy(place, window_of(first), -1);
      end_group_of_copies();
    }
    for (; first >= 0 && length > 0; first -= checkpoint) {
      const int end = first + checkpoint < length ? first + checkpoint : length;
      States ahead;
      recompute(first, end, ahead);
      WideGates grad_wide_bias;
      WideParams grad_wide_param;
      finish::Gates grad_bias;
      finish::Params grad_param;
      Outers grad_matrix;
      fill_all(grad_wide_bias, constant(0));
      fill_all(grad_wide_param, constant(0));
      fill_all(grad_bias, constant(0));
      fill_all(grad_param, constant(0));
      grad_matrix.clear();
      for (int start = (end - 1) / span * span; start >= first; start -= span) {
        const int stop = start + span < end ? start + span : end, number = window_of(start);
        if (stop < end) enter(number, start > first ? number - 1 : before(first));
        __syncthreads();  // of the recomputed window, or the one after this, nothing is read any more
        prepare<finish::BackwardReady>(place, own, gates, start, stop);
        __syncthreads();
        auto gate_source = gates.cursor(place, stop - 1);
        auto output_source = outputs.cursor(place, stop - 1);
        StepInputs<BackwardReady> inputs_ahead;
        Output output_ahead;
        const auto load_ahead = [&](int l) {
          inputs_ahead.load(own, l, gate_source.at());
          if (p.grad_output == nullptr) fill_all(output_ahead, constant(0));
          else load_all(output_source.at(), output_ahead);
        };
        load_ahead(stop - 1);
        for (int l = stop - 1; l >= start; --l) {
          if (!has_room && l < end - 1) trajectory.load(ahead, l - first);
          const States state = ahead;
          const auto inputs = inputs_ahead;
          const Output grad_output = output_ahead;
          if (has_room) trajectory.load(ahead, (l > first ? l - 1 : first) - first);
          const int step = l > start ? -1 : 0;
          gates.move(place, gate_source, step);
          outputs.move(place, output_source, step);
          load_ahead(l + step);
          const int sequence = place.sequence(l);
          States grad_state;
          WideGates grad_gate;
          if (events && sequence < 0) {
            fill_all(grad_gate, constant(0));
            store_all(grad_gate, grad_gates(l));
            continue;
          }
          if (events && place.sequence(l + 1) != sequence) load_states(place, p.grad_final, sequence, adjoint);
          backward_step(own.block, own.matrices, own.param, state, inputs.ready, inputs.gate, adjoint, grad_output, grad_state,
                        grad_gate, grad_wide_param, grad_matrix, own.slot(l));
          store_all(grad_gate, grad_gates(l));
          grad_wide_bias += grad_gate;
          adjoint = grad_state;
          if (place.is_reset(l)) fill_all(adjoint, constant(0));
          if (events && place.sequence(l - 1) != sequence) store_states(place, adjoint, sequence, p.grad_initial);
        }
        __syncthreads();
        finish(start, stop, grad_bias, grad_param);
      }
      // In parts, which keeps long sums accurate.
      add_all(grad_wide_bias, partial);
      add_all(grad_wide_param, partial + Gates::numbers);
      add_all_by_lanes(grad_bias, own_partial);
      add_all_by_lanes(grad_param, own_partial + Gates::numbers);
      grad_matrix.add_to(partial + Gates::numbers, copy_numbers);
    }
    if (!events && length > 0) store_states(place, adjoint, (int)place.row, p.grad_initial);
  }
};

PARARNN_FUNCTION void run_pass(const BackwardLaunch& p, char* memory) { BackwardPass(p, memory).run(); }

}  // namespace pararnn
