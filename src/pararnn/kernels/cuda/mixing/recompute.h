// What the gradient needs and no cotangent decides, for all steps at once: the step's products, whose operands
// follow from the saved states, and values of these that the backward pass reads. A block runs 4 or 8 steps of
// a row as its columns.
#pragma once
#include "inputs.h"
#include "products.h"

namespace pararnn {

struct BackwardTables {
  static constexpr int stages = backward_stages;
  static constexpr const int* first_operand = backward_first_operand;
  static constexpr const int* first_product = backward_first_product;
  static constexpr const Product* products = backward_products;
  static constexpr const int* sum_of_product = backward_sum_of_product;
};
using StepProducts = Products<BackwardTables, 0, backward_recomputed>;

constexpr int backward_products_count = backward_first_product[backward_stages];
constexpr int backward_operands_count = backward_first_operand[backward_stages];
constexpr int recomputed_products = backward_first_product[backward_recomputed];

// Where the state before a step is: a step of the saved states, or the number of a sequence's initial ones. Both
// are -1 where it is zero.
struct Previous {
  int64 saved, initial;

  PARARNN_FUNCTION Previous(const Inputs& in, int64 row, int l) : saved(-1), initial(-1) {
    const int64 at = row * in.length, t = at + time_of(in, l), before = at + time_of(in, l - 1);
    if (l >= (int)in.length || row >= in.rows || (events && in.reset != nullptr && in.reset[t])) return;
    const int64 sequence = events && in.seq != nullptr ? in.seq[t] : row;
    const bool begins = l == 0 || (events && in.seq != nullptr && in.seq[before] != sequence);
    (begins ? initial : saved) = begins ? sequence : sequence < 0 ? -1 : before;
  }
};

// Those of `vectors` vectors, of these stages, that follow from cotangents.
template <const int* stages, int vectors> struct Pulled {
  struct List {
    int count, before[vectors + 1], number[vectors + 1];  // of them; of a vector, and back
  };
  static constexpr List make() {
    List list{};
    for (int i = 0; i < vectors; ++i) {
      list.before[i] = list.count;
      if (stages[i] > backward_recomputed) list.number[list.count++] = i;
    }
    return list;
  }
  static constexpr List list = make();
  static constexpr int count = list.count;

  static PARARNN_FUNCTION constexpr int before(int vector) { return list.before[vector]; }
  static PARARNN_FUNCTION constexpr int number(int pulled) { return list.number[pulled]; }
};

struct Recompute {
  using Problem = BackwardProblem;
  static constexpr int bytes = StepProducts::bytes;

  // What the steps of a block's columns read, as it is in memory: nothing waits for it before its use. initial:
  // sequences whose initial states come before the steps, -1 for none.
  struct Steps {
    io state[num_states][per_lane], gate[num_gates][per_lane];
    real field[per_lane][field_slots];
    int64 initial[sides];
  };

  const BackwardProblem& p;
  const Place place;  // its rows are not used: columns are steps
  const Weights weights;
  StepProducts products;
  Fragment<num_states> state;
  StepInputs inputs;
  real carried[per_lane][backward_carried + 1];
  real product[backward_products_count + 1][per_lane];
  real left[num_lefts + 1][per_lane], right[num_rights + 1][per_lane];

  PARARNN_FUNCTION Recompute(const BackwardProblem& p, char* memory)
      : p(p), place(blockIdx.x % heads), weights(p.in, place),
        products(p.in, place.head, p.packed, memory) {}

  template <int stage> PARARNN_FUNCTION void run_stages() {
    constexpr int first = backward_first_operand[stage], count = backward_first_operand[stage + 1] - first;
    Numbers operand[count + 1];
    each<per_lane>([&](int c) {
      const auto own_state = state.column(c);
      const auto own_gate = inputs.gate.column(c);
      const auto own_param = weights.params.column(c);
      real own_product[backward_products_count + 1], own_operand[backward_operands_count + 1];
      real own_left[num_lefts + 1], own_right[num_rights + 1];
      each<recomputed_products>([&](int i) { own_product[i] = product[i][c]; });
      backward_stage<stage>(own_state, own_gate, inputs.field[c], own_param, own_product, nullptr, carried[c],
                            own_operand, nullptr, nullptr, nullptr, nullptr, own_left, own_right);
      each<count>([&](int i) { operand[i][c] = own_operand[first + i]; });
      each<num_lefts>([&](int i) {
        if (backward_stage_of_left[i] == stage) left[i][c] = own_left[i];
      });
      each<num_rights>([&](int i) {
        if (backward_stage_of_right[i] == stage) right[i][c] = own_right[i];
      });
    });
    if constexpr (stage < backward_recomputed) {
      each<count>([&](int i) { products.write(i, operand[i]); });
      products.template multiply<stage>(product, [] {});
      run_stages<stage + 1>();
    }
  }

  PARARNN_FUNCTION void load(Steps& steps, int64 row, int begin) const {
    const Inputs& in = p.in;
    const io none = narrow<io>(constant(0));
    each<sides>([&](int side) {
      const int l = begin + column_of_side(side);
      const int64 t = time_of(in, l);
      const io* gates = gate_address(in, place.head, row, 0, t, unit_of(0));
      const Previous previous(in, row, l);
      each<per_lane>([&](int c) {
        if (side_of(c) != side) return;
        const int offset = own_unit_of(c) - own_unit_of(0);
        const bool there = l < (int)in.length && exists(c);
        each<num_gates>([&](int g) {
          steps.gate[g][c] = there ? gates[g * gap_of(in.gate_strides) + offset] : none;
        });
        each<num_states>([&](int n) {
          const io* saved = p.states[n] + previous.saved * channels + place.channel(c);
          steps.state[n][c] = previous.saved >= 0 && exists(c) ? *saved : none;
        });
        load_fields(in, place, row, t, c, there, steps.field[c]);
      });
      steps.initial[side] = previous.initial;
    });
  }

  PARARNN_FUNCTION void widen_steps(const Steps& steps) {
    each<per_lane>([&](int c) {
      each<num_gates>([&](int g) { inputs.gate[g][c] = widen(steps.gate[g][c]); });
      each<num_states>([&](int n) { state[n][c] = widen(steps.state[n][c]); });
      each<num_fields>([&](int f) { inputs.field[c][f] = steps.field[c][f]; });
      const int64 initial = steps.initial[side_of(c)];
      if (initial >= 0) load_states(state, p.in.initial, initial, place, c);
    });
    add_bias(inputs.gate, weights.bias);
  }

  PARARNN_FUNCTION void store(int64 row, int begin) const {
    const Inputs& in = p.in;
    each<sides>([&](int side) {
      const int l = begin + column_of_side(side);
      if (l >= (int)in.length) return;
      const int64 index = row * in.length + time_of(in, l), vector = place.head * in.rows * in.length + index;
      const bool live = !events || in.seq == nullptr || in.seq[index] >= 0;
      scalar* saved = p.saved + ((index - p.first_row * in.length) * heads + place.head) * backward_saved * head_width + unit_of(0);
      vector_io* lefts = p.left + vector * num_lefts * head_width + unit_of(0);
      vector_io* rights = p.right + vector * num_rights * head_width + unit_of(0);
      each<per_lane>([&](int c) {
        if (side_of(c) != side || !exists(c)) return;
        const int offset = own_unit_of(c) - own_unit_of(0);
        each<backward_saved>([&](int i) { saved[i * head_width + offset] = carried[c][i]; });
        each<num_lefts>([&](int i) {
          if (p.left != nullptr && backward_stage_of_left[i] <= backward_recomputed)
            lefts[i * head_width + offset] = narrow<vector_io>(live ? left[i][c] : constant(0));
        });
        each<num_rights>([&](int i) {
          if (p.right != nullptr && backward_stage_of_right[i] <= backward_recomputed)
            rights[i * head_width + offset] = narrow<vector_io>(live ? right[i][c] : constant(0));
        });
      });
    });
  }

  PARARNN_FUNCTION void run(char*) {
    const int tiles = ((int)p.in.length + columns - 1) / columns, stride = gridDim.x / heads;
    Steps ahead;
    int64 row = p.first_row + blockIdx.x / heads / tiles, next_row = row;
    int tile = blockIdx.x / heads % tiles, next_tile = tile;
    if (row < p.row_end) load(ahead, row, tile * columns);
    while (row < p.row_end) {
      widen_steps(ahead);
      next_row = row + stride / tiles;
      next_tile = tile + stride % tiles;
      if (next_tile >= tiles) {
        next_tile -= tiles;
        ++next_row;
      }
      if (next_row < p.row_end) load(ahead, next_row, next_tile * columns);
      run_stages<0>();
      store(row, tile * columns);
      row = next_row;
      tile = next_tile;
    }
  }
};

}  // namespace pararnn
