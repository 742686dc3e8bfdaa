// How a run of steps depends on the state that it starts from: products of Jacobians, affine maps, and their
// scan over the lanes of a warp.
#pragma once
#include "problem.h"
#include "registers.h"
#include "../common/jacobian.h"

namespace pararnn {

constexpr bool backward = PARARNN_BACKWARD;

using State = Vec<num_states>;
using Matrix = Vec<entries>;
using States = Fragment<num_states>;

PARARNN_FUNCTION bool finite(real x) { return abs(x) < constant(INFINITY); }

// The larger one, or what is not a number.
PARARNN_FUNCTION real larger(real x, real y) { return x <= y ? y : x; }

PARARNN_FUNCTION real reciprocal_of(real x) {
  return wide ? (real)(1.0 / (double)x) : (real)fast_reciprocal((float)x);
}

PARARNN_FUNCTION real most_of_lanes(real x) {
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

// The product of the Jacobians of a run of steps; the largest that each of its entries ever was, which says how much
// the run makes of a small change of its start, anywhere in it; and the largest states (adjoints) on the way.
struct Product {
  Matrix a, peak;
  State size;

  PARARNN_FUNCTION void begin() {
    a = peak = identity();
    size = filled<num_states>(constant(0));
  }
  // What comes does not depend on what was.
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
  // What has been noted; nothing where it is infinite.
  PARARNN_FUNCTION real size_of(int n) const { return finite(size[n]) ? size[n] : constant(0); }
  PARARNN_FUNCTION State sizes() const {
    return vec<num_states>([&](int n) { return size_of(n); });
  }
};

// What the lane's channels started from, and the product of Jacobians since.
struct Linear {
  static constexpr bool wanted = true;
  States start;
  Product product[per_lane];

  PARARNN_FUNCTION void begin(const States& state) {
    start = state;
    each<per_lane>([&](int c) { product[c].begin(); });
  }
  PARARNN_FUNCTION void forget() {
    each<per_lane>([&](int c) { product[c].forget(); });
  }
  // A state that a step makes, or an adjoint that it takes.
  PARARNN_FUNCTION void note(int c, const State& state) { product[c].note(state); }
  PARARNN_FUNCTION void follow(int c, const Matrix& step) { product[c].follow(step); }
};

// Where a run ends: the states, and the largest ones on the way.
struct End {
  States state, size;
};

// x -> a x + b, of a run of steps, and the largest states on its way.
struct Affine {
  Matrix a;
  State b, size;

  // That of a run of no steps.
  PARARNN_FUNCTION void begin() {
    a = identity();
    b = size = filled<num_states>(constant(0));
  }

  PARARNN_FUNCTION State operator()(const State& x) const {
    return vec<num_states>([&](int i) { return row_times(a, i, x, b[i]); });
  }
  // This one, after `before`.
  PARARNN_FUNCTION Affine after(const Affine& before) const {
    Affine both;
    both.b = (*this)(before.b);
    both.size = size;
    pass_on_sizes(a, before.size, both.size);
    both.a = product_of(a, before.a);
    return both;
  }
};

// What stands `by` lanes before.
template <int count>
PARARNN_FUNCTION Vec<count> from_lane_before(const Vec<count>& x, int by = 1) {
  return vec<count>([&](int i) { return __shfl_up_sync(~0u, x[i], by, lanes); });
}

// Each lane's map after those of the lanes before it: an inclusive scan. Sizes are left out.
PARARNN_FUNCTION void scan_lanes(Affine& own) {
  for (int by = 1; by < lanes; by *= 2) {
    Affine before;
    before.a = from_lane_before(own.a, by);
    before.b = from_lane_before(own.b, by);
    if (lane() >= by) own = own.after(before);
  }
}

// Where a start belongs: `end`, where the run before it ends, and what that run makes of a shift of its own
// start, unless it overflows.
PARARNN_FUNCTION State newton_start(const State& end, const Matrix& product, const State& shift) {
  return vec<num_states>([&](int i) {
    const real change = row_times(product, i, shift, constant(0));
    return end[i] + (finite(change) ? change : constant(0));
  });
}

}  // namespace pararnn
