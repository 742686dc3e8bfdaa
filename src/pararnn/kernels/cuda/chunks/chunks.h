// The kernel of a pass by chunks. PARARNN_PASS (0, 1 or 2) selects the forward pass, the adjoint states or the gradients.
#pragma once
#if PARARNN_PASS == 0
#include "forward.h"
#elif PARARNN_PASS == 1
#include "reverse.h"
#else
#include "contract.h"
#endif

extern "C" __global__ void __launch_bounds__(pararnn::threads, pararnn::least_blocks) run(const __grid_constant__ pararnn::Problem problem) {
  PARARNN_LAUNCH_MEMORY(memory);
  pararnn::run_pass(problem, memory);
}
