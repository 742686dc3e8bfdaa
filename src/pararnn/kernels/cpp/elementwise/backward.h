// The backward pass: the linear recurrence of the adjoint, from the last step to the first. It recomputes
// gates from the saved states and computes every gradient.
#pragma once
#include "../sums.h"
#include "spans.h"

namespace pararnn {

struct BackwardPass : BackwardProblem {
  using Launch = BackwardLaunch;
  static constexpr bool exact = false;  // true if segments must meet to the bit
  using Count = One;  // of spans: the adjoint's critical path is one product, so one span is enough

  Problem problem;

  explicit BackwardPass(const BackwardProblem& words) : BackwardProblem(words), problem{words.in} {}

  // Runs spans of a tile's channels. `adjoint`: in, the gradient of the state after each span; out, that of
  // the state before it. `observer` records how the result depends on the adjoint at each span's first step.
  // `slots`: of the spans' sums in `partial`.
  template <class Count, class Observer>
  void sweep(const Tile& tile, const Span* spans, Count count, Chains<num_states>& adjoint,
             Observer& observer, const int64_t* slots) const {
    const Problem& p = problem;
    const int vectors = tile.vectors();
    const int64_t row = tile.row, offset = tile.offset(), width = p.width();
    Chains<num_weights> recent = {}, total = {};
    const auto ready = [&] { observer.begin(count * vectors, adjoint); };
    const auto run_step = [&](int s, int64_t j, auto burning) PARARNN_INLINE {
      constexpr bool burns = decltype(burning)::value, by_jacobian = Observer::jacobians && !burns;
      const int chain = s * vectors;
      const int64_t l = p.length - 1 - j, t = p.time(l), sequence = p.sequence(row, l);
      const int64_t start = sequence * width + offset;
      io* to_gates[num_gates];
      for (int g = 0; g < num_gates; ++g)
        to_gates[g] = grad_gates + tile.gate_offset(grad_gate_strides, g, t);
      scalar* to_fields[num_fields + 1];
      for (int f = 0; f < num_fields; ++f)
        to_fields[f] = grad_fields[f] == nullptr ? nullptr
                                                 : grad_fields[f] + (row * p.length + t) * width + offset;
      if (sequence < 0) {
        tile.for_each_vector([&](int v, int channels) {
          for (int n = 0; n < num_states; ++n) adjoint[chain + v].items[n] = real{};
          if (!burns) observer.forget(chain + v);
          if (burns) return;
          for (int g = 0; g < num_gates; ++g) store(to_gates[g] + v * lanes, real{}, channels);
          for (int f = 0; f < num_fields; ++f)
            if (to_fields[f] != nullptr) store(to_fields[f] + v * lanes, real{}, channels);
        });
        return;
      }
      const bool reset = p.is_reset(row, l), begins = sequence != p.sequence(row, l - 1);
      if (sequence != p.sequence(row, l + 1))
        tile.for_each_vector([&](int v, int channels) {
          for (int n = 0; n < num_states; ++n)
            adjoint[chain + v].items[n] =
                grad_final[n] == nullptr ? real{}
                                         : load(grad_final[n] + start + v * lanes, channels);
          if (!burns) observer.forget(chain + v);
        });
      const StepInputs inputs(tile, t, p.soon(true));
      const io* later_grads[num_states];
      const io* previous_rows[num_states];
      for (int n = 0; n < num_states; ++n) {
        later_grads[n] = grad_states[n] == nullptr
                          ? nullptr
                          : grad_states[n] + row * grad_row[n] + t * grad_time[n] + offset;
        previous_rows[n] = reset || begins ? nullptr : states[n] + p.index(row, l - 1) + offset;
      }
      tile.for_each_vector([&](int v, auto channels) {
        const real* weights = tile.weights[v].items;
        real previous[num_states], gate[num_gates], field[num_fields + 1];
        Items<num_states>& own = adjoint[chain + v];
        for (int n = 0; n < num_states; ++n) {
          if (later_grads[n] != nullptr)
            own.items[n] += load_ahead(later_grads[n] + v * lanes,
                                       p.soon(true) * grad_time[n], channels);
          previous[n] = previous_rows[n] != nullptr
                            ? load_ahead(previous_rows[n] + v * lanes, p.soon(true) * width, channels)
                        : reset || p.initial[n] == nullptr ? real{}
                                : load(p.initial[n] + start + v * lanes, channels);
        }
        inputs.load_vector(v, channels, weights, gate, field);
        if (!burns) observer.note(chain + v, own.items);
        if constexpr (by_jacobian) {
          real next[num_states], own_jacobian[num_states * num_states];
          jacobian(previous, gate, field, weights + num_gates, next, own_jacobian);
          observer.follow_back(chain + v, own_jacobian);
        }
        real grad_previous[num_states], grad_gate[num_gates];
        real grad_field[num_fields + 1], grad_param[num_params + 1];
        vjp(previous, gate, field, weights + num_gates, own.items, grad_previous, grad_gate,
            grad_field, grad_param);
        for (int n = 0; n < num_states; ++n) own.items[n] = reset ? real{} : grad_previous[n];
        if (burns) return;
        for (int g = 0; g < num_gates; ++g) {
          recent[chain + v].items[g] += grad_gate[g];
          store(to_gates[g] + v * lanes, grad_gate[g], channels);
        }
        for (int f = 0; f < num_fields; ++f)
          if (to_fields[f] != nullptr) store(to_fields[f] + v * lanes, grad_field[f], channels);
        for (int i = 0; i < num_params; ++i)
          recent[chain + v].items[num_gates + i] += grad_param[i];
      });
      tile.for_each_vector([&](int v, int channels) {
        if (!burns && begins)
          for (int n = 0; n < num_states && grad_initial[n] != nullptr; ++n)
            store(grad_initial[n] + start + v * lanes, adjoint[chain + v].items[n], channels);
        if (!burns && (reset || begins)) observer.forget(chain + v);
        if (!burns && l % sum_block == 0)
          for (int i = 0; i < num_weights; ++i) {
            total[chain + v].items[i] += recent[chain + v].items[i];
            recent[chain + v].items[i] = real{};
          }
      });
    };
    for_each_step<Observer::burn_in>(spans, count, ready, run_step);
    for (int s = 0; s < count; ++s)
      tile.for_each_vector([&](int v, int channels) {
        const int chain = s * vectors + v;
        for (int i = 0; i < num_weights; ++i)
          store(partial + (slots[s] * num_weights + i) * width + offset + v * lanes,
                total[chain].items[i] + recent[chain].items[i], channels);
      });
  }

  // No-op: an adjoint depends on all later ones, so no single step has a defect.
  void first_step(const Tile&, int64_t, int, int, const real*, const real*, real*, real*) const {}
};

}  // namespace pararnn
