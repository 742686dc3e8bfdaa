// The forward pass: a block runs its rows of a head from the first step to the last. Where states are given, each step
// starts from these.
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
  using Before = Reads<io, given ? 1 : 0, Gates::end>;
  using State = Writes<io, given ? 0 : 1, Gates::end + num_states * Before::bytes>;
  using Sums = Writes<scalar, gives_sums ? num_sums : 0, Gates::end + num_states * (Before::bytes + State::bytes)>;
  static constexpr int rings_start = ForwardProducts::bytes, bytes = rings_start + rings_bytes;
  static_assert(!reads_slots || Sums::end == ports_bytes);

  // Where numbers of the first step are; of given states, those before the second one.
  static PARARNN_FUNCTION Layout<io> gates_layout(const Inputs& in, const Place& place) {
    const GateStrides& strides = in.gate_strides;
    const io* first = gate_address(in, place.head, place.first_row, 0, time_of(in, 0), 0);
    return {const_cast<io*>(first), strides.row, gap_of(strides), time_step * strides.time};
  }
  static PARARNN_FUNCTION Layout<io> state_layout(const ForwardProblem& p, const Place& place, int n) {
    const int64 at = place.first_row * p.in.length + time_of(p.in, 0);
    return {p.states[n] + at * channels + place.head * head_width, p.in.length * channels, 0, time_step * channels};
  }
  static PARARNN_FUNCTION Layout<scalar> sums_layout(const ForwardProblem& p, const Place& place) {
    constexpr int64 step = num_sums * channels;
    const int64 at = place.first_row * p.in.length + time_of(p.in, 0);
    return {p.sums + at * step + place.head * head_width, p.in.length * step, channels, time_step * step};
  }

  const ForwardProblem& p;
  const Place place;
  const Weights weights;
  ForwardProducts products;
  Fragment<num_states> state, next;
  StepInputs inputs, ahead;  // of a step, and of the next one
  Fragment<num_states> before;  // of the next step, where it is given
  real carried[per_lane][forward_carried + 1];
  real product[forward_products_count + 1][per_lane], rest[forward_products_count + 1][per_lane];
  real sum[num_sums + 1][per_lane];

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
      real own_product[forward_products_count + 1], own_operand[forward_operands_count + 1], own_sum[num_sums + 1];
      each<forward_products_count>([&](int i) { own_product[i] = product[i][c]; });
      auto own_next = next.column(c);
      forward_stage<stage>(own_state, own_gate, inputs.field[c], own_param, own_product, carried[c], own_operand,
                           own_next, own_sum);
      next.set_column(c, own_next);
      each<num_sums>([&](int i) {
        if (forward_stage_of_sum[i] == stage) sum[i][c] = own_sum[i];
      });
      each<count>([&](int i) { operand[i][c] = own_operand[first + i]; });
    });
    if constexpr (stage + 1 < forward_stages) {
      each<count>([&](int i) { products.write(i, operand[i]); });
      products.template multiply<stage>(product, rest, meanwhile);
      run_stages<stage + 1>([] {});
    }
  }

  // A warp's copies of what steps read.
  struct Loads {
    Copies<Gates> gates;
    Copies<Before> states[num_states];
    bool first = true;

    PARARNN_FUNCTION Loads(const ForwardProblem& p, const Place& place) {
      gates.open(gates_layout(p.in, place), p.in, place.first_row);
      each<num_states>([&](int n) {
        if (given) states[n].open(state_layout(p, place, n), p.in, place.first_row);
      });
    }
    PARARNN_FUNCTION void load(char* slot, bool more) {
      gates.load(slot, more);
      if (!given) return;
      each<num_states>([&](int n) { states[n].load(slot + n * Before::bytes, more && !first); });
      first = false;
    }
  };

  static PARARNN_FUNCTION void help(const ForwardProblem& p, char* memory) {
    open_slots(memory + rings_start);
    meet_block();
    const Place place(blockIdx.x / slices);
    Loads loads(p, place);
    Copies<State> states[num_states];
    Copies<Sums> sums;
    each<num_states>([&](int n) { states[n].open(state_layout(p, place, n), p.in, place.first_row); });
    sums.open(sums_layout(p, place), p.in, place.first_row);
    serve_steps(
        memory + rings_start, (int)p.in.length, [&](char* slot, bool more) { loads.load(slot, more); },
        [&](char* slot) {
          each<num_states>([&](int n) { states[n].store(slot + n * State::bytes); });
          sums.store(slot);
        });
    meet_block();
  }

  PARARNN_FUNCTION void run(char* memory) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    Gates gates;
    State states[num_states];
    Before states_before[num_states];
    Sums sums_of_steps;
    gates.open(gates_layout(in, place), in, place.first_row);
    each<num_states>([&](int n) { states[n].open(state_layout(p, place, n), in, place.first_row); });
    each<num_states>([&](int n) { states_before[n].open(state_layout(p, place, n), in, place.first_row); });
    sums_of_steps.open(sums_layout(p, place), in, place.first_row);
    Turn reads{ring_of(memory + rings_start)}, writes = reads, fills = reads;
    Loads loads(p, place);
    const auto load = [&](char* slot, bool more) { loads.load(slot, more); };
    if constexpr (!has_helpers) {
      open_slots(memory + rings_start);
      copy_first(fills, load, length);
    }
    Events event(in, place, 1);
    each<per_lane>([&](int c) {
      each<num_states>([&](int n) { state[n][c] = next[n][c] = constant(0); });
      each<num_sums>([&](int i) { sum[i][c] = constant(0); });
      each<forward_products_count>([&](int i) { rest[i][c] = constant(0); });
      const int64 row = place.row(side_of(c));
      if (!events && row < in.rows) load_states(state, in.initial, row, place, c);
    });
    // Writes the state after a step and the step's sums, and ends the step; nothing stays of those of step -1.
    const auto write_step = [&](int step) {
      const bool ends = step >= 0;
      each<num_states>([&](int n) {
        if (given) return;
        states[n].write(writes.slot() + n * State::bytes, 0, state[n]);
        states[n].next(ends);
      });
      if (gives_sums) {
        each<per_lane>([&](int c) {
          // The state before the first step of a sequence is not rounded.
          const bool rounded = events ? !event.begin(side_of(c)) : step > 0;
          each<forward_products_count>([&](int i) {
            if (has_rests && forward_sum_with[i] >= 0) sum[forward_sum_with[i]][c] -= rounded ? rest[i][c] : constant(0);
          });
        });
        each<num_sums>([&](int i) { sums_of_steps.write(writes.slot(), i, sum[i]); });
        sums_of_steps.next(ends);
      }
      if (!has_helpers || !ends) return;
      writes.release();
      writes.next();
    };
    const auto read_ahead = [&](int l) {
      if (reads_slots || l < length) {
        reads.wait_for_numbers();
        each<num_gates>([&](int g) { gates.read(reads.slot(), g, ahead.gate[g]); });
        gates.next();
        each<num_states>([&](int n) {
          if (!given) return;
          states_before[n].read(reads.slot() + n * Before::bytes, 0, before[n]);
          states_before[n].next(l > 0);
        });
        reads.next();
      }
      load_fields(in, place, l, ahead);
    };
    read_ahead(0);
    for (int l = 0; l < length; ++l) {
      inputs = ahead;
      add_bias(inputs.gate, weights.bias);
      if (given && l > 0) state = before;
      if (events) each<per_lane>([&](int c) {
        const int side = side_of(c);
        if (event.pad(side) || event.reset(side)) each<num_states>([&](int n) { state[n][c] = constant(0); });
        else if (event.begin(side)) load_states(state, in.initial, event.now[side], place, c);
      });
      run_stages<0>([&] {
        if (!events) write_step(l - 1);
        copy_ahead(fills, load, l + slots < length);
        read_ahead(l + 1);
      });
      each<per_lane>([&](int c) {
        const bool pad = events && event.pad(side_of(c));
        each<num_states>([&](int n) { state[n][c] = pad ? constant(0) : next[n][c]; });
        if (!given && events && event.end(side_of(c)) && !pad) store_states(p.final, state, event.now[side_of(c)], place, c);
      });
      if (events) {
        write_step(l);
        event.next(l);
      }
    }
    if (!events) write_step(length - 1);
    wait_for_copies<0>();
    meet_block();
    if (events || given) return;
    each<per_lane>([&](int c) {
      const int64 row = place.row(side_of(c));
      if (row < in.rows) store_states(p.final, state, row, place, c);
    });
  }
};

}  // namespace pararnn
