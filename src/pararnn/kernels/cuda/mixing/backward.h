// The backward pass: the adjoint, from the last step to the first. A block runs its rows of a head. The first stage
// of a step, which needs no cotangent, runs a step ahead, on sums of products that the forward pass has stored; these are
// read two steps ahead, so that it runs between products of matrix units and waits for nothing.
#pragma once
#include "../../common/sizes.h"
#include "inputs.h"
#include "products.h"
#include "ring.h"
#if PARARNN_CLUSTER
#include "scatter.h"
#endif

namespace pararnn {

struct BackwardTables {
  static constexpr int stages = backward_stages;
  static constexpr const int* first_operand = backward_first_operand;
  static constexpr const int* first_product = backward_first_product;
  static constexpr const Product* products = backward_products;
  static constexpr const int* sum_of_product = backward_sum_of_product;
};
#if PARARNN_CLUSTER
using AdjointProducts = ScatteredProducts<BackwardTables, 0, backward_stages>;
#else
using AdjointProducts = Products<BackwardTables, 0, backward_stages>;
#endif

constexpr int backward_products_count = backward_first_product[backward_stages];
constexpr int backward_operands_count = backward_first_operand[backward_stages];

// Where the state before a step is: a step of the saved states, or the number of a sequence's initial ones. Both
// are -1 where it is zero.
struct Origin {
  int64 saved, initial;

  PARARNN_FUNCTION Origin(const Inputs& in, int64 row, int l) : saved(-1), initial(-1) {
    if (!events) {
      (l == 0 ? initial : saved) = row;
      return;
    }
    if (row >= in.rows) return;
    const int64 at = row * in.length, t = at + time_of(in, l), before = at + time_of(in, l > 0 ? l - 1 : 0);
    if (in.reset != nullptr && in.reset[t]) return;
    const int64 sequence = in.seq != nullptr ? in.seq[t] : row;
    const bool begins = l == 0 || (in.seq != nullptr && in.seq[before] != sequence);
    (begins ? initial : saved) = sequence;
  }
};

struct ReadGates {
  static PARARNN_FUNCTION constexpr int number(int item) { return read_gates[item]; }
};

struct BackwardPass {
  using Problem = BackwardProblem;
  using Sums = Reads<scalar, num_sums, 0>;
  using Before = Reads<io, 1, Sums::end>;
  using Given = Reads<io, num_read_gates, Sums::end + num_read_states * Before::bytes, ReadGates>;
  using Arriving = Reads<io, 1, Given::end>;
  using Gates = Writes<io, num_gates, Given::end + num_states * Arriving::bytes>;
  using Lefts = Writes<vector_io, vectors ? num_lefts : 0, Gates::end>;
  using Rights = Writes<vector_io, vectors ? num_rights : 0, Lefts::end>;
  static_assert(!reads_slots || Rights::end == ports_bytes);
  static constexpr int rings_start = AdjointProducts::bytes, bytes = rings_start + rings_bytes;
  static constexpr int first_pulled = 1;  // the first stage that needs cotangents
  static constexpr int states_slots = num_read_states > 0 ? num_read_states : 1;

  // Where numbers of the first step, the sequence's last one, are.
  static PARARNN_FUNCTION int64 last_time(const BackwardProblem& p) { return time_of(p.in, (int)p.in.length - 1); }
  static PARARNN_FUNCTION Layout<scalar> sums_layout(const BackwardProblem& p, const Place& place) {
    constexpr int64 step = num_sums * channels;
    const int64 at = place.first_row * p.in.length + last_time(p);
    return {const_cast<scalar*>(p.sums) + at * step + place.head * head_width, p.in.length * step, channels, -time_step * step};
  }
  // The states before steps; before the first one there is none, and those after it stand in.
  static PARARNN_FUNCTION Layout<io> before_layout(const BackwardProblem& p, const Place& place, int n) {
    const int length = (int)p.in.length;
    const int64 at = place.first_row * length + time_of(p.in, length > 1 ? length - 2 : 0);
    return {const_cast<io*>(p.states[n]) + at * channels + place.head * head_width, p.in.length * channels, 0, -time_step * channels};
  }
  static PARARNN_FUNCTION Layout<io> given_layout(const BackwardProblem& p, const Place& place) {
    const GateStrides& strides = p.in.gate_strides;
    const io* first = gate_address(p.in, place.head, place.first_row, 0, last_time(p), 0);
    return {const_cast<io*>(first), strides.row, gap_of(strides), -time_step * strides.time};
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
    Copies<Sums> sums;
    Copies<Before> states[states_slots];
    Copies<Given> gates;
    Copies<Arriving> arriving_states[num_states];
    int left;  // states before the one that comes next

    PARARNN_FUNCTION Loads(const BackwardProblem& p, const Place& place) : left((int)p.in.length - 2) {
      sums.open(sums_layout(p, place), p.in, place.first_row);
      each<num_read_states>([&](int i) { states[i].open(before_layout(p, place, read_states[i]), p.in, place.first_row); });
      gates.open(given_layout(p, place), p.in, place.first_row);
      each<num_states>([&](int n) {
        if (arriving[n]) arriving_states[n].open(arriving_layout(p, place, n), p.in, place.first_row);
      });
    }
    PARARNN_FUNCTION void load(char* slot, bool more) {
      sums.load(slot, more);
      each<num_read_states>([&](int i) { states[i].load(slot + i * Before::bytes, left > 0); });
      left -= left > 0;
      gates.load(slot, more);
      each<num_states>([&](int n) {
        if (arriving[n]) arriving_states[n].load(slot + n * Arriving::bytes, more);
      });
    }
  };

  // What a step reads.
  struct Source {
    real sum[num_sums + 1][per_lane];
    Fragment<num_states> before, arriving;
    StepInputs inputs;
    bool live[per_lane];  // numbers of a row's step that is no padding
  };
  // What a step needs: of its first stage, and the rest of what it reads.
  struct Step {
    Fragment<num_states> arriving;
    real carried[per_lane][backward_carried + 1];
    real left[num_lefts + 1][per_lane], right[num_rights + 1][per_lane];
    bool live[per_lane];
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
  Step now, ahead;  // of a step, and of the next one
  Source source;    // of the one after that

  PARARNN_FUNCTION BackwardPass(const BackwardProblem& p, char* memory)
      : p(p), place(blockIdx.x / slices), weights(p.in, place), products(p.in, place.head, p.packed, memory) {}

  // Runs one stage of a step for a lane's number.
  template <int stage> PARARNN_FUNCTION void run_stage(int c, real (&operand)[backward_operands_count + 1]) {
    const auto own_param = weights.params.column(c);
    const auto own_cotangent = cotangent.column(c);
    real own_product[backward_products_count + 1];
    each<backward_products_count>([&](int i) { own_product[i] = product[i][c]; });
    auto own_next = next.column(c);
    auto own_grad_gate = grad_gate.column(c);
    real own_grad_param[param_slots], own_left[num_lefts + 1], own_right[num_rights + 1];
    backward_stage<stage>(nullptr, nullptr, nullptr, own_param, own_product, own_cotangent, nullptr, now.carried[c], operand,
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

  // Runs the first stage of a step that has been read.
  PARARNN_FUNCTION void prepare() {
    each<per_lane>([&](int c) {
      const auto own_state = source.before.column(c);
      const auto own_param = weights.params.column(c);
      auto own_gate = source.inputs.gate.column(c);
      real own_sum[num_sums + 1], own_left[num_lefts + 1], own_right[num_rights + 1];
      each<num_read_gates>([&](int i) { own_gate[read_gates[i]] += weights.bias[read_gates[i]][c]; });
      each<num_sums>([&](int i) { own_sum[i] = source.sum[i][c]; });
      backward_stage<0>(own_state, own_gate, source.inputs.field[c], own_param, nullptr, nullptr, own_sum, ahead.carried[c],
                        nullptr, nullptr, nullptr, nullptr, nullptr, own_left, own_right);
      each<num_lefts>([&](int i) {
        if (backward_stage_of_left[i] == 0) ahead.left[i][c] = own_left[i];
      });
      each<num_rights>([&](int i) {
        if (backward_stage_of_right[i] == 0) ahead.right[i][c] = own_right[i];
      });
      each<num_states>([&](int n) { ahead.arriving[n][c] = source.arriving[n][c]; });
      ahead.live[c] = source.live[c];
    });
  }

  // Runs a stage and those after it. `store(stage)` stores the results of a stage; `meanwhile`, `between`: work for the
  // time of the first products.
  template <int stage, class Store, class Work, class Between>
  PARARNN_FUNCTION void pull(const Store& store, const Work& meanwhile, const Between& between) {
    constexpr int first = backward_first_operand[stage], count = backward_first_operand[stage + 1] - first;
    Numbers operand[count + 1];
    each<per_lane>([&](int c) {
      real own_operand[backward_operands_count + 1];
      run_stage<stage>(c, own_operand);
      each<count>([&](int i) { operand[i][c] = own_operand[first + i]; });
    });
    if constexpr (stage + 1 < backward_stages) {
      each<count>([&](int i) { products.write(i, operand[i]); });
      const auto work = [&] {
        store(stage);
        meanwhile();
      };
      products.template multiply<stage>(product, product, work, between);
      pull<stage + 1>(store, [] {}, [] {});
    } else {
      store(stage);
      if constexpr (stage == first_pulled) {
        between();
        __syncwarp();
        meanwhile();
      }
    }
  }

  static PARARNN_FUNCTION void help(const BackwardProblem& p, char* memory) {
    open_slots(memory + rings_start);
    meet_block();
    const Place place(blockIdx.x / slices);
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
    Sums sums;
    Before states[states_slots];
    Given given;
    Arriving arriving_states[num_states];
    Gates gates;
    Lefts lefts;
    Rights rights;
    sums.open(sums_layout(p, place), in, place.first_row);
    each<num_read_states>([&](int i) { states[i].open(before_layout(p, place, read_states[i]), in, place.first_row); });
    given.open(given_layout(p, place), in, place.first_row);
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
      const auto live = [&](const Numbers& x, Numbers& result) {
        each<per_lane>([&](int c) { result[c] = !events || now.live[c] ? x[c] : constant(0); });
      };
      Numbers x;
      each<num_gates>([&](int g) {
        if (backward_stage_of_gate[g] != stage) return;
        live(grad_gate[g], x);
        each<per_lane>([&](int c) {
          if (place.exists(in, c)) recent[g][c] += x[c];
        });
        gates.write(slot, g, x);
      });
      each<per_lane>([&](int c) {
        each<num_fields>([&](int f) {
          if (backward_stage_of_field[f] == stage && p.grad_fields[f] != nullptr && place.stores(in, c))
            p.grad_fields[f][index[side_of(c)] * channels + place.channel(c)] = !events || now.live[c] ? grad_field[c][f] : constant(0);
        });
      });
      if (!vectors) return;
      each<num_lefts>([&](int i) {
        const int own = backward_stage_of_left[i];
        if (own != stage && (own > 0 || stage != first_pulled)) return;
        live(own == 0 ? now.left[i] : left[i], x);
        lefts.write(slot, i, x);
      });
      each<num_rights>([&](int i) {
        const int own = backward_stage_of_right[i];
        if (own != stage && (own > 0 || stage != first_pulled)) return;
        live(own == 0 ? now.right[i] : right[i], x);
        rights.write(slot, i, x);
      });
    };
    constexpr int early = slots == 2 ? 1 : 2;  // steps from reading a step to running it
    const auto read = [&](int j) {
      const int l = length - 1 - j;
      if (l < 0) return;
      reads.template wait_for_numbers<early>();
      each<num_sums>([&](int i) { sums.read(reads.slot(), i, source.sum[i]); });
      sums.next();
      each<num_read_states>([&](int i) {
        states[i].read(reads.slot() + i * Before::bytes, 0, source.before[read_states[i]]);
        states[i].next(l > 1);
      });
      each<num_read_gates>([&](int i) { given.read(reads.slot(), i, source.inputs.gate[read_gates[i]]); });
      given.next();
      each<num_states>([&](int n) {
        if (!arriving[n]) return;
        arriving_states[n].read(reads.slot() + n * Arriving::bytes, 0, source.arriving[n]);
        arriving_states[n].next();
      });
      reads.next();
      load_fields(in, place, l, source.inputs);
      each<sides>([&](int side) {
        const Origin origin(in, place.row(side), l);
        each<per_lane>([&](int c) {
          if (side_of(c) != side || origin.saved >= 0) return;
          each<num_states>([&](int n) { source.before[n][c] = constant(0); });
          if (origin.initial >= 0 && place.exists(in, c)) load_states(source.before, in.initial, origin.initial, place, c);
        });
      });
      each<per_lane>([&](int c) { source.live[c] = place.exists(in, c) && !(events && event.number(side_of(c), l) < 0); });
    };
    read(0);
    prepare();
    if (early == 2) read(1);
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
      const auto meanwhile = [&] {
        copy_ahead(fills, load, j + slots < length);
        read(j + early);
        if (early == 1) prepare();
      };
      const auto between = [&] {
        if (early == 2) prepare();
      };
      pull<first_pulled>(store, meanwhile, between);
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
    each<num_weights>([&](int i) {
      each<per_lane>([&](int c) {
        if (place.stores(in, c))
          p.partial[(place.row(side_of(c)) * num_weights + i) * channels + place.channel(c)] = total[i][c] + recent[i][c];
      });
    });
  }
};

}  // namespace pararnn
