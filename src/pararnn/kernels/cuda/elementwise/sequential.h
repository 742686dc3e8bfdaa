// The loop over time: a warp runs a tile of channels of one row from the first step to the last.
#pragma once
#include "passes.h"

namespace pararnn {

struct NotLinear {
  static constexpr bool jacobians = false;
  PARARNN_FUNCTION void begin(const States&) {}
  PARARNN_FUNCTION void forget() {}
  PARARNN_FUNCTION void note(int, const State&) {}
  PARARNN_FUNCTION void follow(int, const Matrix&) {}
};

PARARNN_FUNCTION void run_sequential(const Pass::Launch& launch) {
  const auto& p = launch.pass;
  __shared__ __align__(16) char memory[Pass::bytes];
  const Tile tile(blockIdx.x);
  const Weights weights(p.in, tile);
  const Pass pass(p, tile, weights, memory);
  States state;
  pass.origin(state);
  NotLinear not_linear;
  pass.sweep(Span{0, 0, (int)p.in.length}, state, not_linear, tile.row);
  pass.report_none();
}

}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(32)
run(const __grid_constant__ pararnn::Pass::Launch launch) {
  pararnn::run_sequential(launch);
}
