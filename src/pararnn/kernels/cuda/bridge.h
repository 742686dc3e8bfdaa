// Bridges: where a segment starts a little off the end before it, its first steps run again from there, and
// what they make is faded into what they had made. So every step is off by a part of the gap only, and
// nothing else moves. Of gaps that rounding has made, a segment's worth of it is more than one step may be
// off, and a rerun would be rounded otherwise.
#pragma once
#include "boundaries.h"
#include "passes.h"

namespace pararnn {

// Bridges one channel, a lane alone; `state`: where the segment before it ends.
template <class AnyPass>
PARARNN_FUNCTION void bridge(const AnyPass& pass, int channel, int first,
                             real (&state)[num_states]) {
  using Strand = typename AnyPass::Strand;
  constexpr int at_once = 8;  // steps whose inputs are waited for together
  const Strand strand(pass, channel);
  typename Strand::Sums sums;
  real product[kept];
  begin_product(product);
#pragma unroll 1
  for (int from = 0; from < bridge_steps; from += at_once) {
    real inputs[at_once][Strand::words], old[at_once][num_states];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      strand.gather(first + from + k, inputs[k]);
      strand.guess(first + from + k + 1, old[k]);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      strand.step(first + from + k, inputs[k], state, product, sums);
      const real weight = constant(bridge_steps - 1 - from - k) / constant(bridge_steps);
      real faded[num_states];
#pragma unroll
      for (int n = 0; n < num_states; ++n)
        faded[n] = multiply_add(weight, state[n] - old[k][n], old[k][n]);
      strand.put(first + from + k, faded);
    }
  }
}

// Bridges some channels of a tile, a lane each.
template <class AnyPass>
PARARNN_FUNCTION void bridge_channels(const AnyPass& pass, const Place& at, const Channels& some,
                                      int first, const End& before) {
  const int count = some.count();
  for (int done = 0; done < count; done += lanes) {
    const int place = some.nth(min(done + lane(), count - 1));
    real state[num_states];
    of_channel(before.state, place, state);
    if (done + lane() < count) bridge(pass, at.first + place, first, state);
  }
}

}  // namespace pararnn
