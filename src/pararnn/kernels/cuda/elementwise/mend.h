// Mending: if only few channels of a segment move, each of them runs again alone, by the whole warp with
// lanes over time. Newton finds the lanes' starts too: lane k is exact after k rounds at most, and a channel
// that remembers needs two or three.
#pragma once
#include "acceptance.h"
#include "passes.h"

namespace pararnn {

using ChannelSteps = Pass::ChannelSteps;
constexpr int step_words = numbers_in<ChannelSteps::Inputs>;

// Steps of a lane: as many as fit in the ring's memory, which is free.
constexpr int fitting_steps = Pass::bytes / (lanes * step_words * (int)sizeof(real));
constexpr int lane_steps = fitting_steps < 32 ? at_least_1(fitting_steps) : 32;

// Cost of mending one channel, in steps of a warp, as an estimate: three rounds, each with 8 steps' time to
// find the starts, and 16 steps' time to append the lanes' results.
PARARNN_FUNCTION int mending_cost(int length) {
  const int of_lane = min(lane_steps, (length + lanes - 1) / lanes);
  const int windows = (length + lanes * lane_steps - 1) / (lanes * lane_steps);
  return windows * (3 * (of_lane + 8) + 16);
}

PARARNN_FUNCTION bool worth_mending(int count, int length) {
  return !events && count * mending_cost(length) < length + 40;
}

// Returns the largest states (adjoints) before each lane: those of the lanes before it, and `first`, those
// before all lanes.
PARARNN_FUNCTION State sizes_before(const Product& product, const State& first) {
  return vec<num_states>([&](int n) {
    real most = product.size_of(n);
#pragma unroll
    for (int by = 1; by < lanes; by *= 2) most = largest(most, __shfl_up_sync(~0u, most, by, lanes));
    const real previous = __shfl_up_sync(~0u, most, 1, lanes);
    return lane() > 0 ? largest(previous, first[n]) : first[n];
  });
}

// Newton's update of the lanes' starts; false if all fit already. `exists`: true if the lane has steps.
// `first`: the sizes before all lanes.
PARARNN_FUNCTION bool move_lanes(State& start, const State& end, const Product& product,
                                 const State& first, bool exists) {
  const State end_before = from_lane_before(end);
  const Matrix previous = from_lane_before(product.a);
  const State sizes = sizes_before(product, first);
  const real gain = gain_of(product, sizes);
  const bool known = lane() == 0 || !exists;
  const bool meets = known || distance(start, end_before, gain, sizes) <= lane_share;
  Affine own;
  own.begin();
  if (lane() > 0) {
    own.a = previous;
    // As in newton_update: a gap that fits counts as zero in lanes that expand.
    each<num_states>([&](int n) {
      own.b[n] = known || (meets && gain > bridge_gain) ? constant(0) : end_before[n] - start[n];
    });
  }
  scan_lanes(own);
  const bool fits = meets && (known || !exceeds(start, own.b, gain, sizes, lane_share_of_sum));
  if (__all_sync(~0u, fits)) return false;
  const State wanted = newton_start(end_before, previous, from_lane_before(own.b));
  if (lane() > 0) start = wanted;
  return true;
}

// Returns |a| |b|, a bound on |a b|.
PARARNN_FUNCTION Matrix sizes_of_product(const Matrix& a, const Matrix& b) {
  const auto size = [](const Matrix& x) { return vec<entries>([&](int e) { return abs(x[e]); }); };
  return product_of(size(a), size(b));
}

// Appends the lanes' products, in order, to `product`.
PARARNN_FUNCTION void append(Product& product, const Product& of_lane) {
  Affine own;
  own.begin();
  own.a = of_lane.a;
  scan_lanes(own);
  Matrix previous = from_lane_before(own.a);
  if (lane() == 0) previous = identity();
  Matrix reach = sizes_of_product(of_lane.peak, previous);
  each<entries>([&](int e) { reach[e] = max_of_lanes(reach[e]); });
  const Matrix whole = sizes_of_product(reach, product.a);
  product.note(vec<num_states>([&](int n) { return max_of_lanes(of_lane.size_of(n)); }));
  product.follow(vec<entries>([&](int e) { return __shfl_sync(~0u, own.a[e], lanes - 1); }));
  each<entries>([&](int e) { product.peak[e] = largest(product.peak[e], whole[e]); });
}

// Inputs of a lane's steps, in shared memory.
struct LaneInputs {
  real* const words;

  PARARNN_FUNCTION void put(int k, const ChannelSteps::Inputs& x) const {
    each<step_words>([&](int i) { words[(k * step_words + i) * lanes] = numbers_of(x)[i]; });
  }
  PARARNN_FUNCTION ChannelSteps::Inputs get(int k) const {
    ChannelSteps::Inputs x;
    each<step_words>([&](int i) { numbers_of(x)[i] = words[(k * step_words + i) * lanes]; });
    return x;
  }
};

// Runs one channel of a span from `state`, which becomes its last state; `product` as in Linear. `slot`: of
// the span's sums. `sizes`: of the states before the span.
PARARNN_FUNCTION void mend(const Pass& pass, int channel, const Span& span, int64 slot,
                           const State& sizes, State& state, Product& product) {
  const LaneInputs inputs{reinterpret_cast<real*>(pass.memory) + lane()};
  const ChannelSteps steps_of_channel(pass, channel);
  ChannelSteps::Sums total;
  product.begin();
  for (int window_start = span.first; window_start < span.end; window_start += lanes * lane_steps) {
    const int window = min(span.end - window_start, lanes * lane_steps);
    const int most = (window + lanes - 1) / lanes, first = window_start + lane() * most;
    const int count = max(0, min(most, window_start + window - first));
    __syncwarp();
#pragma unroll 8
    for (int k = 0; k < count; ++k) inputs.put(k, steps_of_channel.gather(first + k));
    const State first_sizes =
        vec<num_states>([&](int n) { return largest(sizes[n], product.size_of(n)); });
    State start = state, end;
    if (lane() > 0 && count > 0) start = steps_of_channel.guess(first);
    __syncwarp();  // before lanes overwrite the states that others guess from
    Product of_lane;
    ChannelSteps::Sums sums;
    do {
      end = start;
      of_lane.begin();
      sums.clear();
      ChannelSteps::Inputs own = inputs.get(0);
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        const ChannelSteps::Inputs next = inputs.get(min(k + 1, count - 1));  // loads while this step runs
        steps_of_channel.step(first + k, own, end, of_lane, sums);
        own = next;
      }
    } while (move_lanes(start, end, of_lane, first_sizes, count > 0));
    total.add(sums);
    append(product, of_lane);
    state = vec<num_states>([&](int n) { return __shfl_sync(~0u, end[n], (window - 1) / most); });
  }
  steps_of_channel.finish(span, slot, state, total);
  __syncwarp();
}

}  // namespace pararnn
