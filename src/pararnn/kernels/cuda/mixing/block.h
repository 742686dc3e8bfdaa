// A block runs 8 columns of one head, or 4 where that keeps more multiprocessors busy. In the passes along time
// a column is a row of the batch. The units (channels) of a wide head are sliced over the blocks of a cluster.
// The warps share a block's units: a warp has some tiles of `units` units, or several warps have the same ones
// and split the sums of their products. A lane's numbers: for each tile, its columns of unit lane / 4, then of
// unit 8 + lane / 4 if the tile has 16.
//
// Needs, in addition to real.h and the emitted code: heads, head_width, slices (of a head), units (of a tile: 8
// or 16), warp_tiles, sides (columns of a lane: 1 or 2), per_lane (numbers of a lane), warps, splits (warps with
// the same tiles), register_fragments (of a warp's matrices), shared_matrices (true if shared memory has the
// others), helpers (warps that copy for the others, see ring.h), slots (of steps in shared memory), slot_bytes,
// chunk (bytes that may be copied at once), gate_gap (elements between gates, 0 if the launch says), whole (all
// columns of all blocks are rows), gives_sums (true if the forward pass gives those that the gradient reads), has_rests
// (true if it carries more than the states that it returns, at which these sums are), given (true if its steps start
// from given states), vectors (true if those of outer products are wanted), reverse, events,
// broadcast, arriving, weight_io, matrix_io, vector_io, and the parts of numbers in products (products.h).
#pragma once
#include "../../common/sizes.h"
#include "../tiles.h"
#include "../registers.h"

namespace pararnn {

constexpr int columns = 4 * sides, channels = heads * head_width;
constexpr int numbers_of_tile = units / 8 * sides;
constexpr int barrier_bytes = 16;
constexpr int param_slots = num_params > 0 ? num_params : 1, field_slots = num_fields > 0 ? num_fields : 1;
static_assert(per_lane == warp_tiles * numbers_of_tile);

// Waits for all warps that compute.
PARARNN_FUNCTION void meet_warps() { meet_threads<warps * lanes>(); }
PARARNN_FUNCTION int slice() { return slices > 1 ? blockIdx.x % slices : 0; }

constexpr int groups = warps / splits;  // of warps with the same tiles
PARARNN_FUNCTION int group_of(int warp) { return warp % groups; }
PARARNN_FUNCTION int split_of(int warp) { return warp / groups; }

PARARNN_FUNCTION constexpr int tile_of(int c) { return c / numbers_of_tile; }
constexpr int slice_units = groups * warp_tiles * units;
// The first unit of a warp's tile.
PARARNN_FUNCTION int first_unit(int tile) {
  return slice() * slice_units + (group_of(warp()) * warp_tiles + tile) * units;
}
// The half of a tile of 16 units that a lane's number is in.
PARARNN_FUNCTION constexpr int half_of(int c) { return c % numbers_of_tile / sides; }
// The unit of a row of the half of a tile, counted from the tile's first one. Where tiles have 16 units, the numbers of a
// lane in both halves are adjacent.
PARARNN_FUNCTION constexpr int unit_in_tile(int half, int row) { return units == 16 ? row * 2 + half : half * 8 + row; }
// The unit of a lane's number, counted from the warp's first one, and from the head's.
PARARNN_FUNCTION int own_unit_of(int c) { return tile_of(c) * units + unit_in_tile(half_of(c), lane() / 4); }
PARARNN_FUNCTION int unit_of(int c) { return first_unit(0) + own_unit_of(c); }
PARARNN_FUNCTION constexpr int side_of(int c) { return c % sides; }
PARARNN_FUNCTION int column_of_side(int side) { return lane() % 4 * sides + side; }

constexpr bool ragged = head_width != slices * slice_units;
PARARNN_FUNCTION bool exists(int c) { return !ragged || unit_of(c) < head_width; }
// Returns true if this lane stores the results of its number, which other splits have too.
PARARNN_FUNCTION bool stores(int c) { return exists(c) && (splits == 1 || split_of(warp()) == 0); }

using Numbers = real[per_lane];

template <class T> PARARNN_FUNCTION real load_or(const T* source, bool there, real otherwise) {
  return there ? widen(*source) : otherwise;
}

}  // namespace pararnn
