// The problem: Inputs, which is emitted with the other structs that a launch packs (see
// codegen/interface.py), and what follows from it.
//
// Channels d = head * channels + j are contiguous in all tensors but the gates, whose heads have a
// stride. Times t of the tensors are in the caller's order; steps l are in processing order.
#pragma once
#include "functions.h"
#include "memory.h"
#include "parallel.h"

namespace pararnn {

constexpr int64_t thread_work = 32768;  // channel steps that are worth another thread
constexpr int steps_ahead = 8;          // hardware does not foresee the jumps from step to step
constexpr int num_weights = num_gates + num_params;  // biases, then params

struct Problem : Inputs {
  int64 width() const { return heads * channels; }
  // From a step's place in a tensor to that of the step that is due soon, in time.
  int64 soon(bool backward) const {
    return backward == (reverse != 0) ? steps_ahead : -steps_ahead;
  }
  int64 time(int64 step) const { return reverse ? length - 1 - step : step; }
  int64 sequence(int64 row, int64 step) const {
    if (step < 0 || step >= length) return -2;
    return seq != nullptr ? seq[row * length + time(step)] : row;
  }
  bool is_reset(int64 row, int64 step) const {
    return reset != nullptr && reset[row * length + time(step)];
  }
  // Of a step in a tensor (row, time, channel).
  int64 place(int64 row, int64 step) const { return (row * length + time(step)) * width(); }
};

inline int64 threads_for(const Problem& p, int64 channel_steps) {
  return std::min(p.threads, 1 + channel_steps / thread_work);
}

}  // namespace pararnn
