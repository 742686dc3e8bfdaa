// Bridges: where a segment starts a little off the end before it, its first steps run again from there, and
// what they make is faded into what they had made. So every step is off by a part of the gap only, and
// nothing else moves. Of gaps that rounding has made, a segment's worth of it is more than one step may be
// off, and a rerun would be rounded otherwise.
#pragma once
#include "passes.h"
#include "trajectory.h"

namespace pararnn {

// Bridges one channel, a lane alone; `state`: where the segment before it ends.
template <class AnyPass>
PARARNN_FUNCTION void bridge(const AnyPass& pass, int channel, int first,
                             State state) {
  using Steps = typename AnyPass::ChannelSteps;
  constexpr int at_once = 8;  // steps whose inputs are waited for together
  const Steps steps_of(pass, channel);
  typename Steps::Sums sums;
  Product product;
  product.begin();
#pragma unroll 1
  for (int from = 0; from < bridge_steps; from += at_once) {
    typename Steps::Inputs inputs[at_once];
    State old[at_once];
    each<at_once>([&](int k) {
      inputs[k] = steps_of.gather(first + from + k);
      old[k] = steps_of.guess(first + from + k + 1);
    });
    each<at_once>([&](int k) {
      steps_of.step(first + from + k, inputs[k], state, product, sums);
      const real weight = constant(bridge_steps - 1 - from - k) / constant(bridge_steps);
      steps_of.put(first + from + k, vec<num_states>([&](int n) {
        return multiply_add(weight, state[n] - old[k][n], old[k][n]);
      }));
    });
  }
}

// Bridges some channels of a tile, a lane each.
template <class AnyPass>
PARARNN_FUNCTION void bridge_channels(const AnyPass& pass, const Place& at, const Channels& some,
                                      int first, const End& before) {
  const int count = some.count();
  for (int done = 0; done < count; done += lanes) {
    const int place = some.nth(min(done + lane(), count - 1));
    const State state = of_channel(before.state, place);
    if (done + lane() < count) bridge(pass, at.first + place, first, state);
  }
}

}  // namespace pararnn
