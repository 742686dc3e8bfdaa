// A ring of stages in shared memory, which cp.async fills ahead of use with what a warp reads step by step:
// enough bytes in flight, without registers or block barriers for them.
//
// Needs, in addition to real.h: per_lane (channels of a lane), steps (of a stage), stages (of the ring).
#pragma once
#include "../registers.h"

namespace pararnn {

constexpr int lanes = 32;
constexpr int tile_channels = lanes * per_lane;  // channels of a warp

PARARNN_FUNCTION int lane() { return threadIdx.x; }

// Waits until the oldest stage in flight has arrived and every lane has finished the stage before it.
PARARNN_FUNCTION void wait_for_stage() {
  wait_for_copies<stages - 2>();
  __syncwarp();
}

// Stream of `rows` rows of `width` elements a step (a tile of channels, or one value for all of them), copied
// in chunks of `chunk` bytes. One instruction copies the rows of `together` steps.
template <class T, int rows, int width, int chunk> struct Stream {
  static constexpr int row_bytes = width * sizeof(T);
  static constexpr int chunks = row_bytes / chunk;
  static constexpr int parts = (chunks + lanes - 1) / lanes;
  static constexpr int fitting = chunks < lanes ? lanes / chunks : 1;
  static constexpr int together = fitting < steps ? fitting : steps;
  static constexpr int step_bytes = rows * row_bytes;
  static constexpr int stage_bytes = steps * step_bytes;
  static constexpr int bytes = stages * stage_bytes;

  static constexpr int never = 1 << 30;

  char* memory;
  int offset;                 // of the stream in its ring
  unsigned target;            // this lane's address in the first stage, without the offset: a constant,
                              // so that the streams of a ring share one register
  int first[parts];           // of the steps copied together, this lane's one
  const char* source[parts];  // its address in that step's row, in the next stage to copy

  // `ring`: its memory, in which the stream begins at byte `start_byte`. `address_of(e)`: of element e of the
  // first row of step 0, or null for none. `time`: elements between steps.
  template <class Source>
  PARARNN_FUNCTION void start(char* ring, int start_byte, int64 time, const Source& address_of) {
    memory = ring + start_byte;
    offset = start_byte;
    const int sub = lane() % chunks, step = lane() / chunks;
    target = shared_address(ring) + step * step_bytes + sub * chunk;
    each<parts>([&](int part) {
      const T* address = address_of((sub + part * lanes) * (chunk / (int)sizeof(T)));
      first[part] = step < together && address != nullptr ? step : never;
      source[part] = reinterpret_cast<const char*>(address + step * time);
    });
  }

  // Copies step `s` of the stage in `slot`, and the steps copied together with it. `left`: steps from the
  // stage's first one on. `between`: elements between rows.
  PARARNN_FUNCTION void copy(int slot, int s, int left, int64 time, int64 between) const {
    if (s % together != 0) return;
    each<parts>([&](int part) {
      if (s + first[part] >= left) return;
      each<rows>([&](int row) {
        copy_async<chunk>(target + slot * stage_bytes + s * step_bytes + row * row_bytes +
                              part * lanes * chunk + offset,
                          source[part] + (s * time + row * between) * (int64)sizeof(T));
      });
    });
  }

  PARARNN_FUNCTION void next_stage(int64 time) {
    each<parts>([&](int part) { source[part] += steps * time * (int64)sizeof(T); });
  }

  // Reads the lane's channels of a row that has arrived.
  PARARNN_FUNCTION void read(int slot, int s, int row, real (&x)[per_lane]) const {
    const char* row_start = memory + slot * stage_bytes + s * step_bytes + row * row_bytes;
    if constexpr (width == 1) {
      const real value = widen(*reinterpret_cast<const T*>(row_start));
      each<per_lane>([&](int c) { x[c] = value; });
    } else {
      unpack(reinterpret_cast<const Pack<T, per_lane>*>(row_start)[lane()], x);
    }
  }
};

template <bool b> struct Bool { static constexpr bool value = b; };

// Steps `first` to `end` - 1 in processing order, after a burn-in from `begin` on, which is whole stages.
struct Span {
  int begin, first, end;
};

// Runs the steps of a span through a ring. Calls step(values, s, j, inner, burning) for step j, step s of its
// stage; begin(j) before a stage and end(j) after it, j being the next step; and ready() between the burn-in
// and the other steps. `inner` is Bool<true> for whole stages with at least `following` steps after them.
// Reads a step's values while the step before it runs: one warp has no other work to hide the latency.
template <int following, class Ring, class Begin, class Ready, class Step, class End>
PARARNN_FUNCTION void for_each_step(Ring& ring, const Span& span, const Begin& begin,
                                    const Ready& ready, const Step& step, const End& end) {
  int left = span.end - span.begin;  // steps from the next stage to copy on
  for (int stage = 0; stage < stages - 1; ++stage, left -= steps) {
#pragma unroll
    for (int s = 0; s < steps; ++s) ring.copy(stage, s, left);
    end_group_of_copies();
    ring.next_stage();
  }
  int slot = 0, free_slot = stages - 1, j = span.begin;
  typename Ring::Values values;
  wait_for_stage();
  ring.read(slot, 0, values);
  const auto run_stage = [&](auto inner, auto burning) {
    begin(j);
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      typename Ring::Values next;
      ring.copy(free_slot, s, left);
      if (s + 1 < steps) {
        ring.read(slot, s + 1, next);
      } else {
        end_group_of_copies();
        wait_for_stage();
        free_slot = slot;
        slot = slot + 1 < stages ? slot + 1 : 0;
        ring.read(slot, 0, next);
      }
      if (decltype(inner)::value || j + s < span.end) step(values, s, j + s, inner, burning);
      values = next;
    }
    ring.next_stage();
    left -= steps;
    j += steps;
    end(j);
  };
  while (j < span.first) run_stage(Bool<true>(), Bool<true>());
  ready();
  while (j + steps + following <= span.end) run_stage(Bool<true>(), Bool<false>());
  while (j < span.end) run_stage(Bool<false>(), Bool<false>());
}

}  // namespace pararnn
