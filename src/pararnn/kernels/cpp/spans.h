// Spans of steps that a task runs side by side.
#pragma once
#include "tiles.h"

namespace pararnn {

// Steps of processing from `first` to before `end`. The pass starts at `begin`, from a guess, and what
// comes before `first` is only to forget it.
struct Span { int64_t begin, first, end; };

// One span, known to the compiler.
struct One {
  constexpr One(int = 1) {}
  constexpr operator int() const { return 1; }
};

// Runs spans side by side: run_step(s, j, burns) is step j of span s; ready() comes before the first
// steps that are not burnt.
template <bool burn_in, class Count, class Ready, class Step>
inline void for_each_step(const Span* spans, Count count, const Ready& ready, const Step& run_step) {
  int64_t before = 0, size = 0;
  for (int s = 0; s < count; ++s) {
    before = std::max(before, spans[s].first - spans[s].begin);
    size = std::max(size, spans[s].end - spans[s].first);
  }
  if constexpr (burn_in)
    for (int64_t i = -before; i < 0; ++i)
      for (int s = 0; s < count; ++s)
        if (spans[s].first + i >= spans[s].begin) run_step(s, spans[s].first + i, std::true_type());
  ready();
  for (int64_t i = 0; i < size; ++i)
    for (int s = 0; s < count; ++s)
      if (spans[s].first + i < spans[s].end) run_step(s, spans[s].first + i, std::false_type());
}

// What observes a sweep: here, nothing does; the others are in shooting.h.
struct Nothing {
  static constexpr bool burn_in = false, jacobians = false;
  void begin(int, const Chains<num_states>&) {}
  void forget(int) {}
  void note(int, const real*) {}
  void follow(int, const real*) {}
  void follow_back(int, const real*) {}
};

}  // namespace pararnn
