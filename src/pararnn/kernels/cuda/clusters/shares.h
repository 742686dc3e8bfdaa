// The rows that a cluster runs, and the entries of values that its blocks have. The blocks of a cluster run
// `cluster_rows` rows of one head. The entries of a value are divided among them by tiles of 16 along its last axis, and
// those of a block among its threads: a warp has entries of one row, and a thread of all values with the same axes the
// same entries.
// Times are in the caller's order; l counts the steps of the recurrence.
//
// Needs, in addition to functions.h and the structs of launches: slices (blocks of a head), cluster_rows (8 or 4), warps,
// events (true if `seq` or `reset` is passed), and saved_numbers (of a step and head, which a forward pass leaves).
#pragma once
#include "../functions.h"
#include "../tiles.h"

namespace pararnn {

constexpr int threads = warps * lanes, tile = 16;
static_assert(warps % cluster_rows == 0);
constexpr int row_threads = threads / cluster_rows;  // of a row

// Waits for all blocks of the cluster, when their boxes are open, and after the last round.
PARARNN_FUNCTION void meet_slices() {
#if PARARNN_CLUSTER
  __syncwarp();
  arrive_in_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
}

// The head and the rows of a block, and the thread's row. Threads without a row read another one, and write nothing.
struct Place {
  const Inputs& in;
  const int slice, length;
  const int64 unit, head, first_row, input_row;

  PARARNN_FUNCTION explicit Place(const Inputs& in)
      : in(in), slice(blockIdx.x % slices), length((int)in.length), unit(blockIdx.x / slices), head(unit % in.heads),
        first_row(unit / in.heads * cluster_rows), input_row(min(first_row + warp() % cluster_rows, in.rows - 1)) {}
  PARARNN_FUNCTION int64 time(int l) const { return in.reverse ? length - 1 - l : l; }
  // The length of an axis that only memories have.
  PARARNN_FUNCTION int lines(int number) const { return (int)in.lines[number]; }
  // A step that exists, for loads ahead.
  PARARNN_FUNCTION int inside(int l) const { return l < 0 ? 0 : l < length ? l : length - 1; }
  PARARNN_FUNCTION bool exists(int row) const { return first_row + row < in.rows; }
  // The number of a step's sequence; negative for padding and outside of the row.
  PARARNN_FUNCTION int sequence(int row, int l) const {
    if (l < 0 || l >= length) return -2;
    return events && in.seq != nullptr ? in.seq[(first_row + row) * length + time(l)] : (int)(first_row + row);
  }
  PARARNN_FUNCTION bool is_reset(int row, int l) const {
    return events && in.reset != nullptr && in.reset[(first_row + row) * length + time(l)];
  }
  PARARNN_FUNCTION bool is_padding(int row, int l) const { return events && sequence(row, l) < 0; }
  PARARNN_FUNCTION bool begins(int row, int l) const { return events && sequence(row, l) != sequence(row, l - 1); }
  PARARNN_FUNCTION bool ends(int row, int l) const { return events && sequence(row, l) != sequence(row, l + 1); }
  // The number of a row's step among those of a tensor (row, time, head, ...).
  PARARNN_FUNCTION int64 step_of(int64 row, int l) const { return (row * length + time(l)) * in.heads + head; }
  // Where a tensor of one sequence and this head begins, or of a row.
  PARARNN_FUNCTION int64 at_sequence(int64 sequence, int numbers) const { return (sequence * in.heads + head) * numbers; }
};

// Entries of a value: all tiles, those of a block, those of a vector along the last axis, and the length of that. Of
// what has the axis of memories tiles are numbers, and a block has whole lines of `line`, of which not all exist.
template <int tiles_, int block_tiles_, int row_tiles_, int last_, int tile = 16, int line_ = 0> struct ShareOf {
  static constexpr int tiles = tiles_, block_tiles = block_tiles_, row_tiles = row_tiles_, last = last_, line = line_;
  static constexpr int width = tile;
  static constexpr int numbers = tiles / row_tiles * last;
  static constexpr int block = block_tiles * tile;  // entries of a row and a block, filled up to tiles
  static constexpr int padded = slices * block;     // of a row
  static constexpr int count = (block + row_threads - 1) / row_threads;  // of a thread, `run` next to each other
  static constexpr int run = tile > 1 && last % 2 == 0 && block % (2 * row_threads) == 0 ? 2 : 1;
  static constexpr bool is_full = tiles == slices * block_tiles && last % width == 0;
  // Whether a call has an entry; see the shares of what has lines.
  PARARNN_FUNCTION static bool inside(const Place&, int) { return true; }
  // The index of an entry of a row among all, filled up, by its index without filling.
  PARARNN_FUNCTION static int position(int flat) {
    return flat / last * (row_tiles * tile) + flat % last;
  }
  // The reverse; -1 for filling.
  PARARNN_FUNCTION static int flat(int position) {
    const int outer = position / (row_tiles * tile), inner = position % (row_tiles * tile);
    return outer < tiles / row_tiles && inner < last ? outer * last + inner : -1;
  }
};

// An entry of a thread: its row, the vector along the last axis, the index there and among all entries, and among those
// of the block, filled up. `fills`: true for filling. `there`: false for filling, and rows that the batch has not.
// index: `flat`, or of an entry that there is.
template <class S> struct Entry {
  int row, outer, inner, flat, at, index;
  bool fills, there;

  PARARNN_FUNCTION Entry(const Place& place, int row, int at) : row(row), at(at) {
    const int own = place.slice * S::block_tiles + at / S::width;
    outer = own / S::row_tiles;
    inner = own % S::row_tiles * S::width + at % S::width;
    flat = S::is_full ? place.slice * S::block + at : outer * S::last + inner;
    fills = !S::is_full && !(own < S::tiles && inner < S::last);
    index = fills ? 0 : flat;
    there = !fills && place.exists(row);
    there = there && S::inside(place, flat);
  }
};

// Calls f(k, entry) for the thread's entries of values; k counts them.
template <class S, class F> PARARNN_FUNCTION void each_entry(const Place& place, const F& f) {
  PARARNN_UNROLL
  for (int k = 0; k < S::count; ++k) {
    const int turn = k / S::run * (warps / cluster_rows) + warp() / cluster_rows;
    const int at = (turn * lanes + lane()) * S::run + k % S::run;
    if (S::block % row_threads != 0 && at >= S::block) return;
    f(k, Entry<S>(place, warp() % cluster_rows, at));
  }
}
// Calls f(k, entry) for the first ones of `run` that follow each other.
template <class S, int run, class F> PARARNN_FUNCTION void each_run(const Place& place, const F& f) {
  each_entry<S>(place, [&](int k, const Entry<S>& e) {
    if (k % run == 0) f(k, e);
  });
}
// Loads the thread's entries of a value from where a row's numbers are; in_runs: whether runs are aligned.
template <class S, bool in_runs, class T>
PARARNN_FUNCTION void load_entries(const Place& place, const T* source, T (&numbers)[S::count]) {
  constexpr int run = in_runs ? S::run : 1;
  each_run<S, run>(place, [&](int k, const Entry<S>& e) {
    const auto pack = *reinterpret_cast<const Pack<T, run>*>(source + e.index);
    each<run>([&](int i) { numbers[k + i] = pack.items[i]; });
  });
}
// Stores the thread's entries, those that there are: by `parts` numbers of type T that add up to one, `gap` apart.
template <class S, bool in_runs, int parts = 1, class T>
PARARNN_FUNCTION void store_entries(const Place& place, T* target, const real (&numbers)[S::count], int gap = 0) {
  constexpr int run = in_runs ? S::run : 1;
  each_run<S, run>(place, [&](int k, const Entry<S>& e) {
    real rest[run];
    each<run>([&](int i) { rest[i] = numbers[k + i]; });
    each<parts>([&](int part) {
      const Pack<T, run> pack = packed<T, run>(rest);
      if (e.there) *reinterpret_cast<Pack<T, run>*>(target + part * gap + e.flat) = pack;
      each<run>([&](int i) { rest[i] -= widen(pack.items[i]); });
    });
  });
}
// The same of what has lines, of which a thread may have many.
template <class S, class F> PARARNN_FUNCTION void each_entry_of_lines(const Place& place, const F& f) {
#pragma unroll 1
  for (int number = threadIdx.x; number < cluster_rows * S::block; number += threads)
    f(0, Entry<S>(place, number / S::block, number % S::block));
}

}  // namespace pararnn
