// A ring in shared memory, which cp.async fills ahead of use with what a warp reads step by step.
#pragma once
#include "block.h"

namespace pararnn {

// Waits until the next step's numbers have arrived and every lane has finished with those of the last step.
PARARNN_FUNCTION void wait_for_step() {
  wait_for_copies<steps_ahead - 1>();
  __syncwarp();
}

// Stream of `items` numbers a step of each column and unit of a warp's tiles.
template <class T, int items> struct Stream {
  static constexpr int row_bytes = warp_tiles * units * (int)sizeof(T);
  static constexpr int own_chunk = chunk < (int)sizeof(T) ? (int)sizeof(T) : chunk < row_bytes ? chunk : row_bytes;
  static constexpr int chunks = items * columns * row_bytes / own_chunk;  // of a step
  static constexpr int parts = (chunks + lanes - 1) / lanes;
  static constexpr int step_bytes = items * columns * row_bytes;
  static constexpr int bytes = (steps_ahead + 1) * step_bytes;  // of a warp

  char* memory;
  const char* source[parts > 0 ? parts : 1];  // of this lane's chunks, null for none

  // `address_of(item, column, unit)`: where a number is in the first step, or null.
  template <class Source> PARARNN_FUNCTION void start(char* ring, const Source& address_of) {
    memory = ring;
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
  PARARNN_FUNCTION void copy(int slot, int64 time_bytes) {
    each<parts>([&](int part) {
      if (source[part] == nullptr) return;
      copy_async<own_chunk>(shared_address(memory) + slot * step_bytes + (part * lanes + lane()) * own_chunk,
                            source[part]);
      source[part] += time_bytes;
    });
  }
  PARARNN_FUNCTION void read(int slot, int item, Numbers& x) const {
    const char* own = memory + slot * step_bytes + item * columns * row_bytes;
    each<per_lane>([&](int c) {
      x[c] = widen(reinterpret_cast<const T*>(own + column_of_side(side_of(c)) * row_bytes)[own_unit_of(c)]);
    });
  }
};

}  // namespace pararnn
