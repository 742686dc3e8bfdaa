// Sizes that all targets share.
#pragma once

namespace pararnn {

constexpr int entries = num_states * num_states;     // of a step's Jacobian
constexpr int num_weights = num_gates + num_params;  // biases, then params
constexpr int sum_block = 64;  // steps of a partial sum over time: keeps long sums accurate

}  // namespace pararnn
