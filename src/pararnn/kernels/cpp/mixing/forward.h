// The forward pass of a group: from the first step to the last, stage by stage. Where states are given, each step
// starts from these.
#pragma once
#include "projection.h"

namespace pararnn {

constexpr int forward_operands = forward_first_operand[forward_stages];
constexpr int forward_count = forward_first_product[forward_stages];

struct ForwardPass : ForwardProblem {
  Problem problem;
  Packed packed;
  PackedWeight weights;

  explicit ForwardPass(const ForwardProblem& words)
      : ForwardProblem(words), problem{words.in}, packed(problem, forward_products, forward_count),
        weights(problem, words) {}

  void run() const {
    const Groups groups(problem, forward_count);
    run_tasks(groups.count(), groups.threads, problem.openmp, [&](int64 i) { run(groups[i]); });
  }

 private:
  void run(const Group& group) const {
    const Problem& p = problem;
    Numbers own(group, forward_operands, forward_count, forward_carried);
    ProjectedGates projected(group, *this, weights);
    const int64 padded = group.padded();
    for (int64 l = 0; l < p.length; ++l) {
      projected.reach(l);
      for (int m = 0; m < group.rows; ++m) {
        const int64 row = group.first + m, sequence = p.sequence(row, l);
        const bool zero = sequence < 0 || p.is_reset(row, l);
        own.sequence[m] = sequence;
        const bool goes_on = !zero && sequence == p.sequence(row, l - 1);
        if (goes_on && !given) continue;
        group.for_each_vector([&](int v, int count) {
          for (int n = 0; n < num_states; ++n) {
            const int64 at = group.offset() + v * lanes;
            store_as(own.state + n * own.size + m * padded + v * lanes,
                     goes_on                           ? load(states[n] + p.index(row, l - 1) + at, count)
                     : zero || p.initial[n] == nullptr ? real{}
                                                       : load(p.initial[n] + sequence * p.width() + at, count));
          }
        });
      }
      if (l + 1 < p.length && inputs == 0)
        for (int m = 0; m < group.rows; ++m)
          RowInputs(group, group.first + m, p.time(l + 1)).prefetch_channels(group.channels);
      run_stages<0>(group, own, projected, l);
      std::swap(own.state, own.next);
      if (given) continue;
      for (int m = 0; m < group.rows; ++m) {
        const int64 row = group.first + m, sequence = own.sequence[m];
        if (sequence >= 0 && sequence == p.sequence(row, l + 1)) continue;
        group.for_each_vector([&](int v, int count) {
          for (int n = 0; n < num_states; ++n) {
            const int64 at = group.offset() + v * lanes;
            if (sequence >= 0)
              store(final[n] + sequence * p.width() + at,
                    load_as(own.state + n * own.size + m * padded + v * lanes), count);
            else if (states[n] != nullptr)
              store(states[n] + p.index(row, l) + at, real{}, count);
          }
        });
      }
    }
  }

  template <int stage>
  void run_stages(const Group& group, Numbers& own, const ProjectedGates& projected, int64 l) const {
    const Problem& p = problem;
    const int64 padded = group.padded();
    for (int m = 0; m < group.rows; ++m) {
      if (own.sequence[m] < 0) continue;
      const int64 row = group.first + m, out = p.index(row, l) + group.offset();
      RowInputs inputs(group, row, p.time(l));
      projected.replace(inputs, m, l);
      scalar* to_sums = sums == nullptr ? nullptr : sums_of(group, sums, row, p.time(l));
      group.for_each_vector([&](int v, auto count) PARARNN_INLINE {
        const int64 at = m * padded + v * lanes;
        const real* weights = own.weights + v * num_weights;
        real state[num_states], gate[num_gates], field[num_fields + 1], product[forward_count + 1];
        real operand[forward_operands + 1], next[num_states], sum[num_sums + 1];
        for (int n = 0; n < num_states; ++n) state[n] = load_as(own.state + n * own.size + at);
        inputs.load_vector(v, count, weights, gate, field);
        for (int i = 0; i < forward_first_product[stage]; ++i)
          product[i] = load_as(own.product + (m * forward_count + i) * padded + v * lanes);
        forward_stage<stage>(state, gate, field, weights + num_gates, product,
                             own.carried + (m * group.vectors + v) * forward_carried, operand, next, sum);
        for (int i = 0; i < num_sums && to_sums != nullptr; ++i)
          if (forward_stage_of_sum[i] == stage) store(to_sums + i * p.width() + v * lanes, sum[i], count);
        for (int i = forward_first_operand[stage]; i < forward_first_operand[stage + 1]; ++i)
          store_as(own.operand + i * own.size + at, operand[i]);
        for (int n = 0; n < num_states; ++n)
          if (forward_stage_of_new_state[n] == stage) {
            store_as(own.next + n * own.size + at, next[n]);
            if (!given && states[n] != nullptr) store(states[n] + out + v * lanes, next[n], count);
          }
      });
    }
    if constexpr (stage + 1 < forward_stages) {
      multiply_round(group, packed, forward_products, forward_first_product, stage, group.rows, own.operand,
                     own.size, own.product, forward_count);
      run_stages<stage + 1>(group, own, projected, l);
    }
  }
};

}  // namespace pararnn
