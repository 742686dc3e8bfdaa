// Inputs of both passes: the struct Inputs, which is emitted with the other structs of a launch
// (codegen/interface.py), and its strides.
//
// Channels d = head * head_width + j are contiguous in all tensors except gates, whose heads have a stride.
// Times t are in the caller's order; steps j are in processing order: l = j in the forward pass and l =
// length - 1 - j in the backward one.
#pragma once
#include "ring.h"
#include "../../common/sizes.h"

namespace pararnn {

PARARNN_FUNCTION constexpr int at_least_1(int n) { return n > 0 ? n : 1; }
constexpr int field_slots = at_least_1(num_fields), param_slots = at_least_1(num_params);

PARARNN_FUNCTION int64 gate_stride(const Inputs& in) {
  return adjacent_gates ? head_width : in.gate_strides.gate;
}
PARARNN_FUNCTION int64 time_stride(const Inputs& in) {
  return adjacent_gates ? num_gates * head_width : in.gate_strides.time;
}
PARARNN_FUNCTION int64 gate_offset(const Inputs& in, int channel) {
  return channel / head_width * in.gate_strides.head + channel % head_width;
}

// Time of step `begin`. Processing runs by `direction`, from the first or from the last time on.
PARARNN_FUNCTION int64 time_of(const Inputs& in, int direction, int begin) {
  return direction > 0 ? begin : in.length - 1 - begin;
}

}  // namespace pararnn
