// One channel of a row, for lanes that each run some of its steps. See mend.h and bridge.h.
#pragma once
#include "tile.h"

namespace pararnn {

// One channel of a row: its weights, and the inputs of its steps.
struct Channel {
  const Inputs& in;
  const Tile& tile;
  const int number;
  real bias[num_gates], param[param_slots];

  static constexpr int words = num_gates + num_fields;

  PARARNN_FUNCTION Channel(const Inputs& in, const Tile& tile, int number)
      : in(in), tile(tile), number(number) {
    each<num_gates>([&](int g) {
      bias[g] = in.bias != nullptr ? widen(in.bias[g * channels + number]) : constant(-0.0);
    });
    each<num_params>([&](int i) { param[i] = widen(in.params[i][number]); });
  }
  // Loads pre-activations and fields at time t into the first `words` of x.
  template <int size> PARARNN_FUNCTION void gather(int64 t, real (&x)[size]) const {
    const io* gate = in.gates + tile.row * in.gate_strides.row + t * time_stride(in) + gate_offset(in, number);
    each<num_gates>([&](int g) { x[g] = widen(gate[g * gate_stride(in)]) + bias[g]; });
    each<num_fields>([&](int f) {
      x[num_gates + f] = in.fields[f][tile.row * in.field_row[f] + t * in.field_time[f] +
                                      (broadcast[f] ? 0 : number)];
    });
  }
  // Index of time t in a tensor (row, time, channel).
  PARARNN_FUNCTION int64 index(int64 t) const { return (tile.row * in.length + t) * channels + number; }
  PARARNN_FUNCTION real initial(int n) const {
    return in.initial[n] != nullptr ? in.initial[n][tile.row * channels + number] : constant(0);
  }
};

}  // namespace pararnn
