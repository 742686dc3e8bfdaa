// Products of rows with a matrix of a head, packed once a launch.
#pragma once
#include "../problem.h"
#include "../products.h"

namespace pararnn {

// The matrices of a pass's products, packed: [head][product][vector][row][lane].
struct Packed {
  int64 products, one;
  Storage memory;

  Packed(const Problem& p, const Product* list, int count)
      : products(count), one((p.channels + lanes - 1) / lanes * p.channels * lanes),
        memory(p.heads * count * one * sizeof(scalar), false) {
    const int64 work = p.heads * count * p.channels * p.channels;
    run_tasks(p.heads * count, threads_for(p, work), p.openmp, [&](int64 i) {
      const Product& product = list[i % count];
      const scalar* matrix = p.params[product.matrix] + i / count * p.channels * p.channels;
      pack(matrix, p.channels, product.transposed != 0, p.channels, p.channels, memory.as<scalar>() + i * one);
    });
  }
  const scalar* of(int64 head, int product) const {
    return memory.as<scalar>() + (head * products + product) * one;
  }
};

}  // namespace pararnn
