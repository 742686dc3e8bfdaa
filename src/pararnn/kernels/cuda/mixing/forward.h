// The forward pass: a block runs its rows of a head from the first step to the last.
#pragma once
#include "inputs.h"
#include "products.h"

namespace pararnn {

struct ForwardTables {
  static constexpr int stages = forward_stages;
  static constexpr const int* first_operand = forward_first_operand;
  static constexpr const int* first_product = forward_first_product;
  static constexpr const Product* products = forward_products;
};
using ForwardProducts = Products<ForwardTables, 0, forward_stages>;

constexpr int forward_products_count = forward_first_product[forward_stages];
constexpr int forward_operands_count = forward_first_operand[forward_stages];

struct ForwardPass {
  using Problem = ForwardProblem;
  using Gates = Stream<io, num_gates>;
  static constexpr int ring_bytes = Gates::bytes;  // of a warp
  static constexpr int bytes = ForwardProducts::bytes + warps * ring_bytes;

  const ForwardProblem& p;
  const Place place;
  const Weights weights;
  ForwardProducts products;
  Fragment<num_states> state, next;
  StepInputs inputs, ahead;  // of a step, and of the next one
  real carried[per_lane][forward_carried + 1];
  real product[forward_products_count + 1][per_lane];

  PARARNN_FUNCTION ForwardPass(const ForwardProblem& p, char* memory)
      : p(p), place(blockIdx.x / slices), weights(p.in, place), products(p.in, place.head, p.packed, memory) {}

  // Runs a stage and those after it. `meanwhile`: work for the time of the first products.
  template <int stage, class Work> PARARNN_FUNCTION void run_stages(const Work& meanwhile) {
    constexpr int first = forward_first_operand[stage], count = forward_first_operand[stage + 1] - first;
    Numbers operand[count + 1];
    each<per_lane>([&](int c) {
      const auto own_state = state.column(c);
      const auto own_gate = inputs.gate.column(c);
      const auto own_param = weights.params.column(c);
      real own_product[forward_products_count + 1], own_operand[forward_operands_count + 1];
      each<forward_products_count>([&](int i) { own_product[i] = product[i][c]; });
      auto own_next = next.column(c);
      forward_stage<stage>(own_state, own_gate, inputs.field[c], own_param, own_product, carried[c], own_operand,
                           own_next);
      next.set_column(c, own_next);
      each<count>([&](int i) { operand[i][c] = own_operand[first + i]; });
    });
    if constexpr (stage + 1 < forward_stages) {
      each<count>([&](int i) { products.write(i, operand[i]); });
      products.template multiply<stage>(product, meanwhile);
      run_stages<stage + 1>([] {});
    }
  }

  PARARNN_FUNCTION void run(char* ring) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    const int64 step = reverse ? -1 : 1;
    const int64 time_bytes = step * in.gate_strides.time * (int64)sizeof(io);
    Gates gates;
    gates.start(ring, [&](int g, int column, int unit) -> const io* {
      const int64 row = place.first_row + column;
      return row < in.rows ? gate_address(in, place.head, row, g, time_of(in, 0), unit) : nullptr;
    });
    __syncwarp();
    for (int l = 0; l < steps_ahead; ++l) {
      gates.copy(l, time_bytes, l + 1 < length);
      end_group_of_copies();
    }
    Events event(in, place, 1);
    each<per_lane>([&](int c) {
      each<num_states>([&](int n) { state[n][c] = next[n][c] = constant(0); });
      const int64 row = place.row(side_of(c));
      if (!events && row < in.rows) load_states(state, in.initial, row, place, c);
    });
    const int first_channel = place.head * head_width + unit_of(0);
    io* out[num_states][sides];  // where the lane's first number of each column goes
    each<num_states>([&](int n) {
      each<sides>([&](int side) {
        out[n][side] = p.states[n] + (place.row(side) * length + time_of(in, 0)) * channels + first_channel;
      });
    });
    const auto store_step = [&] {
      each<per_lane>([&](int c) {
        if (!place.stores(in, c)) return;
        each<num_states>([&](int n) {
          out[n][side_of(c)][tile_of(c) * units + half_of(c)] = narrow<io>(state[n][c]);
        });
      });
      each<num_states>([&](int n) { each<sides>([&](int side) { out[n][side] += step * channels; }); });
    };
    const auto read_ahead = [&](int slot, int l) {
      wait_for_step();
      if (steps_ahead > 0 || l < length)
        each<num_gates>([&](int g) { gates.read(slot, g, ahead.gate[g], l * time_bytes); });
      load_fields(in, place, l, ahead);
    };
    int slot = 0, free_slot = steps_ahead;
    read_ahead(slot, 0);
    for (int l = 0; l < length; ++l) {
      inputs = ahead;
      add_bias(inputs.gate, weights.bias);
      if (events) each<per_lane>([&](int c) {
        const int side = side_of(c);
        if (event.pad(side) || event.reset(side)) each<num_states>([&](int n) { state[n][c] = constant(0); });
        else if (event.begin(side)) load_states(state, in.initial, event.now[side], place, c);
      });
      run_stages<0>([&] {
        if (!events && l > 0) store_step();
        gates.copy(free_slot, time_bytes, l + steps_ahead + 1 < length);
        end_group_of_copies();
        slot = slot == steps_ahead ? 0 : slot + 1;
        free_slot = free_slot == steps_ahead ? 0 : free_slot + 1;
        read_ahead(slot, l + 1);
      });
      each<per_lane>([&](int c) {
        const bool pad = events && event.pad(side_of(c));
        each<num_states>([&](int n) { state[n][c] = pad ? constant(0) : next[n][c]; });
        if (events && event.end(side_of(c)) && !pad) store_states(p.final, state, event.now[side_of(c)], place, c);
      });
      if (events) {
        store_step();
        event.next(l);
      }
    }
    wait_for_copies<0>();
    products.finish();
    if (events) return;
    store_step();
    each<per_lane>([&](int c) {
      const int64 row = place.row(side_of(c));
      if (row < in.rows) store_states(p.final, state, row, place, c);
    });
  }
};

}  // namespace pararnn
