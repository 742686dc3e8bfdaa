// The sequential solver: a task runs a tile of channels of one row from the first step to the last.
#pragma once
#include "backward.h"
#include "forward.h"

namespace pararnn {

inline Tiles tiles_for_threads(const Problem& p) {
  const int64_t vectors = Tiles::vectors_of(p), groups = p.rows * p.heads;
  const int64_t wanted = 4 * threads_for(p, p.rows * p.length * p.width());
  int64_t tiles = (vectors + max_vectors - 1) / max_vectors;
  if (groups > 0 && groups * tiles < wanted)
    tiles = std::max(tiles, std::min((wanted + groups - 1) / groups, vectors / min_vectors));
  return Tiles(p, tiles);
}

// Returns the number of spans of a row.
template <class Pass> int64_t run(const Pass& pass, const typename Pass::Launch&) {
  const Problem& p = pass.problem;
  const Tiles tiles = tiles_for_threads(p);
  const int64_t threads = threads_for(p, p.rows * p.length * p.width());
  run_tasks(tiles.count(), threads, p.openmp, [&](int64_t i) {
    const Tile tile = tiles[i];
    const Span all{0, 0, p.length};
    Chains<num_states> state = {};
    NoObserver no_observer;
    pass.sweep(tile, &all, One(), state, no_observer, &tile.row);
  });
  return 1;
}

}  // namespace pararnn

#include "entries.h"
