// The sequential solver: kernels that run a pass from its first step to its last, and those before and after
// it. PARARNN_BACKWARD (0 or 1) selects the pass.
#pragma once
#if PARARNN_BACKWARD
#include "backward.h"

#include "../sum.h"
namespace pararnn {
using Pass = BackwardPass;
using PassTables = BackwardTables;
using PassProducts = AdjointProducts;
}  // namespace pararnn
#else
#include "forward.h"
namespace pararnn {
using Pass = ForwardPass;
using PassTables = ForwardTables;
using PassProducts = ForwardProducts;
}  // namespace pararnn
#endif

static_assert(pararnn::Pass::bytes == pararnn::shared_bytes);
static_assert(pararnn::wide || pararnn::PassProducts::words * pararnn::warps * pararnn::slices == pararnn::packed_words);
static_assert(pararnn::wide || pararnn::register_fragments * pararnn::lanes * 4 <= pararnn::PassProducts::words);

extern "C" __global__ void __launch_bounds__(256)
pack(const __grid_constant__ pararnn::PackProblem problem) {
  pararnn::pack<pararnn::PassTables, pararnn::PassProducts>(problem);
}

namespace pararnn {
template <class Own> PARARNN_FUNCTION void run_warp(const typename Own::Problem& problem, char* memory) {
  if constexpr (helpers > 0) {
    if (warp() >= warps) {
      Own::help(problem, memory);
      return;
    }
  }
  Own pass(problem, memory);
  pass.run(memory);
}
}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(32 * (pararnn::warps + pararnn::helpers))
run(const __grid_constant__ pararnn::Pass::Problem problem) {
  PARARNN_LAUNCH_MEMORY(memory);
  pararnn::run_warp<pararnn::Pass>(problem, memory);
}
