// The tile of a warp, and copies of its channels' values between memory and registers (item, channel of the
// lane).
#pragma once
#include "inputs.h"

namespace pararnn {

constexpr int tiles = (channels + tile_channels - 1) / tile_channels;
constexpr bool ragged = channels % tile_channels != 0;

// The row and the channels of a warp, which is a block: from `first` on. The lane's channels begin at
// `channel`; `active` of per_lane exist.
struct Tile {
  int64 row;
  int first, channel, active;

  // `column`: index of the tile among those of all rows.
  PARARNN_FUNCTION explicit Tile(int64 column) {
    row = column / tiles;
    first = column % tiles * tile_channels;
    channel = first + lane() * per_lane;
    active = ragged ? max(0, min(per_lane, channels - channel)) : per_lane;
  }
};

// Stores the lane's neighbouring channels. `paired`: all or none of them exist, aligned.
template <bool paired, class T>
PARARNN_FUNCTION void store(T* target, const real (&x)[per_lane], int active) {
  if constexpr (paired) {
    if (!ragged || active > 0) *reinterpret_cast<Pack<T, per_lane>*>(target) = packed<T>(x);
  } else {
    each<per_lane>([&](int c) {
      if (c < active) target[c] = narrow<T>(x[c]);
    });
  }
}

constexpr bool paired_channels = channels % per_lane == 0;

template <class T> PARARNN_FUNCTION void load(const T* source, real (&x)[per_lane], int active) {
  each<per_lane>([&](int c) { x[c] = c < active ? widen(source[c]) : constant(0); });
}

// Loads row `number` of each state's tensor, (sequence, channel); null is zero.
PARARNN_FUNCTION void load_states(real (&x)[num_states][per_lane], const scalar* const* source,
                                  int64 number, const Tile& tile) {
  each<num_states>([&](int n) {
    if (source[n] != nullptr) load(source[n] + number * channels + tile.channel, x[n], tile.active);
    else each<per_lane>([&](int c) { x[n][c] = constant(0); });
  });
}

PARARNN_FUNCTION void store_states(scalar* const* target, const real (&x)[num_states][per_lane],
                                   int64 number, const Tile& tile) {
  each<num_states>([&](int n) {
    if (target[n] != nullptr)
      store<paired_channels>(target[n] + number * channels + tile.channel, x[n], tile.active);
  });
}

PARARNN_FUNCTION void clear(real (&x)[num_states][per_lane]) {
  each<num_states>([&](int n) { each<per_lane>([&](int c) { x[n][c] = constant(0); }); });
}

}  // namespace pararnn
