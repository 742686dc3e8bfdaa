// The forward pass: a block runs its rows of a head from the first step to the last.
#pragma once
#include "inputs.h"
#include "products.h"
#include "ring.h"

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
  using Gates = Reads<io, num_gates, 0>;
  using State = Writes<io, 1, Gates::end>;
  static constexpr int rings_start = ForwardProducts::bytes, bytes = rings_start + rings_bytes;
  static_assert(!reads_slots || Gates::bytes + num_states * State::bytes == ports_bytes);

  // Where numbers of the first step are.
  static PARARNN_FUNCTION Layout<io> gates_layout(const Inputs& in, const Place& place) {
    const GateStrides& strides = in.gate_strides;
    const io* first = gate_address(in, place.head, place.first_row, 0, time_of(in, 0), 0);
    return {const_cast<io*>(first), strides.row, gap_of(strides), time_step * strides.time};
  }
  static PARARNN_FUNCTION Layout<io> state_layout(const ForwardProblem& p, const Place& place, int n) {
    const int64 at = place.first_row * p.in.length + time_of(p.in, 0);
    return {p.states[n] + at * channels + place.head * head_width, p.in.length * channels, 0, time_step * channels};
  }

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

  static PARARNN_FUNCTION void help(const ForwardProblem& p, char* memory) {
    open_slots(memory + rings_start);
    meet_block();
    const Place place(blockIdx.x / slices);
    Copies<Gates> gates;
    Copies<State> states[num_states];
    gates.open(gates_layout(p.in, place), p.in, place.first_row);
    each<num_states>([&](int n) { states[n].open(state_layout(p, place, n), p.in, place.first_row); });
    serve_steps(
        memory + rings_start, (int)p.in.length, [&](char* slot, bool more) { gates.load(slot, more); },
        [&](char* slot) { each<num_states>([&](int n) { states[n].store(slot + n * State::bytes); }); });
    meet_block();
  }

  PARARNN_FUNCTION void run(char* memory) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    Gates gates;
    State states[num_states];
    Copies<Gates> copies;
    gates.open(gates_layout(in, place), in, place.first_row);
    each<num_states>([&](int n) { states[n].open(state_layout(p, place, n), in, place.first_row); });
    Turn reads{ring_of(memory + rings_start)}, writes = reads, fills = reads;
    const auto load = [&](char* slot, bool more) { copies.load(slot, more); };
    if constexpr (!has_helpers) {
      copies.open(gates_layout(in, place), in, place.first_row);
      open_slots(memory + rings_start);
      copy_first(fills, load, length);
    }
    Events event(in, place, 1);
    each<per_lane>([&](int c) {
      each<num_states>([&](int n) { state[n][c] = next[n][c] = constant(0); });
      const int64 row = place.row(side_of(c));
      if (!events && row < in.rows) load_states(state, in.initial, row, place, c);
    });
    // Writes the state, which is that after a step, and ends the step: unless it is the first one, which is written
    // over.
    const auto write_step = [&](bool ends) {
      each<num_states>([&](int n) {
        each<per_lane>([&](int c) { states[n].write(writes.slot() + n * State::bytes, 0, c, state[n][c]); });
        states[n].next(ends);
      });
      if (!has_helpers || !ends) return;
      writes.release();
      writes.next();
    };
    const auto read_ahead = [&](int l) {
      if (reads_slots || l < length) {
        reads.wait_for_numbers();
        each<num_gates>([&](int g) { gates.read(reads.slot(), g, ahead.gate[g]); });
        gates.next();
        reads.next();
      }
      load_fields(in, place, l, ahead);
    };
    read_ahead(0);
    for (int l = 0; l < length; ++l) {
      inputs = ahead;
      add_bias(inputs.gate, weights.bias);
      if (events) each<per_lane>([&](int c) {
        const int side = side_of(c);
        if (event.pad(side) || event.reset(side)) each<num_states>([&](int n) { state[n][c] = constant(0); });
        else if (event.begin(side)) load_states(state, in.initial, event.now[side], place, c);
      });
      run_stages<0>([&] {
        if (!events) write_step(l > 0);
        copy_ahead(fills, load, l + slots < length);
        read_ahead(l + 1);
      });
      each<per_lane>([&](int c) {
        const bool pad = events && event.pad(side_of(c));
        each<num_states>([&](int n) { state[n][c] = pad ? constant(0) : next[n][c]; });
        if (events && event.end(side_of(c)) && !pad) store_states(p.final, state, event.now[side_of(c)], place, c);
      });
      if (events) {
        write_step(true);
        event.next(l);
      }
    }
    if (!events) write_step(true);
    wait_for_copies<0>();
    meet_block();
    if (events) return;
    each<per_lane>([&](int c) {
      const int64 row = place.row(side_of(c));
      if (row < in.rows) store_states(p.final, state, row, place, c);
    });
  }
};

}  // namespace pararnn
