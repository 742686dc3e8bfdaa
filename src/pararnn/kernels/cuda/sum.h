// Gradients of weights: sums the spans' sums over time over rows.
#pragma once
#include "registers.h"

namespace pararnn {

constexpr int sum_ways = 8;  // rows summed side by side

// A block sums 32 channels of one weight over the rows, always in the same order.
PARARNN_FUNCTION void run_sum(const SumProblem& p) {
  __shared__ real sums[sum_ways][lanes];
  const int channel = blockIdx.x * lanes + threadIdx.x, weight = blockIdx.y;
  if (weight < num_gates && p.bias == nullptr) return;
  real sum = constant(0);
  if (channel < channels) {
#pragma unroll 4
    for (int64 row = threadIdx.y; row < p.rows; row += sum_ways)
      sum += p.partial[(row * num_weights + weight) * channels + channel];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || channel >= channels) return;
  each<sum_ways - 1>([&](int i) { sum += sums[i + 1][threadIdx.x]; });
  if (weight < num_gates) p.bias[weight * channels + channel] = narrow<weight_io>(sum);
  each<num_params>([&](int i) {
    if (weight == num_gates + i) p.params[i][channel] = narrow<weight_io>(sum);
  });
}

}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(256)
sum_weights(const __grid_constant__ pararnn::SumProblem problem) {
  pararnn::run_sum(problem);
}
