// Bridges: if a segment starts slightly off the end before it, its first steps run again from that end, and
// their results are blended into the existing ones. So every step is off by a fraction of the gap only, and
// no later step moves. The alternatives fail for gaps due to rounding: the gap of a whole segment is more
// than one step may be off, and a rerun would be rounded differently.
#pragma once
#include "passes.h"
#include "trajectory.h"

namespace pararnn {

// Bridges one channel, by one lane. `state`: the end of the segment before.
template <class AnyPass>
PARARNN_FUNCTION void bridge(const AnyPass& pass, int channel, int first,
                             State state) {
  using Steps = typename AnyPass::ChannelSteps;
  constexpr int at_once = 8;  // steps whose inputs load together
  const Steps steps(pass, channel);
  typename Steps::Sums sums;
  Product product;
  product.begin();
#pragma unroll 1
  for (int start = 0; start < bridge_steps; start += at_once) {
    typename Steps::Inputs inputs[at_once];
    State old[at_once];
    each<at_once>([&](int k) {
      inputs[k] = steps.gather(first + start + k);
      old[k] = steps.guess(first + start + k + 1);
    });
    each<at_once>([&](int k) {
      steps.step(first + start + k, inputs[k], state, product, sums);
      const real weight = constant(bridge_steps - 1 - start - k) / constant(bridge_steps);
      steps.put(first + start + k, vec<num_states>([&](int n) {
        return multiply_add(weight, state[n] - old[k][n], old[k][n]);
      }));
    });
  }
}

// Bridges some channels of a tile, a lane each.
template <class AnyPass>
PARARNN_FUNCTION void bridge_channels(const AnyPass& pass, const Tile& tile, const Channels& some,
                                      int first, const End& previous) {
  const int count = some.count();
  for (int done = 0; done < count; done += lanes) {
    const int index = some.nth(min(done + lane(), count - 1));
    const State state = channel_states(previous.state, index);
    if (done + lane() < count) bridge(pass, tile.first + index, first, state);
  }
}

}  // namespace pararnn
