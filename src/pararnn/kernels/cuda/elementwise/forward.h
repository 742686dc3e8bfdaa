// The forward pass: a warp runs a tile of channels of one row from the first step to the last.
#pragma once
#include "linear.h"

namespace pararnn {

struct ForwardPass {
  using Launch = ForwardLaunch;
  static constexpr int direction = reverse ? -1 : 1;
  using Ring = InputRing<direction>;
  static constexpr int bytes = Ring::bytes;

  const ForwardProblem& p;
  const Tile& tile;
  const Weights& weights;
  char* memory;

  PARARNN_FUNCTION ForwardPass(const ForwardProblem& p, const Tile& tile, const Weights& weights,
                               char* memory)
      : p(p), tile(tile), weights(weights), memory(memory) {}

  // Reports a tile's sweeps, and whether its segments did not fit after the first. If tiles outnumber slots,
  // several share one, which is zero at first. If slots outnumber tiles, the others repeat these numbers.
  PARARNN_FUNCTION void report(int number, int sweeps, bool unfit) const {
    const int all = (int)p.in.rows * tiles;
    if (all > info_slots) {
      if (lane() > 0) return;
      int64* slot = p.info + number % info_slots * 2;
      atomicMax(slot, (int64)sweeps);
      if (unfit) atomicAdd(reinterpret_cast<unsigned long long*>(slot + 1), 1ull);
      return;
    }
    for (int k = number + lane() * all; k < info_slots; k += lanes * all) {
      p.info[k * 2] = sweeps;
      p.info[k * 2 + 1] = unfit && k == number;
    }
  }
  PARARNN_FUNCTION void report_none() const {
    if (blockIdx.x > 0) return;
    for (int k = lane(); k < info_slots * 2; k += lanes) p.info[k] = 0;
  }

  // Loads the state before the first step.
  PARARNN_FUNCTION void origin(States& state) const {
    load_states(state, p.in.initial, tile.row, tile);
  }

  // Runs a span from `state`, which becomes its last state. `linear` records how the result depends on the
  // state at span.first.
  template <class Linear>
  PARARNN_FUNCTION void sweep(const Span& span, States& state, Linear& linear, int64) const {
    const Inputs& in = p.in;
    Ring ring(memory, in, tile, weights, span.begin);
    Events event(in, tile, 1, span.begin);
    const int64 start = tile.row * in.length + time_of(in, direction, span.begin);
    io* out[num_states];
    each<num_states>([&](int n) { out[n] = p.states[n] + start * channels + tile.channel; });

    const auto begin_stage = [&](int j) {
      if (events) event.at_stage(j, span.begin);
    };
    const auto ready = [&] { linear.begin(state); };
    const auto run_step = [&](const StepInputs& values, int s, int j, auto, auto burning) {
      constexpr bool burns = decltype(burning)::value;
      if (events && event.any(j)) {
        const bool fresh = event.pad(j) || event.reset(j);
        if (fresh) clear(state);
        else if (event.begin(j)) load_states(state, in.initial, event.number_of(j), tile);
        if (!burns && (fresh || event.begin(j))) linear.forget();
      }
      each<per_lane>([&](int c) {
        const State own = state.column(c);
        const auto gate = column_of(values.gate, c);
        const auto field = column_of(values.field, c);
        const auto param = column_of(weights.params, c);
        State next;
        if constexpr (Linear::jacobians && !burns) {
          Matrix own_jacobian;
          jacobian(own, gate, field, param, next, own_jacobian);
          linear.follow(c, own_jacobian);
          linear.note(c, next);
        } else {
          step(own, gate, field, param, next);
        }
        state.set_column(c, next);
      });
      if (events && event.pad(j)) clear(state);
      each<num_states>([&](int n) {
        if (!burns) store<paired_channels>(out[n] + s * direction * channels, state[n], tile.active);
      });
      if (!burns && events && event.end(j) && !event.pad(j))
        store_states(p.final, state, event.number_of(j), tile);
    };
    const auto end_stage = [&](int) {
      each<num_states>([&](int n) { out[n] += steps * direction * channels; });
    };
    for_each_step<0>(ring, span, begin_stage, ready, run_step, end_stage);
    if (!events && span.end == (int)in.length) store_states(p.final, state, tile.row, tile);
  }

  // Steps of one channel, for lanes that each run some consecutive ones. See mend.h.
  struct ChannelSteps {
    using Inputs = Vec<Channel::words>;
    struct Sums {
      PARARNN_FUNCTION void clear() {}
      PARARNN_FUNCTION void add(const Sums&) {}
    };

    const ForwardProblem& p;
    const Channel own;

    PARARNN_FUNCTION ChannelSteps(const ForwardPass& pass, int channel)
        : p(pass.p), own(pass.p.in, pass.tile, channel) {}

    PARARNN_FUNCTION Inputs gather(int j) const {
      Inputs x;
      own.gather(time_of(p.in, direction, j), x.items);
      return x;
    }
    // Returns the state before step j as of the previous sweep.
    PARARNN_FUNCTION State guess(int j) const {
      const int64 index = own.index(time_of(p.in, direction, j - 1));
      return vec<num_states>([&](int n) { return widen(p.states[n][index]); });
    }
    PARARNN_FUNCTION void step(int j, const Inputs& x, State& state, Product& product,
                               Sums&) const {
      State next;
      Matrix own_jacobian;
      jacobian(state, x.items, x.items + num_gates, own.param, next, own_jacobian);
      product.follow(own_jacobian);
      product.note(next);
      state = next;
      put(j, state);
    }
    PARARNN_FUNCTION void put(int j, const State& state) const {
      const int64 index = own.index(time_of(p.in, direction, j));
      each<num_states>([&](int n) { p.states[n][index] = narrow<io>(state[n]); });
    }
    // Finishes a span. `state`: its last one.
    PARARNN_FUNCTION void finish(const Span& span, int64, const State& state, const Sums&) const {
      if (lane() > 0 || span.end < (int)p.in.length) return;
      each<num_states>([&](int n) {
        p.final[n][own.tile.row * channels + own.number] = state[n];
      });
    }
  };
};

}  // namespace pararnn
