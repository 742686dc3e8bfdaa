// What the gradient needs and no cotangent decides, for all steps at once: the step's products, whose operands
// follow from the saved states, and values of these that the backward pass reads. A block runs 8 steps of a row
// as its columns.
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

// Loads the state before a step of a row into a lane's number.
PARARNN_FUNCTION void load_previous(Fragment<num_states>& x, const BackwardProblem& p, const Place& place, int64 row,
                                    int l, int c) {
  const Inputs& in = p.in;
  const int64 t = time_of(in, l), before = time_of(in, l - 1), at = row * in.length;
  const bool there = row < in.rows && l < in.length && exists(c);
  each<num_states>([&](int n) { x[n][c] = constant(0); });
  if (!there) return;
  int64 sequence = row;
  bool begins = l == 0;
  if (events) {
    if (in.reset != nullptr && in.reset[at + t]) return;
    if (in.seq != nullptr) {
      sequence = in.seq[at + t];
      if (sequence < 0) return;
      begins = begins || in.seq[at + before] != sequence;
    }
  }
  if (begins) load_states(x, in.initial, sequence, place, c);
  else each<num_states>([&](int n) { x[n][c] = widen(p.states[n][(at + before) * channels + place.channel(c)]); });
}

struct Recompute {
  using Problem = BackwardProblem;
  static constexpr int ring_bytes = 0, bytes = StepProducts::bytes;

  const BackwardProblem& p;
  const Place place;  // its rows are not used: columns are steps
  const Weights weights;
  StepProducts products;
  Fragment<num_states> state;
  Fragment<num_gates> gate;
  real field[per_lane][field_slots], carried[per_lane][backward_carried + 1];
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
      const auto own_gate = gate.column(c);
      const auto own_param = weights.params.column(c);
      real own_product[backward_products_count + 1], own_operand[backward_operands_count + 1];
      real own_left[num_lefts + 1], own_right[num_rights + 1];
      each<recomputed_products>([&](int i) { own_product[i] = product[i][c]; });
      backward_stage<stage>(own_state, own_gate, field[c], own_param, own_product, nullptr, carried[c],
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

  PARARNN_FUNCTION void run(char*) {
    const Inputs& in = p.in;
    const int length = (int)in.length;
    const int64 tiles = (length + columns - 1) / columns, all = in.rows * tiles;
    for (int64 tile = blockIdx.x / heads; tile < all; tile += gridDim.x / heads) {
      const int64 row = tile / tiles;
      const int begin = (int)(tile % tiles) * columns;
      each<per_lane>([&](int c) {
        const int l = begin + column_of_side(side_of(c));
        const int64 t = time_of(in, l);
        const bool there = l < length && exists(c);
        load_previous(state, p, place, row, l, c);
        each<num_gates>([&](int g) {
          gate[g][c] = weights.bias[g][c] +
                       load_or(gate_address(in, place.head, row, g, t, unit_of(c)), there, constant(0));
        });
        load_fields(in, place, row, t, c, there, field[c]);
      });
      run_stages<0>();
      each<per_lane>([&](int c) {
        const int l = begin + column_of_side(side_of(c));
        if (l >= length || !exists(c)) return;
        const int64 index = row * in.length + time_of(in, l), steps = in.rows * in.length;
        each<backward_saved>([&](int i) {
          p.saved[(i * steps + index) * channels + place.channel(c)] = carried[c][i];
        });
        const bool live = !events || in.seq == nullptr || in.seq[index] >= 0;
        const int64 vector = place.head * steps + index;
        each<num_lefts>([&](int i) {
          if (p.left == nullptr || backward_stage_of_left[i] > backward_recomputed) return;
          p.left[(vector * num_lefts + i) * head_width + unit_of(c)] = narrow<vector_io>(live ? left[i][c] : constant(0));
        });
        each<num_rights>([&](int i) {
          if (p.right == nullptr || backward_stage_of_right[i] > backward_recomputed) return;
          p.right[(vector * num_rights + i) * head_width + unit_of(c)] = narrow<vector_io>(live ? right[i][c] : constant(0));
        });
      });
    }
  }
};

}  // namespace pararnn
