// What a warp reads step by step travels through a ring of stages in shared memory, filled ahead of
// its use by cp.async: enough bytes in flight, and neither registers nor block barriers for them.
//
// Needs, besides real.h: per_lane (channels a lane runs), steps (of a stage), stages (of the ring).
#pragma once
#include "registers.h"

namespace pararnn {

constexpr int lanes = 32;
constexpr int tile = lanes * per_lane;  // channels of a warp

PARARNN_FUNCTION int lane() { return threadIdx.x; }

// The oldest stage in flight has arrived, and every lane is done with the stage before it.
PARARNN_FUNCTION void wait_for_stage() {
  wait_for_copies<stages - 2>();
  __syncwarp();
}

// `rows` rows of `width` elements a step (a tile of channels, or one value for all of them), copied
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
  int offset;               // of the stream in its ring
  unsigned to;              // this lane's place in the first stage, less the offset: a constant,
                            // which the streams of a ring need not keep in a register each
  int first[parts];         // of the steps copied together, the one that this lane copies
  const char* from[parts];  // its place in the row of that step, in the stage to come

  // `place`: of the ring, in which the stream begins `at` bytes on. `source(e)`: the address of
  // element e of the first row of step 0, or null for none. `time`: from one step to the next, in
  // elements.
  template <class Source>
  PARARNN_FUNCTION void start(char* place, int at, int64 time, const Source& source) {
    memory = place + at;
    offset = at;
    const int sub = lane() % chunks, step = lane() / chunks;
    to = shared_address(place) + step * step_bytes + sub * chunk;
    each<parts>([&](int part) {
      const T* address = source((sub + part * lanes) * (chunk / (int)sizeof(T)));
      first[part] = step < together && address != nullptr ? step : never;
      from[part] = reinterpret_cast<const char*>(address + step * time);
    });
  }

  // Step `s` of the stage that goes into `slot`, with the steps copied together with it; `left` is
  // how many steps there are from the stage's first one on. `between`: from row to row, in elements.
  PARARNN_FUNCTION void copy(int slot, int s, int left, int64 time, int64 between) const {
    if (s % together != 0) return;
    each<parts>([&](int part) {
      if (s + first[part] >= left) return;
      each<rows>([&](int row) {
        copy_async<chunk>(to + slot * stage_bytes + s * step_bytes + row * row_bytes +
                              part * lanes * chunk + offset,
                          from[part] + (s * time + row * between) * (int64)sizeof(T));
      });
    });
  }

  PARARNN_FUNCTION void next_stage(int64 time) {
    each<parts>([&](int part) { from[part] += steps * time * (int64)sizeof(T); });
  }

  // The lane's channels of a row that has arrived.
  PARARNN_FUNCTION void read(int slot, int s, int row, real (&x)[per_lane]) const {
    const char* place = memory + slot * stage_bytes + s * step_bytes + row * row_bytes;
    if constexpr (width == 1) {
      const real value = widen(*reinterpret_cast<const T*>(place));
      each<per_lane>([&](int c) { x[c] = value; });
    } else {
      unpack(reinterpret_cast<const Pack<T, per_lane>*>(place)[lane()], x);
    }
  }
};

template <bool b> struct Known { static constexpr bool value = b; };

// Steps in the order of processing: those from `first` on, before `end`, after a burn-in from `begin`
// on, which is whole stages.
struct Span {
  int begin, first, end;
};

// Runs the steps of a span through a ring: calls step(values, s, j, inner, burning) for step j, which
// is step s of its stage, begin(j) before a stage and end(j) after it, j being the step that follows,
// and ready() between the burn-in and the rest. `inner` is Known<true> for stages that are whole and
// followed by at least `apart` steps. The values of a step are read while the step before it runs: one
// warp has nothing else to wait with.
template <int apart, class Ring, class Begin, class Ready, class Step, class End>
PARARNN_FUNCTION void for_each_step(Ring& ring, const Span& span, const Begin& begin,
                                    const Ready& ready, const Step& step, const End& end) {
  int left = span.end - span.begin;  // steps from the stage to be copied next on
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
  while (j < span.first) run_stage(Known<true>(), Known<true>());
  ready();
  while (j + steps + apart <= span.end) run_stage(Known<true>(), Known<false>());
  while (j < span.end) run_stage(Known<false>(), Known<false>());
}

}  // namespace pararnn
