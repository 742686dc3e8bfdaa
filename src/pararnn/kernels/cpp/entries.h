// The entries of a library, by the solver's run().
#pragma once
#include "backward.h"
#include "forward.h"

extern "C" {

__attribute__((visibility("default"))) void forward(const int64_t* sizes, void* const* pointers) {
  using namespace pararnn;
  Reader in{sizes, pointers};
  const ForwardPass pass(in);
  const Problem& p = pass.problem;
  for (int n = 0; n < num_states; ++n)
    expect_writes(p.states[n], p.rows * p.length * p.width() * sizeof(io));
  run(pass, in);
}

__attribute__((visibility("default"))) void backward(const int64_t* sizes, void* const* pointers) {
  using namespace pararnn;
  Reader in{sizes, pointers};
  const BackwardPass pass(in);
  const Problem& p = pass.problem;
  expect_writes(pass.grad_gates, p.rows * p.length * num_gates * p.width() * sizeof(io));
  sum_weights(pass, p.rows * run(pass, in));
}

}  // extern "C"
