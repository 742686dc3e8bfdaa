// Mending: where only few channels of a segment start from elsewhere, each of them runs again on its
// own, by the whole warp with lanes over time. The lanes' starts are found by Newton's method too: lane
// k is exact after k rounds at most, and a channel that remembers needs two or three.
#pragma once
#include "passes.h"
#include "boundaries.h"

namespace pararnn {

using Strand = Pass::Strand;

// Steps of a lane: as many as fit into the memory of the ring, which is free.
constexpr int fitting_steps = Pass::bytes / (lanes * Strand::words * (int)sizeof(real));
constexpr int strand_steps = fitting_steps < 32 ? at_least_1(fitting_steps) : 32;

// What mending one channel takes, in steps of a warp.
PARARNN_FUNCTION int mending_cost(int length) {
  const int each = min(strand_steps, (length + lanes - 1) / lanes);
  const int windows = (length + lanes * strand_steps - 1) / (lanes * strand_steps);
  return windows * (3 * (each + 8) + 16);
}

PARARNN_FUNCTION bool worth_mending(int count, int length) {
  return !events && count * mending_cost(length) < length + 40;
}

// Of what a segment's start may be away, what a lane's may: each gap, and what all of them add up to where a
// channel does not forget. Gaps that fit do not add up where a lane makes more than `bridged_gain` of one.
constexpr real share_of_gap = wide || same<io, float>::value ? 2 * unit / allowance : constant(1);
constexpr real share_of_sum = 4 * share_of_gap;

// The largest states (adjoints) before each lane: those of the lanes before it, and `first`, those before
// all of them.
PARARNN_FUNCTION void sizes_before(const real (&product)[kept], const real (&first)[num_states],
                                   real (&sizes)[num_states]) {
#pragma unroll
  for (int n = 0; n < num_states; ++n) {
    real most = size_of(product, n);
#pragma unroll
    for (int by = 1; by < lanes; by *= 2) most = largest(most, __shfl_up_sync(~0u, most, by, lanes));
    const real before = __shfl_up_sync(~0u, most, 1, lanes);
    sizes[n] = lane() > 0 ? largest(before, first[n]) : first[n];
  }
}

// Moves the lanes' starts by Newton's update; false where all fit already. `exists`: the lane has steps.
// `first`: the sizes before all lanes.
PARARNN_FUNCTION bool move_lanes(real (&start)[num_states], const real (&end)[num_states],
                                 const real (&product)[kept], const real (&first)[num_states],
                                 bool exists) {
  real before_end[num_states], before[kept], sizes[num_states];
  from_lane_before(end, 1, lanes, before_end);
  from_lane_before(product, 1, lanes, before);
  sizes_before(product, first, sizes);
  const real gain = gain_of(product, sizes);
  const bool known = lane() == 0 || !exists;
  const bool meets = known || distance(start, before_end, gain, sizes) <= share_of_gap;
  Affine own;
  if (lane() > 0) {
#pragma unroll
    for (int e = 0; e < entries; ++e) own.a[e] = before[e];
    // As in newton_update: a gap that fits is none where lanes expand.
#pragma unroll
    for (int n = 0; n < num_states; ++n)
      own.b[n] = known || (meets && gain > bridged_gain) ? constant(0) : before_end[n] - start[n];
  }
  scan_lanes(own, lanes);
  const bool fits = meets && (known || !too_far(start, own.b, gain, sizes, share_of_sum));
  if (__all_sync(~0u, fits)) return false;
  real shift[num_states], wanted[num_states];
  from_lane_before(own.b, 1, lanes, shift);
  newton_start(before_end, before, shift, wanted);
#pragma unroll
  for (int n = 0; n < num_states; ++n)
    if (lane() > 0) start[n] = wanted[n];
  return true;
}

// What the entries of |a| |b| are, at most those of |a b|.
template <int count>
PARARNN_FUNCTION void sizes_of_product(const real (&a)[entries], const real (&b)[count],
                                       real (&out)[entries]) {
#pragma unroll
  for (int i = 0; i < num_states; ++i)
#pragma unroll
    for (int j = 0; j < num_states; ++j) {
      real sum = constant(0);
#pragma unroll
      for (int k = 0; k < num_states; ++k)
        sum = multiply_add(abs(a[i * num_states + k]), abs(b[k * num_states + j]), sum);
      out[i * num_states + j] = sum;
    }
}

// Appends what the lanes have done, one after the other, to `product`.
PARARNN_FUNCTION void append(real (&product)[kept], const real (&lane_product)[kept]) {
  Affine own;
#pragma unroll
  for (int e = 0; e < entries; ++e) own.a[e] = lane_product[e];
  scan_lanes(own, lanes);
  real before[entries], gains[entries], reach[entries], whole[entries];
  from_lane_before(own.a, 1, lanes, before);
#pragma unroll
  for (int e = 0; e < entries; ++e) {
    if (lane() == 0) before[e] = constant(e % (num_states + 1) == 0);
    gains[e] = lane_product[gains_at + e];
  }
  sizes_of_product(gains, before, reach);
#pragma unroll
  for (int e = 0; e < entries; ++e) reach[e] = most_of_lanes(reach[e]);
  sizes_of_product(reach, product, whole);
  real sizes[num_states], step[entries];
#pragma unroll
  for (int n = 0; n < num_states; ++n) sizes[n] = most_of_lanes(size_of(lane_product, n));
  note_sizes(product, sizes);
#pragma unroll
  for (int e = 0; e < entries; ++e) step[e] = __shfl_sync(~0u, own.a[e], lanes - 1);
  multiply<false>(step, product);
#pragma unroll
  for (int e = 0; e < entries; ++e)
    product[gains_at + e] = largest(product[gains_at + e], whole[e]);
}

// What step k of the lane takes.
PARARNN_FUNCTION void take(const real* inputs, int k, real (&x)[Strand::words]) {
#pragma unroll
  for (int i = 0; i < Strand::words; ++i) x[i] = inputs[(k * Strand::words + i) * lanes];
}

// Runs one channel of a span from `state`, which becomes the last one; `product` as Linear has it.
// `slot`: of the span's sums. `sizes`: of the states before it.
PARARNN_FUNCTION void mend(const Pass& pass, int channel, const Span& span, int64 slot,
                           const real (&sizes)[num_states], real (&state)[num_states],
                           real (&product)[kept]) {
  real* const inputs = reinterpret_cast<real*>(pass.memory) + lane();
  const Strand strand(pass, channel);
  typename Strand::Sums total;
  begin_product(product);
  for (int from = span.first; from < span.end; from += lanes * strand_steps) {
    const int window = min(span.end - from, lanes * strand_steps);
    const int each = (window + lanes - 1) / lanes, first = from + lane() * each;
    const int count = max(0, min(each, from + window - first));
    __syncwarp();
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      real own[Strand::words];
      strand.gather(first + k, own);
#pragma unroll
      for (int i = 0; i < Strand::words; ++i) inputs[(k * Strand::words + i) * lanes] = own[i];
    }
    real start[num_states], end[num_states], own_product[kept], first_sizes[num_states];
#pragma unroll
    for (int n = 0; n < num_states; ++n) {
      start[n] = state[n];
      first_sizes[n] = largest(sizes[n], size_of(product, n));
    }
    if (lane() > 0 && count > 0) strand.guess(first, start);
    __syncwarp();  // before the lanes write what others have guessed from
    typename Strand::Sums sums;
    do {
#pragma unroll
      for (int n = 0; n < num_states; ++n) end[n] = start[n];
      begin_product(own_product);
      sums.clear();
      real own[Strand::words], next[Strand::words];
      take(inputs, 0, own);
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        take(inputs, min(k + 1, count - 1), next);  // while this step runs
        strand.step(first + k, own, end, own_product, sums);
#pragma unroll
        for (int i = 0; i < Strand::words; ++i) own[i] = next[i];
      }
    } while (move_lanes(start, end, own_product, first_sizes, count > 0));
    total.add(sums);
    append(product, own_product);
#pragma unroll
    for (int n = 0; n < num_states; ++n)
      state[n] = __shfl_sync(~0u, end[n], (window - 1) / each);
  }
  strand.finish(span, slot, state, total);
  __syncwarp();
}

}  // namespace pararnn
