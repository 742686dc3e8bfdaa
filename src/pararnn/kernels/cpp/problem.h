// The problem: Inputs, which is emitted with the other structs of a launch (codegen/interface.py), and
// functions of it.
//
// Channels d = head * channels + j are contiguous in all tensors except gates, whose heads have a stride.
// Times t are in the caller's order; steps l are in processing order.
#pragma once
#include "functions.h"
#include "memory.h"
#include "parallel.h"
#include "../common/sizes.h"

namespace pararnn {

constexpr int64_t thread_work = 32768;  // channel steps that justify one more thread
constexpr int steps_ahead = 8;          // to prefetch: hardware does not predict the strides

struct Problem : Inputs {
  int64 width() const { return heads * channels; }
  // Steps in time to the step to prefetch.
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
  // Index of a step in a tensor (row, time, channel).
  int64 index(int64 row, int64 step) const { return (row * length + time(step)) * width(); }
};

inline int64 threads_for(const Problem& p, int64 channel_steps) {
  return std::min(p.threads, 1 + channel_steps / thread_work);
}

}  // namespace pararnn
