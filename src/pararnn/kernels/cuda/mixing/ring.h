// A ring in shared memory, which cp.async fills ahead of use with what a warp reads step by step.
#pragma once
#include "block.h"

namespace pararnn {

PARARNN_FUNCTION constexpr int at_least(int x, int low) { return x > low ? x : low; }

// Waits until the next step's numbers have arrived and every lane has finished with those of the last step.
PARARNN_FUNCTION void wait_for_step() {
  wait_for_copies<at_least(steps_ahead - 1, 0)>();
  __syncwarp();
}

// Stream of `items` numbers a step of each column and unit of a warp's tiles. Without steps ahead there is no
// ring: they are read where they are.
template <class T, int items> struct Stream {
  static constexpr bool direct = steps_ahead == 0;
  static constexpr int row_bytes = warp_tiles * units * (int)sizeof(T);
  static constexpr int own_chunk = chunk < (int)sizeof(T) ? (int)sizeof(T) : chunk < row_bytes ? chunk : row_bytes;
  static constexpr int chunks = items * columns * row_bytes / own_chunk;  // of a step
  static constexpr int parts = direct ? 0 : (chunks + lanes - 1) / lanes;
  static constexpr int step_bytes = items * columns * row_bytes;
  static constexpr int bytes = direct ? 0 : (steps_ahead + 1) * step_bytes;  // of a warp
  static constexpr bool all_exist = whole && !ragged && chunks % lanes == 0;

  char* memory;
  const char* source[at_least(parts, 1)];  // of this lane's chunks, null for none
  const T* address[direct ? at_least(items, 1) : 1][sides];  // of a column's first unit, or null

  // `address_of(item, column, unit)`: where a number is in the first step, or null.
  template <class Source> PARARNN_FUNCTION void start(char* ring, const Source& address_of) {
    memory = ring;
    if constexpr (direct) {
      each<items>([&](int item) {
        each<sides>([&](int side) { address[item][side] = address_of(item, column_of_side(side), first_unit(0)); });
      });
    }
    each<parts>([&](int part) {
      const int index = part * lanes + lane(), byte = index * own_chunk;
      const int unit = first_unit(0) + byte % row_bytes / (int)sizeof(T);
      source[part] = nullptr;
      if (index < chunks && unit < head_width)
        source[part] = reinterpret_cast<const char*>(
            address_of(byte / (columns * row_bytes), byte / row_bytes % columns, unit));
    });
    for (int i = lane() * 4; i < bytes; i += lanes * 4) *reinterpret_cast<int*>(ring + i) = 0;
  }
  // Copies a step. The last one is copied again by calls after it: fewer branches.
  PARARNN_FUNCTION void copy(int slot, int64 time_bytes, bool more) {
    each<parts>([&](int part) {
      if (!all_exist && source[part] == nullptr) return;
      copy_async<own_chunk>(shared_address(memory) + slot * step_bytes + (part * lanes + lane()) * own_chunk,
                            source[part]);
      source[part] += more ? time_bytes : 0;
    });
  }
  // Reads the numbers of an item. Without a ring, `offset`: bytes from those of the first step on.
  PARARNN_FUNCTION void read(int slot, int item, Numbers& x, int64 offset) const {
    const char* own = memory + slot * step_bytes + item * columns * row_bytes;
    each<per_lane>([&](int c) {
      if constexpr (direct) {
        const char* column = reinterpret_cast<const char*>(address[item][side_of(c)]);
        const T* source = reinterpret_cast<const T*>(column + offset) + own_unit_of(c);
        x[c] = load_or(source, column != nullptr && exists(c), constant(0));
      } else {
        x[c] = widen(reinterpret_cast<const T*>(own + column_of_side(side_of(c)) * row_bytes)[own_unit_of(c)]);
      }
    });
  }
};

}  // namespace pararnn
