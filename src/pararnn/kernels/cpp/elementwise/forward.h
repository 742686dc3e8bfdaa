// The forward pass: from the first step to the last.
#pragma once
#include "spans.h"

namespace pararnn {

struct ForwardPass : ForwardProblem {
  using Launch = ForwardLaunch;
  static constexpr bool exact = jumps;  // true if segments must meet to the bit
  using Count = int;  // of spans side by side: more than one if a segment has few vectors

  Problem problem;

  explicit ForwardPass(const ForwardProblem& words) : ForwardProblem(words), problem{words.in} {}

  // Runs spans of a tile's channels. `state`: in, the state before each span; out, its last state. `observer`
  // records how the result depends on the state at each span's first step.
  template <class Count, class Observer>
  void sweep(const Tile& tile, const Span* spans, Count count, Chains<num_states>& state,
             Observer& observer, const int64_t*) const {
    const Problem& p = problem;
    const int vectors = tile.vectors();
    const int64_t row = tile.row, offset = tile.offset();
    const auto ready = [&] { observer.begin(count * vectors, state); };
    const auto run_step = [&](int s, int64_t l, auto burning) PARARNN_INLINE {
      constexpr bool burns = decltype(burning)::value, by_jacobian = Observer::jacobians && !burns;
      const int chain = s * vectors;
      const int64_t sequence = p.sequence(row, l), start = sequence * p.width() + offset;
      const bool zero = sequence < 0 || p.is_reset(row, l);
      if (zero || sequence != p.sequence(row, l - 1))
        tile.for_each_vector([&](int v, int channels) {
          for (int n = 0; n < num_states; ++n)
            state[chain + v].items[n] =
                zero || p.initial[n] == nullptr
                    ? real{}
                    : load(p.initial[n] + start + v * lanes, channels);
          if (!burns) observer.forget(chain + v);
        });
      io* out[num_states];
      for (int n = 0; n < num_states; ++n) out[n] = states[n] + p.index(row, l) + offset;
      const StepInputs inputs(tile, p.time(l), p.soon(false));
      tile.for_each_vector([&](int v, auto channels) {
        Items<num_states> next = state[chain + v];
        if (sequence >= 0) {
          const real* weights = tile.weights[v].items;
          real gate[num_gates], field[num_fields + 1];
          inputs.load_vector(v, channels, weights, gate, field);
          if constexpr (by_jacobian) {
            real own[num_states * num_states];
            jacobian(state[chain + v].items, gate, field, weights + num_gates, next.items, own);
            observer.follow(chain + v, own);
          } else {
            step(state[chain + v].items, gate, field, weights + num_gates, next.items);
          }
          state[chain + v] = next;
          if (!burns) observer.note(chain + v, next.items);
        }
        if (!burns)
          for (int n = 0; n < num_states; ++n) store(out[n] + v * lanes, next.items[n], channels);
      });
      if (!burns && sequence >= 0 && sequence != p.sequence(row, l + 1))
        tile.for_each_vector([&](int v, int channels) {
          for (int n = 0; n < num_states; ++n)
            store(final[n] + start + v * lanes, state[chain + v].items[n], channels);
        });
    };
    for_each_step<Observer::burn_in>(spans, count, ready, run_step);
  }

  // For vector v, adds to `effect` a bound on the change of step l's result if the state before it changes by
  // `difference`, and sets `next` to the result. No-op at the start of a sequence and at resets.
  void first_step(const Tile& tile, int64_t l, int v, int channels, const real* state,
                  const real* difference, real* effect, real* next) const {
    const int64_t sequence = problem.sequence(tile.row, l);
    if (sequence < 0 || sequence != problem.sequence(tile.row, l - 1)) return;
    if (problem.is_reset(tile.row, l)) return;
    const real* weights = tile.weights[v].items;
    real gate[num_gates], field[num_fields + 1], own[num_states * num_states];
    StepInputs(tile, problem.time(l), 0).load_vector(v, channels, weights, gate, field);
    jacobian(state, gate, field, weights + num_gates, next, own);
    for (int i = 0; i < num_states; ++i)
      for (int j = 0; j < num_states; ++j)
        effect[i] +=
            select(difference[j] == real{}, real{}, abs(own[i * num_states + j]) * difference[j]);
  }
};

}  // namespace pararnn
