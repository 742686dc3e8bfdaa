// Inputs of a step, and the ring that they travel through.
#pragma once
#include "tile.h"

namespace pararnn {

struct Weights {
  real bias[num_gates][per_lane], params[param_slots][per_lane];

  PARARNN_FUNCTION Weights(const Inputs& in, const Tile& tile) {
    each<num_gates>([&](int g) {
      if (in.bias != nullptr) load(in.bias + g * channels + tile.channel, bias[g], tile.active);
      else each<per_lane>([&](int c) { bias[g][c] = constant(-0.0); });  // x + -0 is x, also for -0
    });
    each<num_params>([&](int i) { load(in.params[i] + tile.channel, params[i], tile.active); });
  }
};

template <int f, int direction> struct FieldStreams {
  Stream<scalar, 1, broadcast[f] ? 1 : tile_channels, broadcast[f] ? (int)sizeof(scalar) : field_chunk> own;
  FieldStreams<f + 1, direction> rest;
  int64 time;

  static constexpr int stage_bytes =
      decltype(own)::stage_bytes + FieldStreams<f + 1, direction>::stage_bytes;

  PARARNN_FUNCTION void start(char* ring, int start_byte, const Inputs& in, const Tile& tile,
                              int begin) {
    time = direction * in.field_time[f];
    const scalar* origin = in.fields[f] + tile.row * in.field_row[f] +
                           time_of(in, direction, begin) * in.field_time[f];
    own.start(ring, start_byte, time, [&](int e) -> const scalar* {
      if (broadcast[f]) return origin;
      return tile.first + e < channels ? origin + tile.first + e : nullptr;
    });
    rest.start(ring, start_byte + stages * decltype(own)::stage_bytes, in, tile, begin);
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
  PARARNN_FUNCTION void start(char*, int, const Inputs&, const Tile&, int) {}
  PARARNN_FUNCTION void copy(int, int, int) const {}
  PARARNN_FUNCTION void next_stage() {}
  PARARNN_FUNCTION void read(int, int, real (*)[per_lane]) const {}
};

// Inputs of a step: pre-activations with their biases, and fields.
struct StepInputs {
  real gate[num_gates][per_lane], field[field_slots][per_lane];
};

// The ring of gates and fields. `direction`: of processing through time. `gated`: true if gates are read.
template <int direction, bool gated = true> struct InputRing {
  using Gates = Stream<io, num_gates, tile_channels, chunk>;
  using Fields = FieldStreams<0, direction>;
  static constexpr int gate_bytes = gated ? Gates::bytes : 0;
  static constexpr int bytes = gate_bytes + stages * Fields::stage_bytes;

  using Values = StepInputs;

  const Weights& weights;
  Gates gates;
  Fields fields;
  int64 time, between;

  PARARNN_FUNCTION InputRing(char* ring, const Inputs& in, const Tile& tile, const Weights& weights,
                             int begin)
      : weights(weights),
        time(direction * time_stride(in)),
        between(gate_stride(in)) {
    const io* origin =
        in.gates + tile.row * in.gate_strides.row + time_of(in, direction, begin) * time_stride(in);
    if (gated) gates.start(ring, 0, time, [&](int e) -> const io* {
      return tile.first + e < channels ? origin + gate_offset(in, tile.first + e) : nullptr;
    });
    fields.start(ring, gate_bytes, in, tile, begin);
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
    each<num_gates>([&](int g) {
      if (gated) gates.read(slot, s, g, values.gate[g]);
      each<per_lane>([&](int c) {
        values.gate[g][c] = gated ? values.gate[g][c] + weights.bias[g][c] : constant(0);
      });
    });
    fields.read(slot, s, values.field);
  }
};

}  // namespace pararnn
