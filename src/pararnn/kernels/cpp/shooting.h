// Segments of time and the boundaries between them: what each starts from, what it ends at, how the end
// depends on the start, and Newton's update of the starts.
#pragma once
#include "spans.h"
#include "../common/acceptance.h"
#include "../common/jacobian.h"

namespace pararnn {

// What a start may be away from where it belongs, over the largest state of the segment before it: two units, as any
// step of a loop is rounded by. And so much may what the segment's first step makes of it be: where that expands, two
// units before it are more than the contract's eight after it. (In float64 `unit` is a little less than an epsilon:
// twice that would leave out two epsilons.)
constexpr scalar allowance = wide ? 4.5e-16 : 2 * unit;

// What observes a sweep, for every chain of a task: the largest states (adjoints) on the way.
struct Sizes {
  Chains<num_states> size = {};

  void forget(int chain) { size[chain] = {}; }
  void note(int chain, const real* state) {
    for (int n = 0; n < num_states; ++n)
      size[chain].items[n] = largest(size[chain].items[n], abs(state[n]));
  }
};

// A guess: what the segment starts from.
struct Guess : Sizes {
  static constexpr bool burn_in = true, jacobians = false;
  Chains<num_states> start;

  void begin(int chains, const Chains<num_states>& state) { std::copy_n(state, chains, start); }
};

// The product of Jacobians over a segment: how its result depends on what it starts from.
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
    const Many<entries> before = product[chain];
    multiply(step, before.items, product[chain].items);
  }
  void follow_back(int chain, const real* step) {
    real transposed[entries];
    transpose(step, transposed);
    follow(chain, transposed);
  }
};

// `exact`: any difference is too far.
template <bool exact> real over_allowed(real apart, real size) {
  const real far = apart / largest(constant(smallest), constant(allowance) * size);
  const real most = select(far < constant(farthest), far, constant(farthest));
  return exact ? select(apart == real{}, real{}, largest(most, constant(not_to_the_bit))) : most;
}

// How far a segment starts from where it belongs, over what it may: above 1 is too far. `sizes`: what its
// states are measured by. What its first step makes of the difference counts as well; one that jumps
// is to take just what the segment before it has ended with.
template <class Pass>
real distance(const Pass& pass, const Tile& tile, int64_t first, int v, int channels,
              const Many<num_states>& start, const Many<num_states>& wanted,
              const Many<num_states>& sizes) {
  real apart[num_states], after[num_states] = {}, next[num_states] = {}, far = {};
  for (int n = 0; n < num_states; ++n) {
    const real a = start.items[n], b = wanted.items[n];
    apart[n] = select((a == b) | (isnan(a) & isnan(b)), real{}, abs(a - b));
  }
  pass.first_step(tile, first, v, channels, wanted.items, apart, after, next);
  for (int n = 0; n < num_states; ++n) {
    const real size = select(sizes.items[n] < constant(infinity), sizes.items[n], real{});
    far = largest(far, over_allowed<Pass::exact>(apart[n], largest(size, abs(wanted.items[n]))));
    far = largest(far, over_allowed<Pass::exact>(after[n], largest(size, abs(next[n]))));
  }
  return far;
}

inline scalar most_of_lanes(real x) {
  scalar most = x[0];
  for (int i = 1; i < lanes; ++i) most = std::max(most, x[i]);
  return most;
}

struct Shooting : ShootingWords {
  template <int items>
  scalar* place(scalar* array, const Tile& tile, int64_t w, int v) const {
    return array + (tile.row * segments + w) * items * tile.problem.width() + tile.offset() + v * lanes;
  }
  template <int items>
  Many<items> read(scalar* array, const Tile& tile, int64_t w, int v, int channels) const {
    const scalar* from = place<items>(array, tile, w, v);
    Many<items> x;
    for (int i = 0; i < items; ++i) x.items[i] = load(from + i * tile.problem.width(), channels);
    return x;
  }
  template <int items>
  void write_vector(scalar* array, const Tile& tile, int64_t w, int v, int channels,
                    const Many<items>& x) const {
    scalar* to = place<items>(array, tile, w, v);
    for (int i = 0; i < items; ++i) store(to + i * tile.problem.width(), x.items[i], channels);
  }
  template <int items>
  void write(scalar* array, const Tile& tile, int64_t w, const Many<items>* x) const {
    tile.for_each_vector([&](int v, int channels) {
      write_vector(array, tile, w, v, channels, x[v]);
    });
  }
  void read_states(scalar* array, const Tile& tile, int64_t w, Many<num_states>* x) const {
    tile.for_each_vector([&](int v, int channels) {
      x[v] = read<num_states>(array, tile, w, v, channels);
    });
  }
};

// How far the start of segment w is from `before`, where the one before it ends.
template <class Pass>
scalar distance_at(const Pass& pass, const Shooting& s, const Tile& tile, int64_t w,
                   const Many<num_states>* before) {
  real far = {};
  tile.for_each_vector([&](int v, int channels) {
    const Many<num_states> start = s.read<num_states>(s.starts, tile, w, v, channels);
    const Many<num_states> sizes = s.read<num_states>(s.sizes, tile, w - 1, v, channels);
    far = largest(far, distance(pass, tile, w * s.size, v, channels, start, before[v], sizes));
  });
  return most_of_lanes(far);
}

// Compares the end of every segment with the start of the next, and moves starts that are too far away:
// by what they are off, and by what the move of the start before makes of the end (Newton's update;
// what overflows is left out). `moved`, by segment, says which. Returns the largest distance, over what
// is allowed.
template <class Pass>
scalar move_starts(const Pass& pass, const Shooting& s, const Tile& tile, char* moved) {
  real furthest = {};
  std::fill(moved, moved + s.segments, 0);
  tile.for_each_vector([&](int v, int channels) {
    Many<num_states> shift = {}, before_sizes = {};
    for (int64_t w = 1; w < s.segments; ++w) {
      Many<num_states> wanted = s.read<num_states>(s.ends, tile, w - 1, v, channels);
      Many<num_states> start = s.read<num_states>(s.starts, tile, w, v, channels);
      Many<num_states> sizes = s.read<num_states>(s.sizes, tile, w - 1, v, channels);
      const Many<entries> before = s.read<entries>(s.products, tile, w - 1, v, channels);
      pass_on_sizes(before.items, before_sizes.items, sizes.items);  // nothing while products are zero
      before_sizes = sizes;
      for (int i = 0; i < num_states; ++i) {
        real change = {};
        for (int j = 0; j < num_states; ++j) {
          const real x = shift.items[j];
          change = select(x != constant(0),
                          multiply_add(before.items[i * num_states + j], x, change), change);
        }
        wanted.items[i] += select(abs(change) < constant(infinity), change, real{});
      }
      const real far = distance(pass, tile, w * s.size, v, channels, start, wanted, sizes);
      const mask moves = far > constant(1);  // all states of a channel together
      for (int n = 0; n < num_states; ++n) {
        shift.items[n] = select(moves, wanted.items[n] - start.items[n], real{});
        start.items[n] = select(moves, wanted.items[n], start.items[n]);
      }
      furthest = largest(furthest, far);
      if (!(most_of_lanes(far) > 1)) continue;
      moved[w] = 1;
      s.write_vector(s.starts, tile, w, v, channels, start);
    }
  });
  return most_of_lanes(furthest);
}

}  // namespace pararnn
