// The warp's place among all channels, and how values of its channels travel between registers, (item,
// channel of the lane), and memory.
#pragma once
#include "inputs.h"

namespace pararnn {

constexpr int tiles = (channels + tile - 1) / tile;
constexpr bool ragged = channels % tile != 0;

// The row and the channels of a warp, which is a block, and of the lane: `active` of per_lane exist.
struct Place {
  int64 row;
  int first, own, active;

  // `column`: the number of the tile among those of all rows.
  PARARNN_FUNCTION explicit Place(int64 column) {
    row = column / tiles;
    first = column % tiles * tile;
    own = first + lane() * per_lane;
    active = ragged ? max(0, min(per_lane, channels - own)) : per_lane;
  }
};

// Stores of the lane's neighbouring channels; `paired` says that all or none exist, aligned.
template <bool paired, class T>
PARARNN_FUNCTION void store(T* to, const real (&x)[per_lane], int active) {
  if constexpr (paired) {
    if (!ragged || active > 0) *reinterpret_cast<Pack<T, per_lane>*>(to) = packed<T>(x);
  } else {
    each<per_lane>([&](int c) {
      if (c < active) to[c] = narrow<T>(x[c]);
    });
  }
}

constexpr bool paired_channels = channels % per_lane == 0;

template <class T> PARARNN_FUNCTION void load(const T* from, real (&x)[per_lane], int active) {
  each<per_lane>([&](int c) { x[c] = c < active ? widen(from[c]) : constant(0); });
}

// Row `number` of a tensor a state, (sequence, channel); null is zero.
PARARNN_FUNCTION void load_states(real (&x)[num_states][per_lane], const scalar* const* from,
                                  int64 number, const Place& at) {
  each<num_states>([&](int n) {
    if (from[n] != nullptr) load(from[n] + number * channels + at.own, x[n], at.active);
    else each<per_lane>([&](int c) { x[n][c] = constant(0); });
  });
}

PARARNN_FUNCTION void store_states(scalar* const* to, const real (&x)[num_states][per_lane],
                                   int64 number, const Place& at) {
  each<num_states>([&](int n) {
    if (to[n] != nullptr)
      store<paired_channels>(to[n] + number * channels + at.own, x[n], at.active);
  });
}

PARARNN_FUNCTION void clear(real (&x)[num_states][per_lane]) {
  each<num_states>([&](int n) { each<per_lane>([&](int c) { x[n][c] = constant(0); }); });
}

}  // namespace pararnn
