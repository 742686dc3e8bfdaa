// Derivatives of a run of steps by its start: products of Jacobians, affine maps, and their scan over the
// lanes of a warp.
#pragma once
#include "problem.h"
#include "../registers.h"
#include "../../common/elementwise/jacobian.h"

namespace pararnn {

constexpr bool backward = PARARNN_BACKWARD;

using State = Vec<num_states>;
using Matrix = Vec<entries>;
using States = Fragment<num_states>;

PARARNN_FUNCTION bool finite(real x) { return abs(x) < constant(INFINITY); }

// Returns the larger one, or NaN.
PARARNN_FUNCTION real larger(real x, real y) { return x <= y ? y : x; }

PARARNN_FUNCTION real reciprocal_of(real x) {
  return wide ? (real)(1.0 / (double)x) : (real)fast_reciprocal((float)x);
}

PARARNN_FUNCTION real max_of_lanes(real x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x = larger(__shfl_xor_sync(~0u, x, step), x);
  return x;
}

PARARNN_FUNCTION Matrix identity() {
  Matrix a;
  set_identity(a);
  return a;
}

PARARNN_FUNCTION Matrix product_of(const Matrix& a, const Matrix& b) {
  Matrix product;
  multiply(a, b, product);
  return product;
}

PARARNN_FUNCTION Matrix transpose_of(const Matrix& a) {
  Matrix transposed;
  transpose(a, transposed);
  return transposed;
}

// sum + (row i of a) x.
PARARNN_FUNCTION real row_times(const Matrix& a, int i, const State& x, real sum) {
  each<num_states>([&](int j) { sum = multiply_add(a[i * num_states + j], x[j], sum); });
  return sum;
}

// The product of a run's Jacobians; `peak`, the largest absolute value that each entry ever had, which bounds
// the effect of a small change of the start anywhere in the run; and `size`, the largest states (adjoints) of
// the run.
struct Product {
  Matrix a, peak;
  State size;

  PARARNN_FUNCTION void begin() {
    a = peak = identity();
    size = filled<num_states>(constant(0));
  }
  // What follows does not depend on what was.
  PARARNN_FUNCTION void forget() {
    a = filled<entries>(constant(0));
    size = filled<num_states>(constant(0));
  }
  PARARNN_FUNCTION void note(const State& x) {
    each<num_states>([&](int n) { size[n] = largest(size[n], abs(x[n])); });
  }
  PARARNN_FUNCTION void follow(const Matrix& step) {
    a = product_of(step, a);
    each<entries>([&](int e) { peak[e] = largest(peak[e], abs(a[e])); });
  }
  // The largest state; zero if it is infinite.
  PARARNN_FUNCTION real size_of(int n) const { return finite(size[n]) ? size[n] : constant(0); }
  PARARNN_FUNCTION State sizes() const {
    return vec<num_states>([&](int n) { return size_of(n); });
  }
};

// Start of the lane's channels, and the product of Jacobians since.
struct Linear {
  static constexpr bool jacobians = true;
  States start;
  Product product[per_lane];

  PARARNN_FUNCTION void begin(const States& state) {
    start = state;
    each<per_lane>([&](int c) { product[c].begin(); });
  }
  PARARNN_FUNCTION void forget() {
    each<per_lane>([&](int c) { product[c].forget(); });
  }
  // Call with the state after a step, or the adjoint before it.
  PARARNN_FUNCTION void note(int c, const State& state) { product[c].note(state); }
  PARARNN_FUNCTION void follow(int c, const Matrix& step) { product[c].follow(step); }
};

// End of a run: the states, and the largest ones of the run.
struct End {
  States state, size;
};

// Affine map x -> a x + b of a run of steps, and its largest states.
struct Affine {
  Matrix a;
  State b, size;

  // Set to the map of no steps.
  PARARNN_FUNCTION void begin() {
    a = identity();
    b = size = filled<num_states>(constant(0));
  }

  PARARNN_FUNCTION State operator()(const State& x) const {
    return vec<num_states>([&](int i) { return row_times(a, i, x, b[i]); });
  }
  // This map after `previous`.
  PARARNN_FUNCTION Affine compose(const Affine& previous) const {
    Affine both;
    both.b = (*this)(previous.b);
    both.size = size;
    pass_on_sizes(a, previous.size, both.size);
    both.a = product_of(a, previous.a);
    return both;
  }
};

// Values of the lane `distance` lanes before.
template <int count>
PARARNN_FUNCTION Vec<count> from_lane_before(const Vec<count>& x, int distance = 1) {
  return vec<count>([&](int i) { return __shfl_up_sync(~0u, x[i], distance, lanes); });
}

// Inclusive scan: composes each lane's map with those of all lanes before it, without sizes.
PARARNN_FUNCTION void scan_lanes(Affine& own) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    Affine before;
    before.a = from_lane_before(own.a, distance);
    before.b = from_lane_before(own.b, distance);
    if (lane() >= distance) own = own.compose(before);
  }
}

// Newton's new start: `end`, the end of the run before it, plus the effect of that run on a shift of its own
// start. An effect that overflows is left out.
PARARNN_FUNCTION State newton_start(const State& end, const Matrix& product, const State& shift) {
  return vec<num_states>([&](int i) {
    const real change = row_times(product, i, shift, constant(0));
    return end[i] + (finite(change) ? change : constant(0));
  });
}

}  // namespace pararnn
