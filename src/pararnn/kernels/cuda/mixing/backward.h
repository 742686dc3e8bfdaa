// The backward pass: the adjoint, from the last step to the first. A block runs its rows of a head. What follows
// from no cotangent has been computed for all steps at once, see recompute.h.
#pragma once
#include "recompute.h"
#include "ring.h"
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
  using Saved = Reads<scalar, backward_saved, 0>;
  using Arriving = Reads<io, 1, Saved::end>;
  using Gates = Writes<io, num_gates, Saved::end + num_states * Arriving::bytes>;
  using Left = Pulled<backward_stage_of_left, num_lefts>;
  using Right = Pulled<backward_stage_of_right, num_rights>;
  using Lefts = Writes<vector_io, vectors ? Left::count : 0, Gates::end, Left>;
  using Rights = Writes<vector_io, vectors ? Right::count : 0, Lefts::end, Right>;
  static_assert(!reads_slots || Rights::end == ports_bytes);
  static constexpr int rings_start = AdjointProducts::bytes, bytes = rings_start + rings_bytes;
  static constexpr int first_pulled = backward_recomputed + 1;  // the first stage that needs cotangents

  // Where numbers of the first step, the sequence's last one, are.
  static PARARNN_FUNCTION int64 last_time(const BackwardProblem& p) { return time_of(p.in, (int)p.in.length - 1); }
  static PARARNN_FUNCTION Layout<scalar> saved_layout(const BackwardProblem& p, const Place& place) {
    const int64 at = (place.first_row - p.first_row) * p.in.length + last_time(p), step = channels * backward_saved;
    scalar* first = p.saved + (at * heads + place.head) * backward_saved * head_width;
    return {first, p.in.length * step, head_width, -time_step * step};
  }
  static PARARNN_FUNCTION Layout<io> arriving_layout(const BackwardProblem& p, const Place& place, int n) {
    const int64 at = place.first_row * p.grad_row[n] + last_time(p) * p.grad_time[n];
    return {const_cast<io*>(p.grad_states[n]) + at + place.head * head_width, p.grad_row[n], 0, -time_step * p.grad_time[n]};
  }
  static PARARNN_FUNCTION Layout<io> gates_layout(const BackwardProblem& p, const Place& place) {
    const GateStrides& strides = p.grad_gate_strides;
    const int64 at = gate_offset(strides, place.head, place.first_row, 0, last_time(p), 0);
    return {p.grad_gates + at, strides.row, gap_of(strides), -time_step * strides.time};
  }
  static PARARNN_FUNCTION Layout<vector_io> vectors_layout(const BackwardProblem& p, const Place& place, vector_io* all, int count) {
    const int64 at = (place.head * p.in.rows + place.first_row) * p.in.length + last_time(p), step = count * head_width;
    return {all + at * step, p.in.length * step, head_width, -time_step * step};
  }

  // A warp's copies of what steps read.
  struct Loads {
    Copies<Saved> saved;
    Copies<Arriving> arriving_states[num_states];

    PARARNN_FUNCTION Loads(const BackwardProblem& p, const Place& place) {
      saved.open(saved_layout(p, place), p.in, place.first_row);
      each<num_states>([&](int n) {
        if (arriving[n]) arriving_states[n].open(arriving_layout(p, place, n), p.in, place.first_row);
      });
    }
    PARARNN_FUNCTION void load(char* slot, bool more) {
      saved.load(slot, more);
      each<num_states>([&](int n) {
        if (arriving[n]) arriving_states[n].load(slot + n * Arriving::bytes, more);
      });
    }
  };

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

  static PARARNN_FUNCTION void help(const BackwardProblem& p, char* memory) {
    open_slots(memory + rings_start);
    meet_block();
    const Place place(blockIdx.x / slices, p.first_row);
    Loads loads(p, place);
    Copies<Gates> gates;
    Copies<Lefts> lefts;
    Copies<Rights> rights;
    gates.open(gates_layout(p, place), p.in, place.first_row);
    lefts.open(vectors_layout(p, place, p.left, num_lefts), p.in, place.first_row);
    rights.open(vectors_layout(p, place, p.right, num_rights), p.in, place.first_row);
    serve_steps(
        memory + rings_start, (int)p.in.length, [&](char* slot, bool more) { loads.load(slot, more); },
        [&](char* slot) {
          gates.store(slot);
          lefts.store(slot);
          rights.store(slot);
        });
    meet_block();
  }

  PARARNN_FUNCTION void run(char* memory) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    Saved saved;
    Arriving arriving_states[num_states];
    Gates gates;
    Lefts lefts;
    Rights rights;
    saved.open(saved_layout(p, place), in, place.first_row);
    each<num_states>([&](int n) {
      if (arriving[n]) arriving_states[n].open(arriving_layout(p, place, n), in, place.first_row);
    });
    gates.open(gates_layout(p, place), in, place.first_row);
    lefts.open(vectors_layout(p, place, p.left, num_lefts), in, place.first_row);
    rights.open(vectors_layout(p, place, p.right, num_rights), in, place.first_row);
    Turn reads{ring_of(memory + rings_start)}, writes = reads, fills = reads;
    Loads loads(p, place);
    const auto load = [&](char* slot, bool more) { loads.load(slot, more); };
    if constexpr (!has_helpers) {
      open_slots(memory + rings_start);
      copy_first(fills, load, length);
    }
    Events event(in, place, -1);
    recent.fill(constant(0));
    total.fill(constant(0));
    each<per_lane>([&](int c) {
      each<num_states>([&](int n) { adjoint[n][c] = next[n][c] = constant(0); });
      const int64 row = place.row(side_of(c));
      if (!events && row < in.rows) load_states(adjoint, p.grad_final, row, place, c);
      each<num_gates>([&](int g) { grad_gate[g][c] = constant(0); });
    });
    int64 index[sides];  // of a row's step
    each<sides>([&](int side) { index[side] = place.row(side) * length + last_time(p); });
    int j = 0;  // steps so far
    const auto store = [&](int stage) {
      if (has_helpers && stage == first_pulled && j > 0) {  // the last step's results are complete
        writes.release();
        writes.next();
      }
      char* slot = writes.slot();
      each<per_lane>([&](int c) {
        const bool live = !events || now.live[c];
        each<num_gates>([&](int g) {
          if (backward_stage_of_gate[g] != stage) return;
          const real grad = live ? grad_gate[g][c] : constant(0);
          if (place.exists(in, c)) recent[g][c] += grad;
          gates.write(slot, g, c, grad);
        });
        each<num_fields>([&](int f) {
          if (backward_stage_of_field[f] == stage && place.stores(in, c))
            p.grad_fields[f][index[side_of(c)] * channels + place.channel(c)] = live ? grad_field[c][f] : constant(0);
        });
        if (!vectors) return;
        each<num_lefts>([&](int i) {
          if (backward_stage_of_left[i] == stage) lefts.write(slot, Left::before(i), c, live ? left[i][c] : constant(0));
        });
        each<num_rights>([&](int i) {
          if (backward_stage_of_right[i] == stage) rights.write(slot, Right::before(i), c, live ? right[i][c] : constant(0));
        });
      });
    };
    const auto read_ahead = [&](int j) {
      const int l = length - 1 - j;
      if (reads_slots || l >= 0) {
        reads.wait_for_numbers();
        each<backward_saved>([&](int i) {
          Numbers value;
          saved.read(reads.slot(), i, value);
          each<per_lane>([&](int c) { ahead.carried[c][i] = value[c]; });
        });
        saved.next();
        each<num_states>([&](int n) {
          if (!arriving[n]) return;
          arriving_states[n].read(reads.slot() + n * Arriving::bytes, 0, ahead.arriving[n]);
          arriving_states[n].next();
        });
        reads.next();
      }
      each<per_lane>([&](int c) {
        ahead.live[c] = place.exists(in, c) && !(events && l >= 0 && event.number(side_of(c), l) < 0);
      });
    };
    read_ahead(0);
    for (; j < length; ++j) {
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
        copy_ahead(fills, load, j + slots < length);
        read_ahead(j + 1);
      });
      each<per_lane>([&](int c) {
        const int side = side_of(c);
        const bool pad = events && event.pad(side), stops = pad || (events && event.reset(side));
        each<num_states>([&](int n) { adjoint[n][c] = stops ? constant(0) : next[n][c]; });
        if (events && event.begin(side) && !pad) store_states(p.grad_initial, adjoint, event.now[side], place, c);
      });
      each<sides>([&](int side) { index[side] -= time_step; });
      gates.next();
      lefts.next();
      rights.next();
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
    writes.release();
    wait_for_copies<0>();
    meet_block();
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
