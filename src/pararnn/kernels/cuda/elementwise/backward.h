// The backward pass: the linear recurrence of the adjoint, from the last step to the first. It recomputes
// gates from the saved states and computes every gradient.
#pragma once
#include "backward_ring.h"

namespace pararnn {

constexpr bool paired_gates = chunk >= per_lane * (int)sizeof(io);

PARARNN_FUNCTION void store_gate_gradient(const Inputs& in, io* target, const real (&x)[per_lane],
                                          const Tile& tile) {
  if constexpr (paired_gates) {
    store<true>(target, x, tile.active);
  } else {  // the lane's channels may belong to two heads
    each<per_lane>([&](int c) {
      if (c < tile.active) target[gate_offset(in, tile.channel + c) - gate_offset(in, tile.channel)] = narrow<io>(x[c]);
    });
  }
}

struct BackwardPass {
  using Launch = BackwardLaunch;
  static constexpr int direction = reverse ? 1 : -1;
  using Ring = BackwardRing<direction>;
  static constexpr int sum_bytes = num_weights * tile_channels * (int)sizeof(real);
  static constexpr int bytes = Ring::bytes + sum_bytes;

  const BackwardProblem& p;
  const Tile& tile;
  const Weights& weights;
  char* memory;

  PARARNN_FUNCTION BackwardPass(const BackwardProblem& p, const Tile& tile, const Weights& weights,
                                char* memory)
      : p(p), tile(tile), weights(weights), memory(memory) {}

  PARARNN_FUNCTION void report(int, int, bool) const {}
  PARARNN_FUNCTION void report_none() const {}

  // Loads the gradient of the last state.
  PARARNN_FUNCTION void origin(States& adjoint) const {
    load_states(adjoint, p.grad_final, tile.row, tile);
  }

  // Runs a span. `adjoint`: in, the gradient of the state after it; out, that of the state before it.
  // `linear` records how the result depends on the adjoint at span.first. `slot`: of the span's sums in
  // `partial`.
  template <class Linear>
  PARARNN_FUNCTION void sweep(const Span& span, States& adjoint, Linear& linear,
                              int64 slot) const {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    real(&total)[num_weights][tile_channels] = *reinterpret_cast<real(*)[num_weights][tile_channels]>(memory);
    Ring ring(memory + sum_bytes, p, tile, weights, span);
    Events event(in, tile, -1, span.begin);
    const int64 start = time_of(in, direction, span.begin), time = direction * time_stride(in);
    io* to_gates = p.grad_gates + tile.row * in.gate_strides.row + start * time_stride(in) +
                   gate_offset(in, tile.channel);
    int64 field_index = (tile.row * in.length + start) * channels + tile.channel;
    Fragment<num_weights> recent;
    recent.fill(constant(0));
    each<num_weights>([&](int i) {
      each<per_lane>([&](int c) { total[i][lane() * per_lane + c] = constant(0); });
    });

    const auto begin_stage = [&](int j) {
      if (events) event.at_stage(j, span.begin);
    };
    const auto ready = [&] { linear.begin(adjoint); };
    const auto run_step = [&](const BackwardInputs& values, int s, int j, auto inner,
                              auto burning) {
      constexpr bool burns = decltype(burning)::value;
      States previous = values.previous;
      if (events && event.end(j) && !event.pad(j)) {
        load_states(adjoint, p.grad_final, event.number_of(j), tile);
        if (!burns) linear.forget();
      }
      if (!events && !decltype(inner)::value && j == length - 1)
        load_states(previous, in.initial, tile.row, tile);
      if (events && event.any(j)) {
        if (event.reset(j)) clear(previous);
        else if (event.begin(j) && !event.pad(j))
          load_states(previous, in.initial, event.number_of(j), tile);
      }
      const bool pad = events && event.pad(j);
      Fragment<num_gates> grad_gates;
      Fragment<field_slots> grad_fields;
      each<per_lane>([&](int c) {
        const State own = previous.column(c);
        const auto gate = column_of(values.step.gate, c);
        const auto field = column_of(values.step.field, c);
        const auto param = column_of(weights.params, c);
        const State cotangent = vec<num_states>([&](int n) {
          return adjoint[n][c] + (arriving[n] ? values.grad[n][c] : constant(0));
        });
        if constexpr (!burns) linear.note(c, cotangent);
        State grad_state;
        Vec<num_gates> grad_gate;
        Vec<field_slots> grad_field;
        Vec<param_slots> grad_param;
        vjp(own, gate, field, param, cotangent, grad_state, grad_gate, grad_field, grad_param);
        if constexpr (Linear::jacobians && !burns) {
          State next;
          Matrix own_jacobian;
          jacobian(own, gate, field, param, next, own_jacobian);
          linear.follow(c, transpose_of(own_jacobian));
        }
        adjoint.set_column(c, grad_state);
        if constexpr (!burns) {
          const auto unless_pad = [&](real x) { return pad ? constant(0) : x; };
          each<num_gates>([&](int g) {
            grad_gates[g][c] = unless_pad(grad_gate[g]);
            recent[g][c] += grad_gates[g][c];
          });
          each<num_fields>([&](int f) { grad_fields[f][c] = unless_pad(grad_field[f]); });
          each<num_params>([&](int i) { recent[num_gates + i][c] += unless_pad(grad_param[i]); });
        }
      });
      if constexpr (!burns) {
        each<num_gates>([&](int g) {
          store_gate_gradient(in, to_gates + s * time + g * gate_stride(in), grad_gates[g], tile);
        });
        each<num_fields>([&](int f) {
          if (p.grad_fields[f] == nullptr) return;
          store<paired_channels>(p.grad_fields[f] + field_index + s * direction * channels,
                                 grad_fields[f], tile.active);
        });
      }
      if (events && event.any(j)) {
        const bool stops = event.reset(j) || event.pad(j);
        if (stops) clear(adjoint);
        if (!burns && stops) linear.forget();
        if (!burns && event.begin(j) && !event.pad(j))
          store_states(p.grad_initial, adjoint, event.number_of(j), tile);
      }
    };
    const auto end_stage = [&](int j) {
      to_gates += steps * time;
      field_index += steps * direction * channels;
      if (j % sum_block != 0) return;
      each<num_weights>([&](int i) {
        each<per_lane>([&](int c) { total[i][lane() * per_lane + c] += recent[i][c]; });
      });
      recent.fill(constant(0));
    };
    // The first step of the sequence, the last one here, has no state before it.
    for_each_step<1>(ring, span, begin_stage, ready, run_step, end_stage);
    if (!events && span.end == length) store_states(p.grad_initial, adjoint, tile.row, tile);
    each<num_weights>([&](int i) {
      const auto sum = vec<per_lane>([&](int c) {
        return total[i][lane() * per_lane + c] + recent[i][c];
      });
      store<paired_channels>(p.partial + (slot * num_weights + i) * channels + tile.channel, sum.items,
                             tile.active);
    });
  }

  // Steps of one channel, for lanes that each run some consecutive ones. See mend.h.
  struct ChannelSteps {
    struct Inputs {
      Vec<Channel::words> gates_and_fields;
      State previous, grad;
    };
    struct Sums {
      Vec<num_weights> weights = filled<num_weights>(constant(0));

      PARARNN_FUNCTION void clear() { weights = filled<num_weights>(constant(0)); }
      PARARNN_FUNCTION void add(const Sums& more) {
        each<num_weights>([&](int i) { weights[i] += more.weights[i]; });
      }
    };

    const BackwardProblem& p;
    const Channel own;

    PARARNN_FUNCTION ChannelSteps(const BackwardPass& pass, int channel)
        : p(pass.p), own(pass.p.in, pass.tile, channel) {}

    PARARNN_FUNCTION Inputs gather(int j) const {
      Inputs x;
      const int64 t = time_of(p.in, direction, j);
      own.gather(t, x.gates_and_fields.items);
      each<num_states>([&](int n) {
        const bool first = j == (int)p.in.length - 1;
        x.previous[n] = first ? own.initial(n) : widen(p.states[n][own.index(t + direction)]);
        x.grad[n] = arriving[n] ? widen(p.grad_states[n][own.tile.row * p.grad_row[n] +
                                                         t * p.grad_time[n] + own.number])
                                : constant(0);
      });
      return x;
    }
    PARARNN_FUNCTION State guess(int) const { return filled<num_states>(constant(0)); }
    PARARNN_FUNCTION void step(int j, const Inputs& x, State& adjoint, Product& product,
                               Sums& sums) const {
      const real *gate = x.gates_and_fields, *field = gate + num_gates;
      const State cotangent = vec<num_states>([&](int n) { return adjoint[n] + x.grad[n]; });
      Vec<num_gates> grad_gate;
      Vec<field_slots> grad_field;
      Vec<param_slots> grad_param;
      vjp(x.previous, gate, field, own.param, cotangent, adjoint, grad_gate, grad_field, grad_param);
      State next;
      Matrix own_jacobian;
      jacobian(x.previous, gate, field, own.param, next, own_jacobian);
      product.follow(transpose_of(own_jacobian));
      product.note(cotangent);
      const int64 t = time_of(p.in, direction, j);
      io* target = p.grad_gates + own.tile.row * p.in.gate_strides.row + t * time_stride(p.in) +
               gate_offset(p.in, own.number);
      each<num_gates>([&](int g) {
        target[g * gate_stride(p.in)] = narrow<io>(grad_gate[g]);
        sums.weights[g] += grad_gate[g];
      });
      each<num_fields>([&](int f) {
        if (p.grad_fields[f] != nullptr) p.grad_fields[f][own.index(t)] = grad_field[f];
      });
      each<num_params>([&](int i) { sums.weights[num_gates + i] += grad_param[i]; });
    }
    // Finishes a span. `adjoint`: after its last step. `sums`: of the lane's steps.
    PARARNN_FUNCTION void finish(const Span& span, int64 slot, const State& adjoint,
                                 const Sums& sums) const {
      each<num_weights>([&](int i) {
        real sum = sums.weights[i];
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane() == 0) p.partial[(slot * num_weights + i) * channels + own.number] = sum;
      });
      if (lane() > 0 || span.end < (int)p.in.length) return;
      each<num_states>([&](int n) {
        if (p.grad_initial[n] != nullptr)
          p.grad_initial[n][own.tile.row * channels + own.number] = adjoint[n];
      });
    }
  };
};

}  // namespace pararnn
