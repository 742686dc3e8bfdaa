// Sums of partial sums over rows and spans: gradients of weights with one value a channel.
#pragma once
#include "problem.h"

namespace pararnn {

// Pairwise sum in a fixed order: the bits do not depend on threads.
inline real sum_rows(const scalar* column, int64_t stride, int64_t rows, int count) {
  if (rows == 0) return real{};
  if (rows == 1) return load(column, count);
  const int64_t half = rows / 2;
  return sum_rows(column, stride, half, count) +
         sum_rows(column + half * stride, stride, rows - half, count);
}

// Sums the partial sums of all rows and spans into the gradients of weights.
template <class Pass> void sum_weights(const Pass& pass, int64_t spans) {
  const Problem& p = pass.problem;
  const int64_t width = p.width(), stride = num_weights * width;
  run_tasks(num_weights, threads_for(p, spans * stride), p.openmp, [&](int64_t i) {
    for (int64_t d = 0; d < width; d += lanes) {
      const int count = (int)std::min<int64_t>(lanes, width - d);
      const scalar* column = pass.partial + i * width + d;
      store(pass.grad_weights[i] + d, sum_rows(column, stride, spans, count), count);
    }
  });
}

}  // namespace pararnn
