// The backward pass of a group: the adjoint, from the last step to the first. The step's products are not computed
// again: the forward pass has stored sums of them.
#pragma once
#include "../sums.h"
#include "group.h"

namespace pararnn {

constexpr int backward_operands = backward_first_operand[backward_stages];
constexpr int backward_count = backward_first_product[backward_stages];

// Returns the place of a right vector among those that are stored, -1 for one that a gate's gradient is anyway.
constexpr int right_place(int i) {
  constexpr bool shares = std::is_same<io, scalar>::value;  // nothing is rounded
  if (shares && gate_of_right[i] >= 0) return -1;
  int place = 0;
  for (int j = 0; j < i; ++j) place += !shares || gate_of_right[j] < 0;
  return place;
}

struct BackwardPass : BackwardProblem {
  Problem problem;
  Packed packed;

  explicit BackwardPass(const BackwardProblem& words)
      : BackwardProblem(words), problem{words.in}, packed(problem, backward_products, backward_count) {}

  void run() const {
    const Groups groups(problem, backward_count);
    run_tasks(groups.count(), groups.threads, problem.openmp, [&](int64 i) { run(groups[i]); });
  }

 private:
  // Gradients of weights: those of recent steps, and the total of others.
  struct Sums : Numbers {
    real *const recent, *const total;

    explicit Sums(const Group& group)
        : Numbers(group, backward_operands, backward_count, backward_carried, 2 * num_weights), recent(others),
          total(recent + num_weights * size / lanes) {}
  };

  // Loads the states before a row's step.
  struct Previous {
    const io* rows[num_states];
    const scalar* initial[num_states];

    Previous(const BackwardPass& pass, const Group& group, int64 row, int64 l) {
      const Problem& p = pass.problem;
      const int64 sequence = p.sequence(row, l);
      const bool reset = p.is_reset(row, l), begins = sequence != p.sequence(row, l - 1);
      for (int n = 0; n < num_states; ++n) {
        rows[n] = reset || begins ? nullptr : pass.states[n] + p.index(row, l - 1) + group.offset();
        initial[n] = reset || p.initial[n] == nullptr
                         ? nullptr
                         : p.initial[n] + sequence * p.width() + group.offset();
      }
    }

    template <class Count> void load_vector(int v, Count count, real* state) const {
      for (int n = 0; n < num_states; ++n)
        state[n] = rows[n] != nullptr      ? load(rows[n] + v * lanes, count)
                   : initial[n] != nullptr ? load(initial[n] + v * lanes, count)
                                           : real{};
    }
  };

  void run(const Group& group) const {
    const Problem& p = problem;
    Sums own(group);
    for (int64 l = p.length - 1; l >= 0; --l) {
      if (l > 0) prefetch_step(group, l - 1);
      arrive(group, own, l);
      pull<1>(group, own, l);
      leave(group, own, l);
    }
    group.for_each_vector([&](int v, int count) {
      for (int m = 0; m < group.rows; ++m)
        for (int i = 0; i < num_weights; ++i) {
          const int64 at = (m * group.vectors + v) * num_weights + i;
          store(partial + ((group.first + m) * num_weights + i) * p.width() + group.offset() + v * lanes,
                own.total[at] + own.recent[at], count);
        }
    });
  }

  // Fetches what a step reads: its sums, gates and fields, the states before it, and the gradients that arrive.
  void prefetch_step(const Group& group, int64 l) const {
    const Problem& p = problem;
    const int64 t = p.time(l);
    for (int m = 0; m < group.rows; ++m) {
      const int64 row = group.first + m;
      const RowInputs inputs(group, row, t);
      for (int i = 0; i < num_read_gates; ++i) prefetch(inputs.gates[read_gates[i]], group.channels);
      for (int i = 0; i < num_sums; ++i) prefetch(sums_of(group, sums, row, t) + i * p.width(), group.channels);
      for (int n = 0; n < num_states; ++n) {
        if (l > 0) prefetch(states[n] + p.index(row, l - 1) + group.offset(), group.channels);
        if (grad_states[n] != nullptr)
          prefetch(grad_states[n] + row * grad_row[n] + t * grad_time[n] + group.offset(), group.channels);
      }
    }
  }

  // Adds the gradients that arrive at a step's states.
  void arrive(const Group& group, Sums& own, int64 l) const {
    const Problem& p = problem;
    const int64 padded = group.padded(), t = p.time(l);
    for (int m = 0; m < group.rows; ++m) {
      const int64 row = group.first + m, sequence = p.sequence(row, l);
      const bool ends = sequence != p.sequence(row, l + 1);
      for (int n = 0; n < num_states; ++n) {
        scalar* adjoint = own.state + n * own.size + m * padded;
        const io* later = sequence < 0 || grad_states[n] == nullptr
                              ? nullptr
                              : grad_states[n] + row * grad_row[n] + t * grad_time[n] + group.offset();
        const scalar* at_end = sequence < 0 || grad_final[n] == nullptr
                                   ? nullptr
                                   : grad_final[n] + sequence * p.width() + group.offset();
        if (later == nullptr && !ends) continue;
        group.for_each_vector([&](int v, auto count) {
          real sum = !ends               ? load_as(adjoint + v * lanes)
                     : at_end != nullptr ? load(at_end + v * lanes, count)
                                         : real{};
          if (later != nullptr) sum += load(later + v * lanes, count);
          store_as(adjoint + v * lanes, sum);
        });
      }
    }
  }

  // Runs a stage and those after it. The first one, which needs no cotangent, has no products after it: it runs
  // together with the next.
  template <int stage> void pull(const Group& group, Sums& own, int64 l) const {
    constexpr auto runs = [](int result_stage) { return result_stage == stage || (stage == 1 && result_stage == 0); };
    const Problem& p = problem;
    const int64 padded = group.padded(), t = p.time(l);
    for (int m = 0; m < group.rows; ++m) {
      const int64 row = group.first + m;
      if (p.sequence(row, l) < 0) continue;
      const RowInputs inputs(group, row, t);
      const scalar* own_sums = sums_of(group, sums, row, t);
      const Previous previous(*this, group, row, l);
      io* to_gates[num_gates];
      for (int g = 0; g < num_gates; ++g)
        to_gates[g] = grad_gates + group.gate_offset(grad_gate_strides, row, g, t);
      const int64 in_row = row * p.length + t;
      const int64 steps = p.rows * p.length;
      group.for_each_vector([&](int v, auto count) PARARNN_INLINE {
        const int64 at = m * padded + v * lanes;
        const real* weights = own.weights + v * num_weights;
        real state[num_states], gate[num_gates], field[num_fields + 1], product[backward_count + 1];
        real cotangent[num_states], operand[backward_operands + 1], grad_state[num_states];
        real grad_gate[num_gates], grad_field[num_fields + 1], grad_param[num_params + 1];
        real left_of[num_lefts + 1], right_of[num_rights + 1], sum[num_sums + 1];
        for (int n = 0; n < num_states; ++n) cotangent[n] = load_as(own.state + n * own.size + at);
        for (int i = 0; i < backward_first_product[stage]; ++i)
          product[i] = load_as(own.product + (m * backward_count + i) * padded + v * lanes);
        real* carried = own.carried + (m * group.vectors + v) * backward_carried;
        if constexpr (stage == 1) {
          previous.load_vector(v, count, state);
          inputs.load_vector(v, count, weights, gate, field);
          for (int i = 0; i < num_sums; ++i) sum[i] = load(own_sums + i * p.width() + v * lanes, count);
          backward_stage<0>(state, gate, field, weights + num_gates, product, nullptr, sum, carried, operand, nullptr,
                            nullptr, nullptr, nullptr, left_of, right_of);
        }
        backward_stage<stage>(state, gate, field, weights + num_gates, product, cotangent, sum, carried, operand,
                              grad_state, grad_gate, grad_field, grad_param, left_of, right_of);
        for (int i = backward_first_operand[stage]; i < backward_first_operand[stage + 1]; ++i)
          store_as(own.operand + i * own.size + at, operand[i]);
        for (int n = 0; n < num_states; ++n)
          if (runs(backward_stage_of_state[n])) store_as(own.next + n * own.size + at, grad_state[n]);
        real* recent = own.recent + (m * group.vectors + v) * num_weights;
        for (int g = 0; g < num_gates; ++g)
          if (runs(backward_stage_of_gate[g])) {
            recent[g] += grad_gate[g];
            store(to_gates[g] + v * lanes, grad_gate[g], count);
          }
        for (int i = 0; i < num_params; ++i)
          if (runs(backward_stage_of_param[i])) recent[num_gates + i] += grad_param[i];
        for (int f = 0; f < num_fields; ++f)
          if (runs(backward_stage_of_field[f]) && grad_fields[f] != nullptr)
            store(grad_fields[f] + in_row * p.width() + group.offset() + v * lanes, grad_field[f], count);
        if (left == nullptr) return;
        for (int i = 0; i < num_lefts; ++i)
          if (runs(backward_stage_of_left[i]))
            store(left + ((i * p.heads + group.head) * steps + in_row) * group.channels + v * lanes,
                  left_of[i], count);
        for (int i = 0; i < num_rights; ++i)
          if (runs(backward_stage_of_right[i]) && right_place(i) >= 0)
            store(right + ((right_place(i) * p.heads + group.head) * steps + in_row) * group.channels + v * lanes,
                  right_of[i], count);
      });
    }
    if constexpr (stage + 1 < backward_stages) {
      multiply_round(group, packed, backward_products, backward_first_product, stage, group.rows, own.operand, own.size,
                     own.product, backward_count);
      pull<stage + 1>(group, own, l);
    }
  }

  // Hands the gradients of the states before a step on to the step before, or to the initial states.
  void leave(const Group& group, Sums& own, int64 l) const {
    const Problem& p = problem;
    const int64 padded = group.padded(), t = p.time(l);
    std::swap(own.state, own.next);
    for (int m = 0; m < group.rows; ++m) {
      const int64 row = group.first + m, sequence = p.sequence(row, l);
      const bool begins = sequence >= 0 && sequence != p.sequence(row, l - 1);
      const bool sums = l % sum_block == 0;
      scalar* adjoint = own.state + m * padded;
      if (sequence < 0) blank(group, row, t);
      if (sequence < 0 || p.is_reset(row, l))
        for (int n = 0; n < num_states; ++n)
          std::memset(adjoint + n * own.size, 0, padded * sizeof(scalar));
      if (!begins && !sums) continue;
      group.for_each_vector([&](int v, int count) {
        if (begins)
          for (int n = 0; n < num_states && grad_initial[n] != nullptr; ++n)
            store(grad_initial[n] + sequence * p.width() + group.offset() + v * lanes,
                  load_as(adjoint + n * own.size + v * lanes), count);
        for (int i = 0; sums && i < num_weights; ++i) {
          const int64 at = (m * group.vectors + v) * num_weights + i;
          own.total[at] += own.recent[at];
          own.recent[at] = real{};
        }
      });
    }
  }

  // Writes zeros for a step that is padding.
  void blank(const Group& group, int64 row, int64 t) const {
    const Problem& p = problem;
    const int64 in_row = row * p.length + t, steps = p.rows * p.length;
    group.for_each_vector([&](int v, int count) {
      for (int g = 0; g < num_gates; ++g)
        store(grad_gates + group.gate_offset(grad_gate_strides, row, g, t) + v * lanes, real{}, count);
      for (int f = 0; f < num_fields; ++f)
        if (grad_fields[f] != nullptr)
          store(grad_fields[f] + in_row * p.width() + group.offset() + v * lanes, real{}, count);
      if (left == nullptr) return;
      for (int i = 0; i < num_lefts; ++i)
        store(left + ((i * p.heads + group.head) * steps + in_row) * group.channels + v * lanes, real{}, count);
      for (int i = 0; i < num_rights; ++i)
        if (right_place(i) >= 0)
          store(right + ((right_place(i) * p.heads + group.head) * steps + in_row) * group.channels + v * lanes, real{}, count);
    });
  }
};

}  // namespace pararnn
