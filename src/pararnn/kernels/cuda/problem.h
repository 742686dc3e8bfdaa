// What both passes have in common.
//
// Needs, besides real.h and the emitted code: channels, head_width, per_lane (channels a lane runs), steps
// (of a ring's stage), stages, chunk (bytes that may be copied at once; field_chunk: of fields),
// adjacent_gates (whether a step's gates of a head lie side by side), reverse, events (seq or reset given),
// broadcast (by field: one value a step for all channels), weight_io (the type of biases and params in
// memory).
#pragma once
#include "events.h"
#include "input_ring.h"
#include "one_channel.h"
