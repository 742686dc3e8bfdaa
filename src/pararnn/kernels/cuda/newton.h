// Multiple shooting: time is cut into segments, a warp each, and the unknowns are the states that they
// start from. A first sweep runs every segment from a guess, the state that a burn-in of some steps
// reaches from zero. Where the end of each segment is the start of the next, to rounding, the tile of
// channels is done: the segments are one trajectory. Else Newton moves the starts, by the product of
// Jacobians that each segment has multiplied up, and the segments whose start has moved run again. Every
// sweep makes one more segment exact, at least; where Newton does not come nearer, one warp runs the
// rest one step after the other. The backward pass is the same on a linear recurrence.
//
// The segments of a tile meet after each sweep. The last one to arrive looks at all starts and ends, and
// the others wait for its verdict: so all blocks must be resident (a cooperative launch). What is
// decided depends on the values only, never on who comes last.
#pragma once
#include "passes.h"

namespace pararnn {

constexpr int entries = num_states * num_states;
constexpr int kept = entries + 1;  // of a product: its entries, and the largest that there ever was

struct Shooting {
  int64 segments, size, burn_in;  // how many, steps of one, steps of the guess
  scalar* starts;                 // (row, segment, state, channel)
  scalar* ends;                   // (row, segment, state, channel)
  scalar* products;               // (row, segment, kept, channel)
  scalar* distances;              // (row, tile): the largest distance after the round before
  int* moved;                     // (row, tile, segment): whether its start has moved since its sweep
  // Zero at first:
  unsigned* met;                  // (row, tile, segment): arrivals on both sides of its start
  unsigned* far;                  // (row, tile): bits of the largest distance above 1
  unsigned* arrived;              // (row, tile)
  unsigned* verdict;              // (row, tile)
};

struct NewtonProblem {
  Pass::Problem pass;
  Shooting shooting;
};

enum Verdict : unsigned { settled = 0, again = 1 };

// What a start may be away from where it belongs, over 1 + |state|: two units of rounding, as any step
// makes. Where tensors in memory are narrower, a small part of their rounding, over what the segment
// makes of it.
constexpr real rounding = wide ? (real)4.5e-16 : (real)2.4e-7;
constexpr real allowance = wide || same<io, float>::value ? rounding
                           : same<io, bfloat16>::value ? (real)6.1e-5 : (real)7.6e-6;

// The product of Jacobians over a segment: how its result depends on what it starts from. The largest
// entry on the way says how much a segment makes of a small change of its start, anywhere in it.
struct Linear {
  static constexpr bool wanted = true;
  real start[num_states][per_lane], product[kept][per_lane];

  PARARNN_FUNCTION void begin(const real (&state)[num_states][per_lane]) {
#pragma unroll
    for (int c = 0; c < per_lane; ++c) {
#pragma unroll
      for (int n = 0; n < num_states; ++n) start[n][c] = state[n][c];
#pragma unroll
      for (int e = 0; e < entries; ++e) product[e][c] = constant(e % (num_states + 1) == 0);
      product[entries][c] = constant(1);
    }
  }
  PARARNN_FUNCTION void forget() {
#pragma unroll
    for (int e = 0; e < entries; ++e)
#pragma unroll
      for (int c = 0; c < per_lane; ++c) product[e][c] = constant(0);
  }
  PARARNN_FUNCTION void follow(int c, const real (&step)[entries]) { multiply<false>(c, step); }
  PARARNN_FUNCTION void follow_back(int c, const real (&step)[entries]) { multiply<true>(c, step); }

  template <bool transposed> PARARNN_FUNCTION void multiply(int c, const real (&step)[entries]) {
#pragma unroll
    for (int j = 0; j < num_states; ++j) {
      real own[num_states];
#pragma unroll
      for (int i = 0; i < num_states; ++i) {
        own[i] = constant(0);
#pragma unroll
        for (int k = 0; k < num_states; ++k)
          own[i] = multiply_add(step[transposed ? k * num_states + i : i * num_states + k],
                                product[k * num_states + j][c], own[i]);
      }
#pragma unroll
      for (int i = 0; i < num_states; ++i) {
        product[i * num_states + j][c] = own[i];
        const real size = abs(own[i]), most = product[entries][c];
        product[entries][c] = size <= most ? most : size;  // NaN is a size too
      }
    }
  }
};

PARARNN_FUNCTION real reciprocal_of(real x) {
  return wide ? (real)(1.0 / (double)x) : (real)fast_reciprocal((float)x);
}

PARARNN_FUNCTION bool finite(real x) { return abs(x) < constant(INFINITY); }

// The starts, ends and products of the segments of a tile, through memory that all blocks see.
struct Boundaries {
  const Shooting& s;
  const Place& at;
  int column;

  PARARNN_FUNCTION Boundaries(const Shooting& s, const Place& at, int column)
      : s(s), at(at), column(column) {}

  template <int count>
  PARARNN_FUNCTION void read(const scalar* from, int w, real (&x)[count][per_lane]) const {
    const scalar* own = from + (at.row * s.segments + w) * count * channels + at.own;
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
      for (int c = 0; c < per_lane; ++c)
        x[i][c] = c < at.active ? __ldcg(own + i * channels + c) : constant(0);
  }
  template <int count>
  PARARNN_FUNCTION void write(scalar* to, int w, const real (&x)[count][per_lane]) const {
    scalar* own = to + (at.row * s.segments + w) * count * channels + at.own;
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
      for (int c = 0; c < per_lane; ++c)
        if (c < at.active) __stcg(own + i * channels + c, x[i][c]);
  }
  PARARNN_FUNCTION void write_one(scalar* to, int w, int n, int c, real x) const {
    if (c < at.active)
      __stcg(to + ((at.row * s.segments + w) * num_states + n) * channels + at.own + c, x);
  }
  PARARNN_FUNCTION int* moved(int w) const { return s.moved + column * s.segments + w; }
};

// How far a start is from where it belongs, over what it may: above 1 is too far. `gain`: what its
// segment makes of the difference, at most.
PARARNN_FUNCTION real distance(real start, real wanted, real gain) {
  real allowed = rounding;
  if constexpr (allowance != rounding) {
    const real shared = allowance * reciprocal_of(gain);
    allowed = shared > rounding ? shared : rounding;
  }
  const real apart = abs(start - wanted) * reciprocal_of(allowed * (constant(1) + abs(wanted)));
  if (apart < constant(1e30)) return apart;
  const bool same_nothing = start == wanted || (isnan(start) && isnan(wanted));
  return same_nothing ? constant(0) : constant(1e30);
}

PARARNN_FUNCTION real most_of_lanes(real x) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) {
    const real other = __shfl_xor_sync(~0u, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// How far the start of segment w is from where `before`, the end of the one before, has it.
PARARNN_FUNCTION real distance_at(const Boundaries& b, int w,
                                  const real (&before)[num_states][per_lane]) {
  real start[num_states][per_lane], product[kept][per_lane], far = constant(0);
  b.read(b.s.starts, w, start);
  b.read(b.s.products, w, product);
#pragma unroll
  for (int c = 0; c < per_lane; ++c)
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      const real own = distance(start[n][c], before[n][c], product[entries][c]);
      far = own > far ? own : far;
    }
  return most_of_lanes(far);
}

// Segments whose boundaries are read together, while those before them are looked at: memory answers
// all at once, and one warp has nothing else to wait with.
constexpr int batch = num_states == 1 ? 4 : num_states == 2 ? 2 : 1;

struct Boundary {
  real wanted[num_states][per_lane], start[num_states][per_lane], product[kept][per_lane];
};

PARARNN_FUNCTION void read_batch(const Boundaries& b, int first, Boundary (&all)[batch]) {
  const int last = (int)b.s.segments - 1;
#pragma unroll
  for (int k = 0; k < batch; ++k) {
    const int w = min(first + k, last);
    b.read(b.s.ends, w - 1, all[k].wanted);
    b.read(b.s.starts, w, all[k].start);
    b.read(b.s.products, w, all[k].product);
  }
}

// Compares the end of every segment with the start of the next, and moves starts that are too far
// away: by what they are off, and by what the move of the start before makes of the end (Newton's
// update; what overflows is left out). Returns the largest distance, over what is allowed.
PARARNN_FUNCTION real move_starts(const Boundaries& b) {
  const int segments = (int)b.s.segments;
  real shift[num_states][per_lane], before[entries][per_lane], furthest = constant(0);
  clear(shift);
#pragma unroll
  for (int e = 0; e < entries; ++e)
#pragma unroll
    for (int c = 0; c < per_lane; ++c) before[e][c] = constant(0);
  Boundary all[batch], next[batch];
  read_batch(b, 1, all);
  for (int first = 1; first < segments; first += batch) {
    read_batch(b, first + batch, next);
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int w = first + k;
      if (w >= segments) continue;
      bool moved = false;
#pragma unroll
      for (int c = 0; c < per_lane; ++c) {
        real wanted[num_states];
#pragma unroll
        for (int i = 0; i < num_states; ++i) {
          real change = constant(0);
#pragma unroll
          for (int j = 0; j < num_states; ++j)
            if (shift[j][c] != constant(0))
              change = multiply_add(before[i * num_states + j][c], shift[j][c], change);
          wanted[i] = all[k].wanted[i][c] + (finite(change) ? change : constant(0));
        }
        real far = constant(0);
#pragma unroll
        for (int n = 0; n < num_states; ++n) {
          const real own = distance(all[k].start[n][c], wanted[n], all[k].product[entries][c]);
          far = own > far ? own : far;
        }
        const bool moves = far > constant(1);  // all states of a channel together
#pragma unroll
        for (int n = 0; n < num_states; ++n) {
          shift[n][c] = moves ? wanted[n] - all[k].start[n][c] : constant(0);
          if (moves) b.write_one(b.s.starts, w, n, c, wanted[n]);
        }
#pragma unroll
        for (int e = 0; e < entries; ++e) before[e][c] = all[k].product[e][c];
        furthest = far > furthest ? far : furthest;
        moved |= moves;
      }
      const unsigned any = __ballot_sync(~0u, moved);
      if (lane() == 0) __stcg(b.moved(w), any != 0 ? 1 : 0);
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) all[k] = next[k];
  }
  __syncwarp();
  return most_of_lanes(furthest);
}

// The first segment from `w` on that must run when one warp runs what is left, or `segments`; `state`
// is the exact end of the one before, and becomes that of the one before the result.
PARARNN_FUNCTION int next_moved(const Boundaries& b, int w, real (&state)[num_states][per_lane]) {
  for (; w < b.s.segments; ++w) {
    if (__ldcg(b.moved(w)) || distance_at(b, w, state) > constant(1)) return w;
    b.read(b.s.ends, w, state);
  }
  return w;
}

// Where the segments on both sides have arrived, the later one measures how far the start is from where
// it belongs.
PARARNN_FUNCTION void measure(const Boundaries& b, int own) {
  const int segments = (int)b.s.segments, w = own + lane();  // lanes 0 and 1: its start, its end
  unsigned met = 0;
  if (lane() < 2 && w > 0 && w < segments) met = atomicAdd(b.s.met + b.column * segments + w, 1u) % 2;
  const unsigned second = __ballot_sync(~0u, met);
  if (second == 0) return;
  __threadfence();
  real far = constant(0);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (!(second >> side & 1)) continue;
    real before[num_states][per_lane];
    b.read(b.s.ends, own + side - 1, before);
    const real own_far = distance_at(b, own + side, before);
    far = own_far > far ? own_far : far;
  }
  // Numbers that are not negative are in the order of their bits.
  if (lane() == 0 && far > constant(1)) atomicMax(b.s.far + b.column, __float_as_uint((float)far));
}

// All segments of a tile arrive; true for the last one.
PARARNN_FUNCTION bool arrives_last(const Boundaries& b, int own, int round) {
  __threadfence();
  __syncwarp();
  measure(b, own);
  unsigned before = 0;
  if (lane() == 0) {
    __threadfence();
    before = atomicAdd(b.s.arrived + b.column, 1u);
  }
  before = __shfl_sync(~0u, before, 0);
  const bool last = before == (unsigned)b.s.segments * (round + 1) - 1;
  if (last) __threadfence();
  return last;
}

PARARNN_FUNCTION void give_verdict(const Boundaries& b, int round, Verdict verdict) {
  __threadfence();
  __syncwarp();
  if (lane() == 0) atomicExch(b.s.verdict + b.column, (round + 1) * 2u + verdict);
}

PARARNN_FUNCTION Verdict await_verdict(const Boundaries& b, int round) {
  unsigned word = 0;
  if (lane() == 0) {
    const volatile unsigned* place = b.s.verdict + b.column;
    for (word = *place; word / 2 != round + 1u; word = *place) __nanosleep(40);
  }
  word = __shfl_sync(~0u, word, 0);
  __threadfence();
  return (Verdict)(word % 2);
}

// Newton goes on while a sweep brings the starts this much nearer.
constexpr real enough_progress = 0.5;

// The last one to arrive decides. `alone`: what is left is for this warp.
PARARNN_FUNCTION Verdict decide(const Pass& pass, const Boundaries& b, int round, bool& alone) {
  scalar* distances = b.s.distances + b.column;
  const real before = round > 0 ? __ldcg(distances) : constant(INFINITY);
  const bool fits = __ldcg(b.s.far + b.column) == 0;
  __syncwarp();
  const real far = fits ? constant(0) : move_starts(b);
  if (lane() == 0) {
    __stcg(distances, far);
    __stcg(b.s.far + b.column, 0u);
  }
  alone = far > constant(1) && !(far <= enough_progress * before);
  const Verdict verdict = far > constant(1) && !alone ? again : settled;
  if (verdict == settled) pass.report(round + 1 + alone, round > 0 || alone);
  return verdict;
}

PARARNN_FUNCTION void run_newton(const NewtonProblem& p) {
  __shared__ __align__(16) char memory[Pass::bytes];
  const Shooting& s = p.shooting;
  const int segments = (int)s.segments, size = (int)s.size, length = (int)p.pass.in.length;
  const int own = blockIdx.x % segments;
  const Place at(blockIdx.x / segments);
  const Weights weights(p.pass.in, at);
  const Pass pass(p.pass, at, weights, memory);
  const Boundaries b(s, at, blockIdx.x / segments);
  int w = own, burn_in = min((int)s.burn_in, own * size);
  real state[num_states][per_lane];
  if (burn_in == own * size) pass.origin(state);
  else clear(state);
  bool runs = true, alone = false;
  for (int round = 0;; ++round) {
    if (runs) {
      Linear linear;
      const int first = w * size;
      const Span span{first - burn_in, first, min(first + size, length)};
      pass.sweep(span, state, linear, at.row * segments + w);
      if (round == 0) b.write(s.starts, w, linear.start);
      b.write(s.ends, w, state);
      b.write(s.products, w, linear.product);
      burn_in = 0;
    }
    if (alone) {
      w = next_moved(b, w + 1, state);
    } else {
      const bool last = arrives_last(b, own, round);
      const Verdict verdict = last ? decide(pass, b, round, alone) : await_verdict(b, round);
      if (last) give_verdict(b, round, verdict);
      if (verdict == settled && !alone) return;
      if (alone) {  // the first segment that has moved starts where the exact one before it ends
        for (w = 1; !__ldcg(b.moved(w)); ++w) {}
        b.read(s.starts, w, state);
      } else {
        runs = __ldcg(b.moved(own));
        if (runs) b.read(s.starts, own, state);
      }
    }
    if (alone) {
      if (w == segments) return;
      runs = true;
    }
  }
}

}  // namespace pararnn

extern "C" __global__ void __launch_bounds__(32, 10)
run(const __grid_constant__ pararnn::NewtonProblem problem) {
  pararnn::run_newton(problem);
}
