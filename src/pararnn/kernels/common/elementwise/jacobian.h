// Jacobians of one step or of a run of steps: num_states x num_states, row-major. Pointers are to the entries
// of a Jacobian, or to one number per state.
#pragma once
#include "../sizes.h"

namespace pararnn {

PARARNN_FUNCTION void set_identity(real* a) {
  PARARNN_FOR(e, entries) a[e] = constant(e % (num_states + 1) == 0);
}

PARARNN_FUNCTION void transpose(const real* a, real* out) {
  PARARNN_FOR(e, entries) out[e] = a[e % num_states * num_states + e / num_states];
}

// out = a b
PARARNN_FUNCTION void multiply(const real* a, const real* b, real* out) {
  PARARNN_FOR(e, entries) {
    const real* row = a + e / num_states * num_states;
    const real* column = b + e % num_states;
    out[e] = row[0] * column[0];
    PARARNN_UNROLL
    for (int k = 1; k < num_states; ++k)
      out[e] = multiply_add(row[k], column[k * num_states], out[e]);
  }
}

// Update `own`, the largest states of a run of steps, to include `before`, the largest ones before the run.
// States that forget all that came before, by the run's Jacobian a, keep their own.
PARARNN_FUNCTION void pass_on_sizes(const real* a, const real* before, real* own) {
  PARARNN_FOR(i, num_states) {
    mask remembers = a[i * num_states] != constant(0);
    PARARNN_UNROLL
    for (int j = 1; j < num_states; ++j) remembers |= a[i * num_states + j] != constant(0);
    own[i] = select(remembers, largest(own[i], before[i]), own[i]);
  }
}

}  // namespace pararnn
