// Headers that both passes share.
//
// Needs, in addition to real.h and the emitted code: channels, head_width, per_lane (channels of a lane),
// steps (of a ring's stage), stages, chunk (bytes that may be copied at once; field_chunk: of fields),
// adjacent_gates (true if a step's gates of a head are contiguous), reverse, events (true if seq or reset is
// passed), broadcast (by field: one value a step for all channels), weight_io (the type of biases and params
// in memory).
#pragma once
#include "events.h"
#include "input_ring.h"
#include "one_channel.h"
