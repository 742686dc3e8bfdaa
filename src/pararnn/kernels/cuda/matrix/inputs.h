// The inputs of a block, which runs one head of one row: windows of steps go through shared memory, filled ahead of
// use by cp.async. Times t are in the caller's order; l counts the steps of the recurrence.
//
// Needs, in addition to loops.h and the emitted code: events (true if `seq` or `reset` is passed), window (steps; 0
// to read memory directly), exchange_numbers, matrix_numbers, fragment_words, trajectory_bytes (0 for states of a
// chunk in global memory) and shared_bytes (of all shared memory).
#pragma once
#include "loops.h"

namespace pararnn {

constexpr int threads = warps * lanes;
constexpr int checkpoint = 16;  // CHECKPOINT of program/matrix.py
constexpr int copy_bytes = 16;

// Steps in a row that hand registers on without copies. Products by tiles were slower so.
constexpr int turns = States::entries <= 8 && !Columns::in_pairs ? 2 : 1;

constexpr int round_up(int bytes) { return (bytes + copy_bytes - 1) / copy_bytes * copy_bytes; }
constexpr int exchange_bytes = round_up(2 * exchange_numbers * (int)sizeof(real));
constexpr int matrix_bytes = round_up(matrix_numbers * (int)sizeof(real));
constexpr int fragment_bytes = round_up(fragment_words * 4);
constexpr int span = window > 0 ? window : 1;  // steps after which what they left is finished
constexpr int slot_bytes = round_up(span * (slot_numbers + ready_numbers) * (int)sizeof(real));
constexpr int slots_at = exchange_bytes + matrix_bytes + fragment_bytes, feeds_at = slots_at + slot_bytes;

// The row and the head of a block.
struct Place {
  const Inputs& in;
  const int64 row, head;
  const int length;

  PARARNN_FUNCTION explicit Place(const Inputs& in)
      : in(in), row(blockIdx.x / in.heads), head(blockIdx.x % in.heads), length((int)in.length) {}
  PARARNN_FUNCTION int64 time(int l) const { return in.reverse ? length - 1 - l : l; }
  // The number of a step's sequence; negative for padding and outside of the row.
  PARARNN_FUNCTION int sequence(int l) const {
    if (l < 0 || l >= length) return -2;
    return events && in.seq != nullptr ? in.seq[row * length + time(l)] : (int)row;
  }
  PARARNN_FUNCTION bool is_reset(int l) const {
    return events && in.reset != nullptr && in.reset[row * length + time(l)];
  }
  // Where all states before a chunk of steps are in the memory of checkpoints.
  PARARNN_FUNCTION int64 at_chunk(int chunk) const {
    const int64 chunks = (length + checkpoint - 1) / checkpoint;
    return ((row * chunks + chunk) * in.heads + head) * States::numbers;
  }
  // Where a tensor of one sequence and this head begins.
  PARARNN_FUNCTION int64 at_sequence(int sequence, int size) const { return (sequence * in.heads + head) * size; }
};

template <class S, class T> PARARNN_FUNCTION void load(const T* source, real (&x)[S::count]) {
  PARARNN_FOR(i, S::count) x[i] = S::exists(i) ? widen(source[S::offset(i)]) : constant(0);
}
// Whether this thread writes a tensor; by_lanes: of which all warps have all.
template <class S, bool by_lanes> PARARNN_FUNCTION bool writes() {
  return by_lanes ? S::size > 1 || lane() == 0 : S::template leads<Rows, Columns>();
}
template <class S, bool by_lanes = false, class T> PARARNN_FUNCTION void store(const real (&x)[S::count], T* target) {
  if (!writes<S, by_lanes>()) return;
  PARARNN_FOR(i, S::count)
    if (S::exists(i)) target[S::offset(i)] = narrow<T>(x[i]);
}
template <class S, bool by_lanes> PARARNN_FUNCTION void add_to(const real (&x)[S::count], real* target) {
  if (!writes<S, by_lanes>()) return;
  PARARNN_FOR(i, S::count)
    if (S::exists(i)) target[S::offset(i)] += x[i];
}

// All tensors of a kind, which follow each other in memory.
template <class Kind, class T> PARARNN_FUNCTION void load_all(const T* source, Kind& x) {
  Kind::each(x, [&](auto share, auto& own, int, int first) { load<decltype(share)>(source + first, own); });
}
template <bool by_lanes = false, class Kind, class T> PARARNN_FUNCTION void store_all(const Kind& x, T* target) {
  Kind::each(x, [&](auto share, auto& own, int, int first) {
    store<decltype(share), by_lanes>(own, target + first);
  });
}
template <bool by_lanes = false, class Kind> PARARNN_FUNCTION void add_all(const Kind& x, real* target) {
  Kind::each(x, [&](auto share, auto& own, int, int first) { add_to<decltype(share), by_lanes>(own, target + first); });
}
template <class Kind> PARARNN_FUNCTION void fill_all(Kind& x, real value) {
  Kind::each(x, [&](auto, auto& own, int, int) {
    PARARNN_UNROLL
    for (real& number : own) number = value;
  });
}

// States of a sequence, an array each; null is zero.
PARARNN_FUNCTION void load_states(const Place& place, const scalar* const* source, int sequence, States& x) {
  States::each(x, [&](auto share, auto& own, int i, int) {
    using S = decltype(share);
    if (source[i] != nullptr) load<S>(source[i] + place.at_sequence(sequence, S::size), own);
    else for (real& number : own) number = constant(0);
  });
}
PARARNN_FUNCTION void store_states(const Place& place, const States& x, int sequence, scalar* const* target) {
  States::each(x, [&](auto share, auto& own, int i, int) {
    using S = decltype(share);
    if (target[i] != nullptr) store<S>(own, target[i] + place.at_sequence(sequence, S::size));
  });
}
// Begins a step: from zero, from the sequence's initial state, or as it is.
PARARNN_FUNCTION void begin(const Place& place, int l, int sequence, States& state) {
  if (place.is_reset(l)) fill_all(state, constant(0));
  else if (sequence != place.sequence(l - 1)) load_states(place, place.in.initial, sequence, state);
}

PARARNN_FUNCTION void load_params(const Place& place, Params& param) {
  Params::each(param, [&](auto share, auto& own, int i, int) {
    using S = decltype(share);
    load<S>(place.in.params[i] + (of_all_heads[i] ? 0 : place.head * S::size), own);
  });
}

// The numbers of a tensor at each step, which lie next to each other. Two windows of steps are in shared memory.
// Copies are of whole chunks of 16 bytes, so that numbers have the same distance from one as in memory; what else is
// in the first and last chunk of a step is not read.
template <class T, int numbers> struct Feed {
  static constexpr int bytes = numbers * (int)sizeof(T), slot = round_up(bytes + copy_bytes - 1);
  static constexpr int chunks = slot / copy_bytes, memory_bytes = 2 * window * slot;
  const char* source;  // of time 0
  int64 stride;        // bytes from one time to the next
  char* memory;
  int held = -1, held_too = -1;  // the windows of the first half of the memory, and of the second one

  PARARNN_FUNCTION Feed(const T* first, int64 time_stride, char* memory)
      : source(reinterpret_cast<const char*>(first)), stride(time_stride * (int64)sizeof(T)), memory(memory) {}
  PARARNN_FUNCTION const char* address(const Place& place, int l) const { return source + place.time(l) * stride; }
  PARARNN_FUNCTION static int distance(const char* address) {
    return (int)(reinterpret_cast<unsigned long long>(address) % copy_bytes);
  }
  // Copies a window, if it is not there, to where `current` is not.
  PARARNN_FUNCTION void copy(const Place& place, int number, int current) {
    if (window == 0 || source == nullptr || number < 0 || held == number || held_too == number) return;
    const int target = held == current ? 1 : 0;
    held = target == 0 ? number : held;
    held_too = target == 0 ? held_too : number;
    const int first = number * span, left = place.length - first;
    const int count = (left < window ? left : window) * chunks;
    for (int i = threadIdx.x; i < count; i += threads) {
      const int step = i / chunks, byte = i % chunks * copy_bytes;
      const char* const own = address(place, first + step);
      const int before = distance(own);
      if (byte < before + bytes)
        copy_async<copy_bytes>(shared_address(memory + (target * window + step) * slot + byte), own - before + byte);
    }
  }
  // Where the numbers of a step of a window that is there begin; `move` goes on to the next step or the one before.
  struct Cursor {
    const char* step;
    int distance;
    PARARNN_FUNCTION const T* at() const { return reinterpret_cast<const T*>(step + distance); }
  };
  PARARNN_FUNCTION Cursor cursor(const Place& place, int l) const {
    const char* const own = address(place, l);
    if (window == 0) return Cursor{own, 0};
    const int index = (held == l / span ? 0 : window) + l % span;
    return Cursor{memory + index * slot, distance(own)};
  }
  PARARNN_FUNCTION void move(const Place& place, Cursor& cursor, int steps) const {
    const int64 far = place.in.reverse ? -steps * stride : steps * stride;
    if (window == 0) {
      cursor.step += far;
    } else {
      cursor.step += steps * slot;
      cursor.distance = (cursor.distance + (int)far) & (copy_bytes - 1);
    }
  }
};

PARARNN_FUNCTION int window_of(int l) { return l / span; }

using GateFeed = Feed<io, Gates::numbers>;

PARARNN_FUNCTION GateFeed gates_of(const Place& place, char* memory) {
  const Inputs& in = place.in;
  return GateFeed(in.gates + place.row * in.gate_row + place.head * in.gate_head, in.gate_time, memory);
}

// Gates of a step with their biases.
template <class G> PARARNN_FUNCTION void load_gates(const io* source, const G& bias, G& gate) {
  gate = bias;
  G::each(gate, [&](auto share, auto& own, int, int first) {
    using S = decltype(share);
    real x[S::count];
    load<S>(source + first, x);
    PARARNN_FOR(i, S::count) own[i] += x[i];
  });
}
template <class G> PARARNN_FUNCTION void load_bias(const Place& place, G& bias) {
  if (place.in.bias != nullptr) load_all(place.in.bias + place.head * G::numbers, bias);
  else fill_all(bias, constant(-0.0));  // x + -0 is x, also for -0
}

// The weights of a head, where its threads exchange values, and what steps of a window leave for its end or find there.
struct Head {
  Block block;
  Matrices matrices;
  Params param;
  WideGates bias;
  real* const slots;

  PARARNN_FUNCTION Head(const Place& place, char* memory)
      : block(memory), slots(reinterpret_cast<real*>(memory + slots_at)) {
    matrices.load(place.in.params, place.head, reinterpret_cast<real*>(memory + exchange_bytes),
                  reinterpret_cast<unsigned*>(memory + exchange_bytes + matrix_bytes));
    load_params(place, param);
    load_bias(place, bias);
    __syncthreads();
  }
  PARARNN_FUNCTION real* slot(int l) const { return slots + (unsigned)l % span * slot_numbers; }
  PARARNN_FUNCTION real* ready(int l) const { return slots + span * slot_numbers + (unsigned)l % span * ready_numbers; }
};

// Computes for the steps of a window what depends on gates alone, as numbers of `Ready`: a warp has steps of its own.
template <class Ready> PARARNN_FUNCTION void prepare(const Place& place, const Head& own, const GateFeed& gates, int first, int end) {
  finish::Gates bias;
  load_bias(place, bias);
  for (int l = first + warp(); l < end; l += warps) {
    if (events && place.sequence(l) < 0) continue;
    finish::Gates gate;
    Ready ready;
    load_gates(gates.cursor(place, l).at(), bias, gate);
    finish::prepare_step(gate, ready);
    store_all<true>(ready, own.ready(l));
  }
}

// What a step reads apart from the state: from shared memory what `prepare` left, and matrices of gates.
template <class Ready> struct StepInputs {
  Ready ready;
  WideGates gate;
  PARARNN_FUNCTION void load(const Head& own, int l, const io* source) {
    load_all(own.ready(l), ready);
    load_gates(source, own.bias, gate);
  }
};

}  // namespace pararnn
