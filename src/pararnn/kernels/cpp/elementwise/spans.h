// Spans of steps that a task runs side by side.
#pragma once
#include "tiles.h"

namespace pararnn {

// Steps `first` to `end` - 1 in processing order. Steps from `begin` to `first` - 1 are a burn-in, whose
// results are dropped.
struct Span { int64_t begin, first, end; };

// One span, as a compile-time constant.
struct One {
  constexpr One(int = 1) {}
  constexpr operator int() const { return 1; }
};

// Runs spans side by side. Calls run_step(s, j, burns) for step j of span s, and ready() between the burn-in
// and the other steps.
template <bool burn_in, class Count, class Ready, class Step>
inline void for_each_step(const Span* spans, Count count, const Ready& ready, const Step& run_step) {
  int64_t burn_in_steps = 0, size = 0;
  for (int s = 0; s < count; ++s) {
    burn_in_steps = std::max(burn_in_steps, spans[s].first - spans[s].begin);
    size = std::max(size, spans[s].end - spans[s].first);
  }
  if constexpr (burn_in)
    for (int64_t i = -burn_in_steps; i < 0; ++i)
      for (int s = 0; s < count; ++s)
        if (spans[s].first + i >= spans[s].begin) run_step(s, spans[s].first + i, std::true_type());
  ready();
  for (int64_t i = 0; i < size; ++i)
    for (int s = 0; s < count; ++s)
      if (spans[s].first + i < spans[s].end) run_step(s, spans[s].first + i, std::false_type());
}

// Observer that does nothing. shooting.h has the others.
struct NoObserver {
  static constexpr bool burn_in = false, jacobians = false;
  void begin(int, const Chains<num_states>&) {}
  void forget(int) {}
  void note(int, const real*) {}
  void follow(int, const real*) {}
  void follow_back(int, const real*) {}
};

}  // namespace pararnn
