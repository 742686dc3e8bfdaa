// The sequential solver: the kernel that runs a pass. PARARNN_BACKWARD (0 or 1) selects it.
#pragma once
#if PARARNN_BACKWARD
#include "backward.h"
#else
#include "forward.h"
#endif

extern "C" __global__ void __launch_bounds__(32 * pararnn::warps)
run(const __grid_constant__ pararnn::Problem problem) {
  if (problem.in.flags != nullptr && problem.in.flags[blockIdx.x] == 0) return;
  PARARNN_LAUNCH_MEMORY(memory);
  pararnn::run_pass(problem, memory);
}
