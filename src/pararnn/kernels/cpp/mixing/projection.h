// Gates that a forward pass projects by itself, a few steps at a time: they stay in the cache, and nobody allocates
// memory for those of a whole sequence.
#pragma once
#include "group.h"

namespace pararnn {

constexpr int64 projected_numbers = 32768;  // gates of a group that are there at once

// The weight of the projection, packed: [head][gate][vector][input][lane].
struct PackedWeight {
  int64 one;  // numbers of a head
  Storage memory;

  PackedWeight(const Problem& p, const ForwardProblem& words)
      : one(num_gates * ((p.channels + lanes - 1) / lanes) * lanes * words.inputs),
        memory(p.heads * one * sizeof(scalar), false) {
    if (words.inputs == 0) return;
    run_tasks(p.heads * num_gates, threads_for(p, p.heads * one), p.openmp, [&](int64 i) {
      const int64 head = i / num_gates, gate = i % num_gates;
      const scalar* first = words.weight + head * words.weight_head + gate * words.weight_gate;
      pack(first, words.inputs, true, words.inputs, p.channels, memory.as<scalar>() + i * (one / num_gates));
    });
  }
};

// The gates of a group's rows: [row][step][gate][padded channel].
struct ProjectedGates {
  const Group& group;
  const ForwardProblem& words;
  const scalar* weight;
  int64 padded, steps, begin = 0, end = 0;  // the steps that are there
  Storage inputs, gates;

  ProjectedGates(const Group& group, const ForwardProblem& words, const PackedWeight& packed)
      : group(group), words(words), weight(packed.memory.as<scalar>() + group.head * packed.one),
        padded(group.padded()),
        steps(words.inputs == 0 ? 0
                                : std::min(group.problem.length,
                                           1 + projected_numbers / (group.rows * num_gates * padded))),
        inputs(group.rows * steps * words.inputs * sizeof(scalar), false),
        gates(group.rows * steps * num_gates * padded * sizeof(scalar), false) {}

  // Projects the inputs of the next steps, if those before `step` are all that is there.
  void reach(int64 step) {
    if (words.inputs == 0 || step < end) return;
    const Problem& p = group.problem;
    begin = step, end = std::min(p.length, step + steps);
    scalar* to = inputs.as<scalar>();
    for (int m = 0; m < group.rows; ++m)
      for (int64 l = begin; l < end; ++l, to += words.inputs)
        std::memcpy(to, words.x + (group.first + m) * words.x_row + p.time(l) * words.x_time + group.head * words.x_head,
                    words.inputs * sizeof(scalar));
    multiply(group.rows * (end - begin), inputs.as<scalar>(), words.inputs, weight, words.inputs,
             num_gates * group.vectors, gates.as<scalar>(), num_gates * padded);
  }

  // Has a row's step read its gates here. Calls whose gates have another type than these are given them.
  void replace(RowInputs& row, int m, int64 l) const {
    if (words.inputs == 0) return;
    const scalar* first = gates.as<scalar>() + (m * (end - begin) + l - begin) * num_gates * padded;
    for (int g = 0; g < num_gates; ++g) row.gates[g] = (const io*)(first + g * padded);
  }
};

}  // namespace pararnn
