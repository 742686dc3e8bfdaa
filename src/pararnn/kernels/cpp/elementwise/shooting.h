// Segments of time: what each starts from, its end, the Jacobian of its end by its start, and Newton's update
// of the starts.
#pragma once
#include "spans.h"
#include "../../common/elementwise/acceptance.h"
#include "../../common/elementwise/jacobian.h"

namespace pararnn {

// Tolerance of a start, relative to the largest state of the segment before: two units, the rounding of one
// step of a loop. The effect on the segment's first step has the same tolerance: if that step expands, two
// units before it exceed the contract's eight after it. (In float64 `unit` is slightly less than an epsilon;
// twice that would reject two epsilons.)
constexpr scalar allowance = wide ? 4.5e-16 : 2 * unit;

// Observer of a sweep: the largest states (adjoints) of every chain of a task.
struct Sizes {
  Chains<num_states> size = {};

  void forget(int chain) { size[chain] = {}; }
  void note(int chain, const real* state) {
    for (int n = 0; n < num_states; ++n)
      size[chain].items[n] = largest(size[chain].items[n], abs(state[n]));
  }
};

// Observer that also stores the guess: the state after the burn-in.
struct Guess : Sizes {
  static constexpr bool burn_in = true, jacobians = false;
  Chains<num_states> start;

  void begin(int chains, const Chains<num_states>& state) { std::copy_n(state, chains, start); }
};

// Observer that also accumulates the product of Jacobians: the derivative of the segment's end by its start.
struct Linear : Sizes {
  static constexpr bool burn_in = false, jacobians = true;
  Chains<entries> product;

  void begin(int chains, const Chains<num_states>&) {
    for (int i = 0; i < chains; ++i) set_identity(product[i].items);
  }
  void forget(int chain) {
    Sizes::forget(chain);
    product[chain] = {};
  }
  void follow(int chain, const real* step) {
    const Items<entries> previous = product[chain];
    multiply(step, previous.items, product[chain].items);
  }
  void follow_back(int chain, const real* step) {
    real transposed[entries];
    transpose(step, transposed);
    follow(chain, transposed);
  }
};

// Returns a difference in tolerances. `exact`: any difference is too far.
template <bool exact> real over_allowed(real difference, real size) {
  const real far = difference / largest(constant(smallest), constant(allowance) * size);
  const real ratio = select(far < constant(max_distance), far, constant(max_distance));
  return exact ? select(difference == real{}, real{}, largest(ratio, constant(not_to_the_bit))) : ratio;
}

// Returns how far a segment's start is from `wanted`, in tolerances: above 1 is too far. `sizes`: the states
// that the tolerance is relative to. The effect of the difference on the first step counts too. A step that
// jumps must start from exactly `wanted`.
template <class Pass>
real distance(const Pass& pass, const Tile& tile, int64_t first, int v, int channels,
              const Items<num_states>& start, const Items<num_states>& wanted,
              const Items<num_states>& sizes) {
  real difference[num_states], effect[num_states] = {}, next[num_states] = {}, far = {};
  for (int n = 0; n < num_states; ++n) {
    const real a = start.items[n], b = wanted.items[n];
    difference[n] = select((a == b) | (isnan(a) & isnan(b)), real{}, abs(a - b));
  }
  pass.first_step(tile, first, v, channels, wanted.items, difference, effect, next);
  for (int n = 0; n < num_states; ++n) {
    const real size = select(sizes.items[n] < constant(infinity), sizes.items[n], real{});
    far = largest(far, over_allowed<Pass::exact>(difference[n], largest(size, abs(wanted.items[n]))));
    far = largest(far, over_allowed<Pass::exact>(effect[n], largest(size, abs(next[n]))));
  }
  return far;
}

inline scalar max_of_lanes(real x) {
  scalar result = x[0];
  for (int i = 1; i < lanes; ++i) result = std::max(result, x[i]);
  return result;
}

struct Shooting : ShootingWords {
  template <int items>
  scalar* address(scalar* array, const Tile& tile, int64_t w, int v) const {
    return array + (tile.row * segments + w) * items * tile.problem.width() + tile.offset() + v * lanes;
  }
  template <int items>
  Items<items> read(scalar* array, const Tile& tile, int64_t w, int v, int channels) const {
    const scalar* source = address<items>(array, tile, w, v);
    Items<items> x;
    for (int i = 0; i < items; ++i) x.items[i] = load(source + i * tile.problem.width(), channels);
    return x;
  }
  template <int items>
  void write_vector(scalar* array, const Tile& tile, int64_t w, int v, int channels,
                    const Items<items>& x) const {
    scalar* target = address<items>(array, tile, w, v);
    for (int i = 0; i < items; ++i) store(target + i * tile.problem.width(), x.items[i], channels);
  }
  template <int items>
  void write(scalar* array, const Tile& tile, int64_t w, const Items<items>* x) const {
    tile.for_each_vector([&](int v, int channels) {
      write_vector(array, tile, w, v, channels, x[v]);
    });
  }
  void read_states(scalar* array, const Tile& tile, int64_t w, Items<num_states>* x) const {
    tile.for_each_vector([&](int v, int channels) {
      x[v] = read<num_states>(array, tile, w, v, channels);
    });
  }
};

// Returns how far the start of segment w is from `previous`, the end of the segment before it.
template <class Pass>
scalar distance_at(const Pass& pass, const Shooting& s, const Tile& tile, int64_t w,
                   const Items<num_states>* previous) {
  real far = {};
  tile.for_each_vector([&](int v, int channels) {
    const Items<num_states> start = s.read<num_states>(s.starts, tile, w, v, channels);
    const Items<num_states> sizes = s.read<num_states>(s.sizes, tile, w - 1, v, channels);
    far = largest(far, distance(pass, tile, w * s.size, v, channels, start, previous[v], sizes));
  });
  return max_of_lanes(far);
}

// Newton's update: moves every start that is too far from the end before it, by the difference and by the
// effect of the previous start's move on that end (an effect that overflows is left out). `moves`, by
// segment: true if its start moved. Returns the largest distance, in tolerances.
template <class Pass>
scalar move_starts(const Pass& pass, const Shooting& s, const Tile& tile, char* moves) {
  real furthest = {};
  std::fill(moves, moves + s.segments, 0);
  tile.for_each_vector([&](int v, int channels) {
    Items<num_states> shift = {}, previous_sizes = {};
    for (int64_t w = 1; w < s.segments; ++w) {
      Items<num_states> wanted = s.read<num_states>(s.ends, tile, w - 1, v, channels);
      Items<num_states> start = s.read<num_states>(s.starts, tile, w, v, channels);
      Items<num_states> sizes = s.read<num_states>(s.sizes, tile, w - 1, v, channels);
      const Items<entries> product = s.read<entries>(s.products, tile, w - 1, v, channels);
      pass_on_sizes(product.items, previous_sizes.items, sizes.items);  // no-op while products are zero
      previous_sizes = sizes;
      for (int i = 0; i < num_states; ++i) {
        real change = {};
        for (int j = 0; j < num_states; ++j) {
          const real x = shift.items[j];
          change = select(x != constant(0),
                          multiply_add(product.items[i * num_states + j], x, change), change);
        }
        wanted.items[i] += select(abs(change) < constant(infinity), change, real{});
      }
      const real far = distance(pass, tile, w * s.size, v, channels, start, wanted, sizes);
      const mask too_far = far > constant(1);  // all states of a channel together
      for (int n = 0; n < num_states; ++n) {
        shift.items[n] = select(too_far, wanted.items[n] - start.items[n], real{});
        start.items[n] = select(too_far, wanted.items[n], start.items[n]);
      }
      furthest = largest(furthest, far);
      if (!(max_of_lanes(far) > 1)) continue;
      moves[w] = 1;
      s.write_vector(s.starts, tile, w, v, channels, start);
    }
  });
  return max_of_lanes(furthest);
}

}  // namespace pararnn
