// How a run of steps depends on the state that it starts from, how far a start may be from where it
// belongs, and Newton's update over lanes.
#pragma once
#include "problem.h"

namespace pararnn {

constexpr int entries = num_states * num_states;
constexpr bool backward = PARARNN_BACKWARD;
constexpr bool exact = jumps && !backward;  // whether segments have to meet to the bit
// What is kept of a product of Jacobians: its entries, the largest that each of them ever was, and the largest
// states (adjoints) on the way.
constexpr int gains_at = entries, sizes_at = 2 * entries, kept = 2 * entries + num_states;

PARARNN_FUNCTION bool finite(real x) { return abs(x) < constant(INFINITY); }

// The larger one, or what is not a number.
PARARNN_FUNCTION real larger(real x, real y) { return x <= y ? y : x; }
// The larger one of two numbers, without those that are none.
PARARNN_FUNCTION real largest(real x, real y) {
  return wide ? (real)::fmax((double)x, (double)y) : (real)::fmaxf((float)x, (float)y);
}

PARARNN_FUNCTION real reciprocal_of(real x) {
  return wide ? (real)(1.0 / (double)x) : (real)fast_reciprocal((float)x);
}

PARARNN_FUNCTION void begin_product(real (&product)[kept]) {
#pragma unroll
  for (int e = 0; e < entries; ++e)
    product[e] = product[gains_at + e] = constant(e % (num_states + 1) == 0);
#pragma unroll
  for (int n = 0; n < num_states; ++n) product[sizes_at + n] = constant(0);
}

PARARNN_FUNCTION void note_sizes(real (&product)[kept], const real (&x)[num_states]) {
#pragma unroll
  for (int n = 0; n < num_states; ++n)
    product[sizes_at + n] = largest(product[sizes_at + n], abs(x[n]));
}
// What has been noted; nothing where it is infinite.
PARARNN_FUNCTION real size_of(const real (&product)[kept], int n) {
  return finite(product[sizes_at + n]) ? product[sizes_at + n] : constant(0);
}

// `step` after `product`; `transposed`: the step's transpose.
template <bool transposed, int count>
PARARNN_FUNCTION void multiply(const real (&step)[count], real (&product)[kept]) {
#pragma unroll
  for (int j = 0; j < num_states; ++j) {
    real own[num_states];
#pragma unroll
    for (int i = 0; i < num_states; ++i) {
      own[i] = constant(0);
#pragma unroll
      for (int k = 0; k < num_states; ++k)
        own[i] = multiply_add(step[transposed ? k * num_states + i : i * num_states + k],
                              product[k * num_states + j], own[i]);
    }
#pragma unroll
    for (int i = 0; i < num_states; ++i) {
      const int e = i * num_states + j;
      product[e] = own[i];
      product[gains_at + e] = largest(product[gains_at + e], abs(own[i]));
    }
  }
}

// What the lane's channels started from, and the product of Jacobians since. The largest entries on the
// way say how much a segment makes of a small change of its start, anywhere in it.
struct Linear {
  static constexpr bool wanted = true;
  real start[num_states][per_lane], product[per_lane][kept];

  PARARNN_FUNCTION void begin(const real (&state)[num_states][per_lane]) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int n = 0; n < num_states; ++n) start[n][c] = state[n][c];
      begin_product(product[c]);
    }
  }
  PARARNN_FUNCTION void forget() {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int e = 0; e < entries; ++e) product[c][e] = constant(0);
#pragma unroll
      for (int n = 0; n < num_states; ++n) product[c][sizes_at + n] = constant(0);
    }
  }
  // A state that a step makes, or an adjoint that it takes.
  PARARNN_FUNCTION void note(int c, const real (&state)[num_states]) {
    note_sizes(product[c], state);
  }
  PARARNN_FUNCTION void follow(int c, const real (&step)[entries]) {
    multiply<false>(step, product[c]);
  }
  PARARNN_FUNCTION void follow_back(int c, const real (&step)[entries]) {
    multiply<true>(step, product[c]);
  }
};

// What a start may be away from where it belongs, over the largest state (adjoint) of the segment before it,
// and over what its own segment makes of the difference: two units of rounding, as any step makes. Where
// tensors in memory are narrower, a small part of their rounding. Adjoints are to have the error of a loop's
// only, where what rounding does is as large as the largest adjoint so far, and adds up in channels that do
// not forget. Below `smallest`, rounding itself has a unit.
constexpr real unit = wide ? (real)2.2e-16 : (real)1.2e-7;
constexpr real allowance = wide || same<io, float>::value ? (backward ? 16 : 2) * unit
                           : same<io, bfloat16>::value ? (real)6.1e-5 : (real)7.6e-6;
constexpr real smallest = wide ? (real)2.3e-308 : (real)1.2e-38;

// What a run of steps makes of a difference at its start, at most, each over the size of its own state.
// `sizes`: those before it.
PARARNN_FUNCTION real gain_of(const real (&product)[kept], const real (&sizes)[num_states]) {
  real gain = constant(1);
#pragma unroll
  for (int i = 0; i < num_states; ++i)
#pragma unroll
    for (int j = 0; j < num_states; ++j) {
      const real own = product[gains_at + i * num_states + j];
      const real ratio = i == j ? constant(1) : sizes[j] / largest(sizes[i], size_of(product, i));
      gain = larger(own == constant(0) ? constant(0) : own * ratio, gain);
    }
  return gain;
}

// How far a start is from where it belongs, over what it may: above 1 is too far. `gain`: what its run of
// steps makes of the difference. `sizes`: of the states before it. A step that jumps is to take just that.
PARARNN_FUNCTION real distance(real start, real wanted, real gain, real size) {
  if (start == wanted || (isnan(start) && isnan(wanted))) return constant(0);
  const real shared = allowance * reciprocal_of(gain);
  const real allowed = (shared > unit ? shared : unit) * largest(abs(wanted), size);
  const real apart = abs(start - wanted) * reciprocal_of(largest(allowed, smallest));
  const real far = apart < constant(1e30) ? apart : constant(1e30);
  return exact ? largest(far, constant(1.5)) : far;
}

PARARNN_FUNCTION real distance(const real (&start)[num_states], const real (&wanted)[num_states],
                               real gain, const real (&sizes)[num_states]) {
  real far = constant(0);
#pragma unroll
  for (int n = 0; n < num_states; ++n) {
    const real own = distance(start[n], wanted[n], gain, sizes[n]);
    far = own > far ? own : far;
  }
  return far;
}

PARARNN_FUNCTION real most_of_lanes(real x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x = larger(__shfl_xor_sync(~0u, x, step), x);
  return x;
}

// The largest states so far after a run of steps: of its `own` ones and those before it, but for states of which
// its product `a` says that they have forgotten all that was before.
template <int count>
PARARNN_FUNCTION void pass_on_sizes(const real (&a)[count], const real (&before)[num_states],
                                    real (&own)[num_states]) {
#pragma unroll
  for (int i = 0; i < num_states; ++i) {
    bool forgets = true;
#pragma unroll
    for (int j = 0; j < num_states; ++j) forgets &= a[i * num_states + j] == constant(0);
    own[i] = forgets ? own[i] : largest(own[i], before[i]);
  }
}

// x -> a x + b, of a run of steps, and the largest states on its way.
struct Affine {
  real a[entries], b[num_states], size[num_states];

  PARARNN_FUNCTION Affine() {
#pragma unroll
    for (int e = 0; e < entries; ++e) a[e] = constant(e % (num_states + 1) == 0);
#pragma unroll
    for (int n = 0; n < num_states; ++n) b[n] = size[n] = constant(0);
  }

  PARARNN_FUNCTION void apply(const real (&x)[num_states], real (&y)[num_states]) const {
#pragma unroll
    for (int i = 0; i < num_states; ++i) {
      y[i] = b[i];
#pragma unroll
      for (int j = 0; j < num_states; ++j) y[i] = multiply_add(a[i * num_states + j], x[j], y[i]);
    }
  }

  // This one, after `before`.
  PARARNN_FUNCTION Affine after(const Affine& before) const {
    Affine both;
    apply(before.b, both.b);
#pragma unroll
    for (int n = 0; n < num_states; ++n) both.size[n] = size[n];
    pass_on_sizes(a, before.size, both.size);
#pragma unroll
    for (int i = 0; i < num_states; ++i)
#pragma unroll
      for (int j = 0; j < num_states; ++j) {
        real sum = constant(0);
#pragma unroll
        for (int k = 0; k < num_states; ++k)
          sum = multiply_add(a[i * num_states + k], before.a[k * num_states + j], sum);
        both.a[i * num_states + j] = sum;
      }
    return both;
  }
};

// Where a start belongs: `end`, where the run before it ends, and what that run makes of a shift of its own
// start, unless it overflows.
PARARNN_FUNCTION void newton_start(const real (&end)[num_states], const real (&product)[kept],
                                   const real (&shift)[num_states], real (&wanted)[num_states]) {
#pragma unroll
  for (int i = 0; i < num_states; ++i) {
    real change = constant(0);
#pragma unroll
    for (int j = 0; j < num_states; ++j)
      change = multiply_add(product[i * num_states + j], shift[j], change);
    wanted[i] = end[i] + (finite(change) ? change : constant(0));
  }
}

// What stands `by` lanes before, among `width` lanes.
template <int count>
PARARNN_FUNCTION void from_lane_before(const real (&x)[count], int by, int width,
                                       real (&out)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) out[i] = __shfl_up_sync(~0u, x[i], by, width);
}

// Each lane's map after those of the lanes before it, among `width` lanes.
PARARNN_FUNCTION void scan_lanes(Affine& own, int width) {
  for (int by = 1; by < width; by *= 2) {
    Affine before;
    from_lane_before(own.a, by, width, before.a);
    from_lane_before(own.b, by, width, before.b);
    if (lane() % width >= by) own = own.after(before);
  }
}

}  // namespace pararnn
