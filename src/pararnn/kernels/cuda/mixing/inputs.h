// Inputs of a step, and where they are: weights and events in registers.
//
// Times t are in the caller's order; l counts the steps of the recurrence.
#pragma once
#include "block.h"

namespace pararnn {

// The head and the columns of a block.
struct Place {
  int head;
  int64 first_row;

  PARARNN_FUNCTION explicit Place(int64 index) : head((int)(index % heads)), first_row(index / heads * columns) {}
  PARARNN_FUNCTION int channel(int c) const { return head * head_width + unit_of(c); }
  PARARNN_FUNCTION int64 row(int side) const { return first_row + column_of_side(side); }
  // Returns true if a lane's number is one of a row and a unit.
  PARARNN_FUNCTION bool exists(const Inputs& in, int c) const {
    return (whole || row(side_of(c)) < in.rows) && pararnn::exists(c);
  }
  PARARNN_FUNCTION bool stores(const Inputs& in, int c) const {
    return (whole || row(side_of(c)) < in.rows) && pararnn::stores(c);
  }
};

// Adds the biases of gates.
PARARNN_FUNCTION void add_bias(Fragment<num_gates>& gate, const Fragment<num_gates>& bias) {
  each<num_gates>([&](int g) { each<per_lane>([&](int c) { gate[g][c] += bias[g][c]; }); });
}

constexpr int64 time_step = reverse ? -1 : 1;  // from a step of the recurrence to the next
PARARNN_FUNCTION int64 time_of(const Inputs& in, int l) { return reverse ? (int)in.length - 1 - l : l; }

PARARNN_FUNCTION int64 gate_offset(const GateStrides& strides, int head, int64 row, int gate, int64 t, int unit) {
  return row * strides.row + t * strides.time + gate * strides.gate + head * strides.head + unit;
}
PARARNN_FUNCTION int64 gap_of(const GateStrides& strides) { return gate_gap > 0 ? gate_gap : strides.gate; }

PARARNN_FUNCTION const io* gate_address(const Inputs& in, int head, int64 row, int gate, int64 t, int unit) {
  return in.gates + gate_offset(in.gate_strides, head, row, gate, t, unit);
}

struct Weights {
  Fragment<num_gates> bias;
  Fragment<param_slots> params;

  PARARNN_FUNCTION Weights(const Inputs& in, const Place& place) {
    each<per_lane>([&](int c) {
      each<num_gates>([&](int g) {  // x + -0 is x, also for -0
        bias[g][c] = in.bias == nullptr ? constant(-0.0)
                                        : load_or(in.bias + g * channels + place.channel(c), exists(c), constant(0));
      });
      each<num_params>([&](int i) {
        params[i][c] = load_or(in.params[channel_params[i]] + place.channel(c), exists(c), constant(0));
      });
    });
  }
};

// Inputs of a step: pre-activations with their biases, and fields.
struct StepInputs {
  Fragment<num_gates> gate;
  real field[per_lane][field_slots];
};

// Loads the fields of a lane's number at a step of a row.
PARARNN_FUNCTION void load_fields(const Inputs& in, const Place& place, int64 row, int64 t, int c, bool there,
                                  real (&field)[field_slots]) {
  each<num_fields>([&](int f) {
    const scalar* source = in.fields[f] + row * in.field_row[f] + t * in.field_time[f];
    field[f] = load_or(source + (broadcast[f] ? 0 : place.channel(c)), there, constant(0));
  });
}
// Loads those of all numbers of a lane at step l, zero after the last one.
PARARNN_FUNCTION void load_fields(const Inputs& in, const Place& place, int l, StepInputs& inputs) {
  if constexpr (num_fields > 0) {
    each<per_lane>([&](int c) {
      const int64 row = place.row(side_of(c));
      const bool there = place.exists(in, c) && l >= 0 && l < (int)in.length;
      load_fields(in, place, row, time_of(in, l), c, there, inputs.field[c]);
    });
  }
}

// Loads row `number` of each state's tensor, (sequence, channel), into a lane's number; null is zero.
PARARNN_FUNCTION void load_states(Fragment<num_states>& x, const scalar* const* source, int64 number,
                                  const Place& place, int c) {
  each<num_states>([&](int n) {
    x[n][c] = load_or(source[n] + number * channels + place.channel(c), source[n] != nullptr && exists(c),
                      constant(0));
  });
}
PARARNN_FUNCTION void store_states(scalar* const* target, const Fragment<num_states>& x, int64 number,
                                   const Place& place, int c) {
  each<num_states>([&](int n) {
    if (target[n] != nullptr && stores(c)) target[n][number * channels + place.channel(c)] = x[n][c];
  });
}

// The sequence of a row's step, and what happens there; both columns of a lane.
struct Events {
  const Inputs& in;
  const Place& place;
  int steps;
  int order;                         // of processing: 1 if step j is l = j, otherwise -1
  int before[sides], now[sides], after[sides];  // numbers of sequences: of the steps l - 1, l, l + 1
  bool resets[sides], next_resets[sides];

  PARARNN_FUNCTION Events(const Inputs& in, const Place& place, int order)
      : in(in), place(place), steps((int)in.length), order(order) {
    const int l = order > 0 ? 0 : steps - 1;
    each<sides>([&](int side) {
      (order > 0 ? before : after)[side] = -2;
      now[side] = number(side, l);
      (order > 0 ? after : before)[side] = number(side, l + order);
      resets[side] = is_reset(side, l);
      next_resets[side] = is_reset(side, l + order);
    });
  }
  PARARNN_FUNCTION int number(int side, int l) const {
    const int64 row = place.row(side);
    if (l < 0 || l >= steps || row >= in.rows) return -2;
    return in.seq == nullptr ? (int)row : in.seq[row * steps + time_of(in, l)];
  }
  PARARNN_FUNCTION bool is_reset(int side, int l) const {
    const int64 row = place.row(side);
    return in.reset != nullptr && l >= 0 && l < steps && row < in.rows && in.reset[row * steps + time_of(in, l)];
  }
  // Goes on from step l to the next one.
  PARARNN_FUNCTION void next(int l) {
    each<sides>([&](int side) {
      (order > 0 ? before : after)[side] = now[side];
      now[side] = (order > 0 ? after : before)[side];
      (order > 0 ? after : before)[side] = number(side, l + 2 * order);
      resets[side] = next_resets[side];
      next_resets[side] = is_reset(side, l + 2 * order);
    });
  }
  PARARNN_FUNCTION bool pad(int side) const { return now[side] < 0; }
  PARARNN_FUNCTION bool begin(int side) const { return now[side] != before[side]; }
  PARARNN_FUNCTION bool end(int side) const { return now[side] != after[side]; }
  PARARNN_FUNCTION bool reset(int side) const { return resets[side]; }
};

}  // namespace pararnn
