// The sequential solver, and the entry points of its library: a task runs a group of rows of one head from the
// first step to the last.
#pragma once
#include "backward.h"
#include "forward.h"

extern "C" {

__attribute__((visibility("default"))) void forward(const pararnn::ForwardLaunch* launch) {
  using namespace pararnn;
  const ForwardPass pass(launch->pass);
  const Problem& p = pass.problem;
  for (int n = 0; n < num_states && !pass.given; ++n)
    if (pass.states[n] != nullptr) expect_writes(pass.states[n], p.rows * p.length * p.width() * sizeof(io));
  if (pass.sums != nullptr) expect_writes(pass.sums, p.rows * p.length * num_sums * p.width() * sizeof(scalar));
  pass.run();
}

__attribute__((visibility("default"))) void backward(const pararnn::BackwardLaunch* launch) {
  using namespace pararnn;
  const BackwardPass pass(launch->pass);
  const Problem& p = pass.problem;
  expect_writes(pass.grad_gates, p.rows * p.length * num_gates * p.width() * sizeof(io));
  if (pass.left != nullptr) {
    const int64 bytes = p.rows * p.length * p.width() * sizeof(scalar);
    int rights = 0;
    for (int i = 0; i < num_rights; ++i) rights += right_place(i) >= 0;
    expect_writes(pass.left, num_lefts * bytes);
    expect_writes(pass.right, rights * bytes);
  }
  pass.run();
  sum_weights(pass, p.rows);
}

}  // extern "C"
