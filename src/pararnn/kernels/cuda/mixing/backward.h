// The backward pass: the adjoint, from the last step to the first. A block runs its rows of a head. What follows
// from no cotangent has been computed for all steps at once, see recompute.h.
#pragma once
#include "recompute.h"
#if PARARNN_CLUSTER
#include "scatter.h"
#endif

namespace pararnn {

#if PARARNN_CLUSTER
using AdjointProducts = ScatteredProducts<BackwardTables, backward_recomputed, backward_stages>;
#else
using AdjointProducts = Products<BackwardTables, backward_recomputed, backward_stages>;
#endif

struct BackwardPass {
  using Problem = BackwardProblem;
  using Saved = Stream<scalar, backward_saved>;
  using Arriving = Stream<io, 1>;
  static constexpr int ring_bytes = Saved::bytes + num_states * Arriving::bytes;  // of a warp
  static constexpr int bytes = AdjointProducts::bytes + warps * ring_bytes;
  static constexpr int first_pulled = backward_recomputed + 1;  // the first stage that needs cotangents

  // What a step reads.
  struct Step {
    Fragment<num_states> arriving;
    real carried[per_lane][backward_carried + 1];
    bool live[per_lane];  // numbers of a row's step that is no padding
  };

  const BackwardProblem& p;
  const Place place;
  const Weights weights;
  AdjointProducts products;
  Fragment<num_states> cotangent, adjoint, next;
  Fragment<num_gates> grad_gate;
  Fragment<num_weights + 1> recent, total;
  real grad_field[per_lane][field_slots];
  real left[num_lefts + 1][per_lane], right[num_rights + 1][per_lane];
  real product[backward_products_count + 1][per_lane];
  Step now, ahead;

  PARARNN_FUNCTION BackwardPass(const BackwardProblem& p, char* memory)
      : p(p), place(blockIdx.x / slices, p.first_row), weights(p.in, place), products(p.in, place.head, p.packed, memory) {}

  // Runs one stage of a step for a lane's number.
  template <int stage> PARARNN_FUNCTION void run_stage(int c, real (&operand)[backward_operands_count + 1]) {
    const auto own_param = weights.params.column(c);
    const auto own_cotangent = cotangent.column(c);
    real own_product[backward_products_count + 1];
    each<backward_products_count>([&](int i) { own_product[i] = product[i][c]; });
    auto own_next = next.column(c);
    auto own_grad_gate = grad_gate.column(c);
    real own_grad_param[param_slots], own_left[num_lefts + 1], own_right[num_rights + 1];
    backward_stage<stage>(nullptr, nullptr, nullptr, own_param, own_product, own_cotangent, now.carried[c], operand,
                          own_next, own_grad_gate, grad_field[c], own_grad_param, own_left, own_right);
    next.set_column(c, own_next);
    grad_gate.set_column(c, own_grad_gate);
    each<num_params>([&](int i) {
      if (backward_stage_of_param[i] == stage && now.live[c]) recent[num_gates + i][c] += own_grad_param[i];
    });
    each<num_lefts>([&](int i) {
      if (backward_stage_of_left[i] == stage) left[i][c] = own_left[i];
    });
    each<num_rights>([&](int i) {
      if (backward_stage_of_right[i] == stage) right[i][c] = own_right[i];
    });
  }

  // Runs a stage and those after it. `store(stage)` stores the results of a stage; `meanwhile`: work for the time
  // of the first products.
  template <int stage, class Store, class Work>
  PARARNN_FUNCTION void pull(const Store& store, const Work& meanwhile) {
    constexpr int first = backward_first_operand[stage], count = backward_first_operand[stage + 1] - first;
    Numbers operand[count + 1];
    each<per_lane>([&](int c) {
      real own_operand[backward_operands_count + 1];
      run_stage<stage>(c, own_operand);
      each<count>([&](int i) { operand[i][c] = own_operand[first + i]; });
    });
    if constexpr (stage + 1 < backward_stages) {
      each<count>([&](int i) { products.write(i, operand[i]); });
      products.template multiply<stage>(product, [&] {
        store(stage);
        meanwhile();
      });
      pull<stage + 1>(store, [] {});
    } else {
      store(stage);
      if constexpr (stage == first_pulled) {
        __syncwarp();
        meanwhile();
      }
    }
  }

  PARARNN_FUNCTION void run(char* ring) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    const int64 step = reverse ? 1 : -1, steps = in.rows * length;
    const int64 saved_time = step * channels * backward_saved * (int64)sizeof(scalar);
    Saved saved;
    Arriving arriving_states[num_states];
    const int64 last = time_of(in, length - 1);
    const auto row_of = [&](int column) { return place.first_row + column; };
    const int offset = place.head * head_width;
    saved.start(ring, [&](int i, int column, int unit) -> const scalar* {
      return row_of(column) < in.rows
                 ? p.saved + ((((row_of(column) - p.first_row) * length + last) * heads + place.head) * backward_saved + i) * head_width + unit
                 : nullptr;
    });
    each<num_states>([&](int n) {
      if (arriving[n])
        arriving_states[n].start(ring + Saved::bytes + n * Arriving::bytes, [&](int, int column, int unit) -> const io* {
          return row_of(column) < in.rows
                     ? p.grad_states[n] + row_of(column) * p.grad_row[n] + last * p.grad_time[n] + offset + unit
                     : nullptr;
        });
    });
    const auto arriving_time = [&](int n) { return step * p.grad_time[n] * (int64)sizeof(io); };
    __syncwarp();
    const auto copy = [&](int slot, int j) {
      const bool more = j + 1 < length;
      saved.copy(slot, saved_time, more);
      each<num_states>([&](int n) {
        if (arriving[n]) arriving_states[n].copy(slot, arriving_time(n), more);
      });
      end_group_of_copies();
    };
    for (int j = 0; j < steps_ahead; ++j) copy(j, j);
    Events event(in, place, -1);
    recent.fill(constant(0));
    total.fill(constant(0));
    each<per_lane>([&](int c) {
      each<num_states>([&](int n) { adjoint[n][c] = next[n][c] = constant(0); });
      const int64 row = place.row(side_of(c));
      if (!events && row < in.rows) load_states(adjoint, p.grad_final, row, place, c);
      each<num_gates>([&](int g) { grad_gate[g][c] = constant(0); });
    });
    // Where the lane's first number of each column goes.
    const int first_unit = unit_of(0);
    const int64 grad_time = step * p.grad_gate_strides.time, gap = gap_of(p.grad_gate_strides);
    io* to_gates[sides];
    vector_io *to_left[sides], *to_right[sides];
    int64 index[sides];  // of the row's step
    each<sides>([&](int side) {
      const int64 row = place.row(side);
      index[side] = row * length + last;
      to_gates[side] = p.grad_gates + gate_offset(p.grad_gate_strides, place.head, row, 0, last, first_unit);
      const int64 at = (place.head * steps + index[side]) * head_width;
      to_left[side] = p.left + at * num_lefts + first_unit;
      to_right[side] = p.right + at * num_rights + first_unit;
    });
    const auto store = [&](int stage) {
      each<per_lane>([&](int c) {
        const int side = side_of(c), offset = tile_of(c) * units + half_of(c);
        if (!place.stores(in, c)) return;
        const bool live = !events || now.live[c];
        each<num_gates>([&](int g) {
          if (backward_stage_of_gate[g] != stage) return;
          const real grad = live ? grad_gate[g][c] : constant(0);
          recent[g][c] += grad;
          to_gates[side][g * gap + offset] = narrow<io>(grad);
        });
        each<num_fields>([&](int f) {
          if (backward_stage_of_field[f] == stage)
            p.grad_fields[f][index[side] * channels + place.channel(c)] = live ? grad_field[c][f] : constant(0);
        });
        if (!vectors) return;
        each<num_lefts>([&](int i) {
          if (backward_stage_of_left[i] == stage)
            to_left[side][i * head_width + offset] = narrow<vector_io>(live ? left[i][c] : constant(0));
        });
        each<num_rights>([&](int i) {
          if (backward_stage_of_right[i] == stage)
            to_right[side][i * head_width + offset] = narrow<vector_io>(live ? right[i][c] : constant(0));
        });
      });
    };
    const auto read_ahead = [&](int slot, int l) {
      wait_for_step();
      const int j = length - 1 - l;  // steps so far
      if (steps_ahead > 0 || j < length) {
        each<backward_saved>([&](int i) {
          Numbers value;
          saved.read(slot, i, value, j * saved_time);
          each<per_lane>([&](int c) { ahead.carried[c][i] = value[c]; });
        });
        each<num_states>([&](int n) {
          if (arriving[n]) arriving_states[n].read(slot, 0, ahead.arriving[n], j * arriving_time(n));
        });
      }
      each<per_lane>([&](int c) {
        ahead.live[c] = place.exists(in, c) && !(events && l >= 0 && event.number(side_of(c), l) < 0);
      });
    };
    int slot = 0, free_slot = steps_ahead;
    read_ahead(slot, length - 1);
    for (int j = 0; j < length; ++j) {
      const int l = length - 1 - j;
      now = ahead;
      each<num_states>([&](int n) {
        each<per_lane>([&](int c) {
          const int side = side_of(c);
          if (events && event.end(side) && !event.pad(side))
            adjoint[n][c] = load_or(p.grad_final[n] + event.now[side] * channels + place.channel(c),
                                    p.grad_final[n] != nullptr && exists(c), constant(0));
          cotangent[n][c] = arriving[n] ? adjoint[n][c] + now.arriving[n][c] : adjoint[n][c];
        });
      });
      pull<first_pulled>(store, [&] {
        copy(free_slot, j + steps_ahead);
        slot = slot == steps_ahead ? 0 : slot + 1;
        free_slot = free_slot == steps_ahead ? 0 : free_slot + 1;
        read_ahead(slot, l - 1);
      });
      each<per_lane>([&](int c) {
        const int side = side_of(c);
        const bool pad = events && event.pad(side), stops = pad || (events && event.reset(side));
        each<num_states>([&](int n) { adjoint[n][c] = stops ? constant(0) : next[n][c]; });
        if (events && event.begin(side) && !pad) store_states(p.grad_initial, adjoint, event.now[side], place, c);
      });
      each<sides>([&](int side) {
        index[side] += step;
        to_gates[side] += grad_time;
        to_left[side] += step * num_lefts * head_width;
        to_right[side] += step * num_rights * head_width;
      });
      if (j % sum_block == 0) {
        each<num_weights>([&](int i) {
          each<per_lane>([&](int c) {
            total[i][c] += recent[i][c];
            recent[i][c] = constant(0);
          });
        });
      }
      if (events) event.next(l);
    }
    wait_for_copies<0>();
    products.finish();
    if (!events) each<per_lane>([&](int c) {
      const int64 row = place.row(side_of(c));
      if (row < in.rows) store_states(p.grad_initial, adjoint, row, place, c);
    });
    // Sums over the block's rows, always in the same order.
    const int64 span = place.first_row / columns;
    each<num_weights>([&](int i) {
      each<per_lane / sides>([&](int pair) {
        const int c = pair * sides;
        real sum = total[i][c] + recent[i][c];
        if (sides == 2) sum += total[i][c + sides - 1] + recent[i][c + sides - 1];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane() % 4 == 0 && stores(c)) p.partial[(span * num_weights + i) * channels + place.channel(c)] = sum;
      });
    });
  }
};

}  // namespace pararnn
