// The kernel of a pass: the blocks of a cluster run all steps of their rows. Needs the emitted Steps and Problem.
#pragma once
#include "links.h"

extern "C" __global__ void __launch_bounds__(pararnn::threads, 1) run(const __grid_constant__ pararnn::Problem problem) {
  using namespace pararnn;
  PARARNN_LAUNCH_MEMORY(memory);
  const Place place(problem.in);
  Steps steps(problem, place, memory);
  const int length = place.length, direction = PARARNN_BACKWARD ? -1 : 1;
  if (length == 0) return;
  int l = PARARNN_BACKWARD ? length - 1 : 0;
  steps.start(l);
  for (int i = 0; i < length; ++i, l += direction) steps.run(l, place.inside(l + direction));
  steps.finish();
  meet_slices();
}

// Packs the matrices of a pass.
extern "C" __global__ void __launch_bounds__(256) pack(const __grid_constant__ pararnn::PackProblem problem) {
  pararnn::pack_matrices(problem);
}
