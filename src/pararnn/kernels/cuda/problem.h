// What forward and backward kernels have in common: their inputs, the warp's place among them, the
// ring of gates and fields, and the events of the sequences.
//
// Channels d = head * head_width + j are contiguous in all tensors but the gates, whose heads have a
// stride. Times t of the tensors are in the caller's order; steps j are in processing order, which is
// l = j in the forward pass and l = length - 1 - j in the backward one.
//
// Needs, besides ring.h and the emitted code: channels, head_width, chunk (bytes that may be copied
// at once; field_chunk: of fields), adjacent_gates (whether a step's gates of a head lie side by side), reverse, events (seq or
// reset given), broadcast (by field: one value a step for all channels), weight_io (the type of biases
// and params in memory).
#pragma once
#include "ring.h"

namespace pararnn {

PARARNN_FUNCTION constexpr int at_least_1(int n) { return n > 0 ? n : 1; }
constexpr int field_slots = at_least_1(num_fields), param_slots = at_least_1(num_params);
constexpr int num_weights = num_gates + num_params;  // biases, then params
constexpr int tiles = (channels + tile - 1) / tile;
constexpr bool ragged = channels % tile != 0;

struct Inputs {
  int64 rows, length;
  int64 gate_row, gate_time, gate_gate, gate_head;
  int64 field_row[field_slots], field_time[field_slots];
  const io* gates;
  const weight_io* bias;          // (gate, channel) or null
  const int* seq;                 // (row, time) or null: row b is sequence b
  const bool* reset;              // (row, time) or null
  const scalar* fields[field_slots];
  const weight_io* params[param_slots];
  const scalar* initial[num_states];  // (sequence, channel) or null: zero

  PARARNN_FUNCTION int64 gate_stride() const { return adjacent_gates ? head_width : gate_gate; }
  PARARNN_FUNCTION int64 time_stride() const {
    return adjacent_gates ? num_gates * head_width : gate_time;
  }
  PARARNN_FUNCTION int64 gate_offset(int channel) const {
    return channel / head_width * gate_head + channel % head_width;
  }
};

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
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
      if (c < active) to[c] = narrow<T>(x[c]);
  }
}

constexpr bool paired_channels = channels % per_lane == 0;

template <class T> PARARNN_FUNCTION void load(const T* from, real (&x)[per_lane], int active) {
#pragma unroll
  for (int c = 0; c < per_lane; ++c) x[c] = c < active ? widen(from[c]) : constant(0);
}

struct Weights {
  real bias[num_gates][per_lane], params[param_slots][per_lane];

  PARARNN_FUNCTION Weights(const Inputs& in, const Place& at) {
#pragma unroll
    for (int g = 0; g < num_gates; ++g) {
      if (in.bias != nullptr) {
        load(in.bias + g * channels + at.own, bias[g], at.active);
      } else {
#pragma unroll
        for (int c = 0; c < per_lane; ++c) bias[g][c] = constant(-0.0);  // x + -0 is x, also for -0
      }
    }
#pragma unroll
    for (int i = 0; i < num_params; ++i) load(in.params[i] + at.own, params[i], at.active);
  }
};

// The time of step `begin`: processing runs by `direction`, from the first or from the last time on.
PARARNN_FUNCTION int64 time_of(const Inputs& in, int direction, int begin) {
  return direction > 0 ? begin : in.length - 1 - begin;
}

template <int f, int direction> struct FieldStreams {
  Stream<scalar, 1, broadcast[f] ? 1 : tile, broadcast[f] ? (int)sizeof(scalar) : field_chunk> own;
  FieldStreams<f + 1, direction> rest;
  int64 time;

  static constexpr int stage_bytes =
      decltype(own)::stage_bytes + FieldStreams<f + 1, direction>::stage_bytes;

  PARARNN_FUNCTION void start(char* place, const Inputs& in, const Place& at, int begin) {
    time = direction * in.field_time[f];
    const scalar* origin = in.fields[f] + at.row * in.field_row[f] +
                           time_of(in, direction, begin) * in.field_time[f];
    own.start(place, time, [&](int e) -> const scalar* {
      if (broadcast[f]) return origin;
      return at.first + e < channels ? origin + at.first + e : nullptr;
    });
    rest.start(place + stages * decltype(own)::stage_bytes, in, at, begin);
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const {
    own.copy(slot, s, left, time, 0);
    rest.copy(slot, s, left);
  }
  PARARNN_FUNCTION void next_stage() {
    own.next_stage(time);
    rest.next_stage();
  }
  PARARNN_FUNCTION void read(int slot, int s, real (*x)[per_lane]) const {
    own.read(slot, s, 0, x[f]);
    rest.read(slot, s, x);
  }
};

template <int direction> struct FieldStreams<num_fields, direction> {
  static constexpr int stage_bytes = 0;
  PARARNN_FUNCTION void start(char*, const Inputs&, const Place&, int) {}
  PARARNN_FUNCTION void copy(int, int, int) const {}
  PARARNN_FUNCTION void next_stage() {}
  PARARNN_FUNCTION void read(int, int, real (*)[per_lane]) const {}
};

// What a step takes: pre-activations with their biases, and fields.
struct StepInputs {
  real gate[num_gates][per_lane], field[field_slots][per_lane];
};

// The ring of gates and fields. `direction`: of processing through time. `gated`: whether gates are read.
template <int direction, bool gated = true> struct InputRing {
  using Gates = Stream<io, num_gates, tile, chunk>;
  using Fields = FieldStreams<0, direction>;
  static constexpr int gate_bytes = gated ? Gates::bytes : 0;
  static constexpr int bytes = gate_bytes + stages * Fields::stage_bytes;

  using Values = StepInputs;

  const Weights& weights;
  Gates gates;
  Fields fields;
  int64 time, between;

  PARARNN_FUNCTION InputRing(char* place, const Inputs& in, const Place& at, const Weights& weights,
                             int begin)
      : weights(weights),
        time(direction * in.time_stride()),
        between(in.gate_stride()) {
    const io* origin =
        in.gates + at.row * in.gate_row + time_of(in, direction, begin) * in.time_stride();
    if (gated) gates.start(place, time, [&](int e) -> const io* {
      return at.first + e < channels ? origin + in.gate_offset(at.first + e) : nullptr;
    });
    fields.start(place + gate_bytes, in, at, begin);
  }
  PARARNN_FUNCTION void copy(int slot, int s, int left) const {
    if (gated) gates.copy(slot, s, left, time, between);
    fields.copy(slot, s, left);
  }
  PARARNN_FUNCTION void next_stage() {
    if (gated) gates.next_stage(time);
    fields.next_stage();
  }
  PARARNN_FUNCTION void read(int slot, int s, StepInputs& values) const {
#pragma unroll
    for (int g = 0; g < num_gates; ++g) {
      if (gated) gates.read(slot, s, g, values.gate[g]);
#pragma unroll
      for (int c = 0; c < per_lane; ++c)
        values.gate[g][c] = gated ? values.gate[g][c] + weights.bias[g][c] : constant(0);
    }
    fields.read(slot, s, values.field);
  }
};

// Where sequences begin and end, steps are reset, and padding is: bits of 32 steps, step j in bit
// j % 32. A lane loads one step's flags, 32 steps before they are needed.
struct Events {
  const Inputs& in;
  int64 row;
  int order;  // of processing: 1 if step j is l = j, else -1
  unsigned begins, ends, resets, pads;
  int next_seq, next_before, next_after;
  bool next_reset;

  PARARNN_FUNCTION Events(const Inputs& in, const Place& at, int order, int begin)
      : in(in), row(at.row), order(order) {
    look_ahead(begin - begin % lanes);
  }
  // Before the stage that begins at step j of a run from `begin` on.
  PARARNN_FUNCTION void at_stage(int j, int begin) {
    if (j % lanes == 0 || j == begin) refresh(j - j % lanes);
  }
  PARARNN_FUNCTION int64 position(int64 l) const {
    return row * in.length + (reverse ? in.length - 1 - l : l);
  }
  PARARNN_FUNCTION int number(int64 l) const {  // of the sequence that step l is of
    if (l < 0 || l >= in.length) return -2;
    return in.seq != nullptr ? in.seq[position(l)] : (int)row;
  }
  PARARNN_FUNCTION int64 number_of(int j) const {
    return number(order > 0 ? j : in.length - 1 - j);
  }
  PARARNN_FUNCTION void look_ahead(int from) {
    const int64 j = from + lane(), l = order > 0 ? j : in.length - 1 - j;
    next_seq = number(l);
    next_before = number(l - 1);
    next_after = number(l + 1);
    next_reset = in.reset != nullptr && j < in.length && in.reset[position(l)];
  }
  PARARNN_FUNCTION void refresh(int j) {
    begins = __ballot_sync(~0u, next_seq != next_before);
    ends = __ballot_sync(~0u, next_seq != next_after);
    resets = __ballot_sync(~0u, next_reset);
    pads = __ballot_sync(~0u, next_seq < 0);
    look_ahead(j + lanes);
  }
  PARARNN_FUNCTION bool any(int j) const {
    return (begins | ends | resets | pads) >> (j % lanes) & 1;
  }
  PARARNN_FUNCTION bool begin(int j) const { return begins >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool end(int j) const { return ends >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool reset(int j) const { return resets >> (j % lanes) & 1; }
  PARARNN_FUNCTION bool pad(int j) const { return pads >> (j % lanes) & 1; }
};

// Row `number` of a tensor a state, (sequence, channel); null is zero.
PARARNN_FUNCTION void load_states(real (&x)[num_states][per_lane], const scalar* const* from,
                                  int64 number, const Place& at) {
#pragma unroll
  for (int n = 0; n < num_states; ++n) {
    if (from[n] != nullptr) {
      load(from[n] + number * channels + at.own, x[n], at.active);
    } else {
#pragma unroll
      for (int c = 0; c < per_lane; ++c) x[n][c] = constant(0);
    }
  }
}

PARARNN_FUNCTION void store_states(scalar* const* to, const real (&x)[num_states][per_lane],
                                   int64 number, const Place& at) {
#pragma unroll
  for (int n = 0; n < num_states; ++n)
    if (to[n] != nullptr)
      store<paired_channels>(to[n] + number * channels + at.own, x[n], at.active);
}

PARARNN_FUNCTION void clear(real (&x)[num_states][per_lane]) {
#pragma unroll
  for (int n = 0; n < num_states; ++n)
#pragma unroll
    for (int c = 0; c < per_lane; ++c) x[n][c] = constant(0);
}

// One channel of a row: its weights, and what its steps take.
struct Channel {
  const Inputs& in;
  const Place& at;
  const int number;
  real bias[num_gates], param[param_slots];

  static constexpr int words = num_gates + num_fields;

  PARARNN_FUNCTION Channel(const Inputs& in, const Place& at, int number)
      : in(in), at(at), number(number) {
#pragma unroll
    for (int g = 0; g < num_gates; ++g)
      bias[g] = in.bias != nullptr ? widen(in.bias[g * channels + number]) : constant(-0.0);
#pragma unroll
    for (int i = 0; i < num_params; ++i) param[i] = widen(in.params[i][number]);
  }
  // Pre-activations and fields at time t, in the first `words` of x.
  template <int size> PARARNN_FUNCTION void gather(int64 t, real (&x)[size]) const {
    const io* gate = in.gates + at.row * in.gate_row + t * in.time_stride() + in.gate_offset(number);
#pragma unroll
    for (int g = 0; g < num_gates; ++g) x[g] = widen(gate[g * in.gate_stride()]) + bias[g];
#pragma unroll
    for (int f = 0; f < num_fields; ++f)
      x[num_gates + f] = in.fields[f][at.row * in.field_row[f] + t * in.field_time[f] +
                                      (broadcast[f] ? 0 : number)];
  }
  // The place of time t in a tensor (row, time, channel).
  PARARNN_FUNCTION int64 place(int64 t) const { return (at.row * in.length + t) * channels + number; }
  PARARNN_FUNCTION real initial(int n) const {
    return in.initial[n] != nullptr ? in.initial[n][at.row * channels + number] : constant(0);
  }
};

}  // namespace pararnn
