// A block runs 8 columns (rows of the batch) of one head. Its warps share the head's units (channels): a warp
// has some tiles of `units` units. A lane's numbers: for each tile, two columns of unit lane / 4, then of unit 8
// + lane / 4 if the tile has 16.
//
// Needs, in addition to real.h and the emitted code: heads, head_width, units (of a tile: 8 or 16),
// warp_tiles, per_lane (numbers of a lane), warps, steps_ahead (of a ring), chunk (bytes that may be copied at
// once), reverse, events, broadcast, weight_io, matrix_io, and the parts of numbers in products (products.h).
#pragma once
#include "../../common/sizes.h"
#include "../matrix.h"
#include "../registers.h"

namespace pararnn {

constexpr int lanes = 32, columns = 8, channels = heads * head_width;
constexpr int numbers_of_tile = units / 4;
constexpr int param_slots = num_params > 0 ? num_params : 1, field_slots = num_fields > 0 ? num_fields : 1;
static_assert(per_lane == warp_tiles * numbers_of_tile);

template <bool b> struct Bool { static constexpr bool value = b; };

PARARNN_FUNCTION int lane() { return threadIdx.x % lanes; }
PARARNN_FUNCTION int warp() { return threadIdx.x / lanes; }

PARARNN_FUNCTION constexpr int tile_of(int c) { return c / numbers_of_tile; }
// The first unit of a warp's tile.
PARARNN_FUNCTION int first_unit(int tile) { return (warp() * warp_tiles + tile) * units; }
// The unit of a lane's number.
PARARNN_FUNCTION int unit_of(int c) {
  return first_unit(tile_of(c)) + c % numbers_of_tile / 2 * 8 + lane() / 4;
}
// The column of a lane's number: one of two, which `side` tells apart.
PARARNN_FUNCTION constexpr int side_of(int c) { return c % 2; }
PARARNN_FUNCTION int column_of_side(int side) { return lane() % 4 * 2 + side; }

constexpr bool ragged = head_width % units != 0 || head_width < warps * warp_tiles * units;
PARARNN_FUNCTION bool exists(int c) { return !ragged || unit_of(c) < head_width; }

using Numbers = real[per_lane];

template <class T> PARARNN_FUNCTION real load_or(const T* source, bool there, real otherwise) {
  return there ? widen(*source) : otherwise;
}

}  // namespace pararnn
