// The backward pass: a block runs one head of one row from the last step to the first, in chunks. The states of a
// chunk are computed again from those before it, which the forward pass has left, and are kept for their threads.
// Gradients of gates are finished once a window: a warp then has those of a step of its own.
#pragma once
#include "inputs.h"

namespace pararnn {

using Problem = BackwardLaunch;
using OutputFeed = Feed<io, Output::numbers>;
constexpr int trajectory_at = feeds_at + GateFeed::memory_bytes + OutputFeed::memory_bytes;
static_assert(trajectory_at + trajectory_bytes == shared_bytes);

// The states of a chunk's steps that a thread has. It reads what it wrote, some numbers at once.
struct Trajectory {
  static constexpr int numbers = States::entries;
  static constexpr int wide = numbers % 4 == 0 && sizeof(scalar) <= 4 ? 4 : numbers % 2 == 0 ? 2 : 1;
  static constexpr int words = numbers / wide;
  using Word = Pack<scalar, wide>;
  static_assert(trajectory_bytes == 0 || trajectory_bytes == checkpoint * words * threads * (int)sizeof(Word));
  Word* own;

  // In shared memory where it has room, else in global memory.
  PARARNN_FUNCTION Trajectory(scalar* memory, char* shared) {
    if constexpr (trajectory_bytes > 0) own = reinterpret_cast<Word*>(shared) + threadIdx.x;
    else own = reinterpret_cast<Word*>(memory) + (int64)blockIdx.x * checkpoint * words * threads + threadIdx.x;
  }
  template <class F> PARARNN_FUNCTION static void each(States& state, const F& f) {
    int entry = 0;
    States::each(state, [&](auto share, auto& x, int, int) {
      PARARNN_FOR(i, share.count) f(x[i], entry + i);
      entry += share.count;
    });
  }
  PARARNN_FUNCTION void store(States& state, int step) const {
    Word all[words];
    each(state, [&](real& x, int i) { all[i / wide].items[i % wide] = x; });
    PARARNN_FOR(i, words) own[(step * words + i) * threads] = all[i];
  }
  PARARNN_FUNCTION void load(States& state, int step) const {
    Word all[words];
    PARARNN_FOR(i, words) all[i] = own[(step * words + i) * threads];
    each(state, [&](real& x, int i) { x = all[i / wide].items[i % wide]; });
  }
};

// True if registers have room for the states before the next chunk, which come from global memory.
constexpr bool has_room = States::entries <= 8;
constexpr int chunks_of_sums = 4;  // after which sums go to memory: in parts, which keeps long sums accurate

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
        trajectory(p.trajectory, memory + trajectory_at), grad_at(place.row * p.grad_row + place.head * p.grad_head) {}

  PARARNN_FUNCTION io* grad_gates(int l) const { return p.grad_gates + grad_at + place.time(l) * p.grad_time; }

  // Enters a window: it arrives, all threads have left the one before, and the next one is on its way.
  PARARNN_FUNCTION void enter(int number, int next) {
    wait_for_copies<0>();
    __syncthreads();
    gates.copy(place, next, number);
    outputs.copy(place, next, number);
    end_group_of_copies();
  }

  PARARNN_FUNCTION void load_chunk(int first, States& state) const {
    load_all(p.memory + place.at_chunk(first / checkpoint), state);
  }
  // Computes the states before the steps from `first` to `end` - 1 again, of the first of them; returns the last ones.
  PARARNN_FUNCTION void recompute(int first, int end, States& state) {
    StepInputs<AdvanceReady> ahead;  // of the next step
    for (int start = first; start < end; start += span) {
      const int number = window_of(start), last = window_of(end - 1);
      enter(number, number < last ? number + 1 : number > window_of(first) ? number - 1 : before(first));
      const int stop = start + span < end ? start + span : end;
      prepare<finish::AdvanceReady>(place, own, gates, start, stop);
      __syncthreads();
      auto source = gates.cursor(place, start);
      ahead.load(own, start, source.at());
#pragma unroll turns
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
      store_all<true>(grad_gate, grad_gates(l));
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
    WideGates grad_wide_bias;
    WideParams grad_wide_param;
    finish::Gates grad_bias;
    finish::Params grad_param;
    Outers grad_matrix;
    const auto clear_sums = [&] {
      fill_all(grad_wide_bias, constant(0));
      fill_all(grad_wide_param, constant(0));
      fill_all(grad_bias, constant(0));
      fill_all(grad_param, constant(0));
      grad_matrix.clear();
    };
    clear_sums();
    States before_chunk;
    if (has_room && length > 0) load_chunk(first, before_chunk);
    for (; first >= 0 && length > 0; first -= checkpoint) {
      const int end = first + checkpoint < length ? first + checkpoint : length;
      States state;
      if (has_room) state = before_chunk;
      else load_chunk(first, state);
      recompute(first, end, state);
      if (has_room && first > 0) load_chunk(first - checkpoint, before_chunk);
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
        const auto load_before = [&](int l) { trajectory.load(state, l - 1 > first ? l - 1 - first : 0); };
        load_ahead(stop - 1);
#pragma unroll turns
        for (int l = stop - 1; l >= start; --l) {
          const auto inputs = inputs_ahead;
          const Output grad_output = output_ahead;
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
            load_before(l);
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
          load_before(l);
        }
        __syncthreads();
        finish(start, stop, grad_bias, grad_param);
      }
      if (first / checkpoint % chunks_of_sums != 0) continue;
      add_all(grad_wide_bias, partial);
      add_all(grad_wide_param, partial + Gates::numbers);
      add_all<true>(grad_bias, own_partial);
      add_all<true>(grad_param, own_partial + Gates::numbers);
      grad_matrix.add_to(partial + Gates::numbers, copy_numbers);
      clear_sums();
    }
    if (!events && length > 0) store_states(place, adjoint, (int)place.row, p.grad_initial);
  }
};

PARARNN_FUNCTION void run_pass(const BackwardLaunch& p, char* memory) { BackwardPass(p, memory).run(); }

}  // namespace pararnn
