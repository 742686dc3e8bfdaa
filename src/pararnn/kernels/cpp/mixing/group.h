// A group: some rows of one head, which a task runs from step to step together.
#pragma once
#include "matrix.h"

namespace pararnn {

constexpr int max_rows = 16;            // of a group
constexpr int64 product_work = 64;      // rows of a matrix that take as long as a step's other work

struct Group {
  const Problem& problem;
  int64 head, first;  // the first of its rows
  int rows, channels, vectors;

  int64 padded() const { return (int64)vectors * lanes; }
  int64 offset() const { return head * channels; }

  // Calls task(v, count) for every vector and its number of channels, a constant for all full vectors.
  template <class Task> void for_each_vector(const Task& task) const {
    const int full = channels / lanes;
    for (int v = 0; v < full; ++v) task(v, std::integral_constant<int, lanes>());
    if (full * lanes < channels) task(full, channels - full * lanes);
  }

  int64 gate_offset(const GateStrides& strides, int64 row, int g, int64 t) const {
    return row * strides.row + t * strides.time + g * strides.gate + head * strides.head;
  }

  // Fills [vector][bias, then params].
  void load_weights(real* weights) const {
    const Problem& p = problem;
    for_each_vector([&](int v, int count) {
      const int64 channel = offset() + v * lanes, width = p.width();
      real* own = weights + v * num_weights;
      for (int g = 0; g < num_gates; ++g)
        own[g] = p.bias != nullptr ? load(p.bias + g * width + channel, count)
                                   : constant(-0.0);  // x + -0 is x, also for x = -0
      for (int i = 0; i < num_params; ++i)
        own[num_gates + i] = load(p.params[channel_params[i]] + channel, count);
    });
  }
};

// Fetches the cache lines of `count` numbers. Hardware does not predict the strides from row to row.
template <class T> inline void prefetch(const T* start, int count) {
  constexpr int line = 64 / sizeof(T);
  for (int i = 0; i < count; i += line) __builtin_prefetch(start + i);
}

// Sources of the gates and fields of one row's step.
struct RowInputs {
  const io* gates[num_gates];
  const scalar* fields[num_fields + 1];
  bool by_channel[num_fields + 1];  // false: one value for all channels

  RowInputs(const Group& group, int64 row, int64 t) {
    const Problem& p = group.problem;
    for (int g = 0; g < num_gates; ++g)
      gates[g] = p.gates + group.gate_offset(p.gate_strides, row, g, t);
    for (int f = 0; f < num_fields; ++f) {
      by_channel[f] = p.field_channel[f] != 0;
      fields[f] = p.fields[f] + row * p.field_row[f] + t * p.field_time[f] +
                  (by_channel[f] ? group.offset() : 0);
    }
  }

  void prefetch_channels(int channels) const {
    for (int g = 0; g < num_gates; ++g) prefetch(gates[g], channels);
    for (int f = 0; f < num_fields; ++f) prefetch(fields[f], by_channel[f] ? channels : 1);
  }

  template <class Count>
  void load_vector(int v, Count count, const real* bias, real* gate, real* field) const {
    for (int g = 0; g < num_gates; ++g) gate[g] = load(gates[g] + v * lanes, count) + bias[g];
    for (int f = 0; f < num_fields; ++f)
      field[f] = by_channel[f] ? load(fields[f] + v * lanes, count) : constant(*fields[f]);
  }
};

// Where the sums of a row's step are that the gradient reads.
template <class T> T* sums_of(const Group& group, T* sums, int64 row, int64 t) {
  const Problem& p = group.problem;
  return sums + (row * p.length + t) * num_sums * p.width() + group.offset();
}

// All heads of all rows, in groups.
struct Groups {
  const Problem& problem;
  int64 threads, in_head;  // groups of a head

  Groups(const Problem& p, int products) : problem(p) {
    const int64 work = p.rows * p.length * p.width();
    threads = threads_for(p, work * (product_work + products * p.channels) / product_work);
    int64 divisor = std::max<int64>(p.heads, 1);  // the greatest common one of heads and threads
    for (int64 rest = threads; rest != 0;) {
      const int64 next = divisor % rest;
      divisor = rest, rest = next;
    }
    const int64 least = (p.rows + max_rows - 1) / max_rows;
    in_head = std::min(p.rows, std::max(least, threads / divisor));
  }
  int64 count() const { return problem.heads * in_head; }

  Group operator[](int64 i) const {
    const int64 part = i / problem.heads, first = problem.rows * part / in_head;
    const int64 rows = problem.rows * (part + 1) / in_head - first;
    const int channels = (int)problem.channels;
    return {problem, i % problem.heads, first, (int)rows, channels, (channels + lanes - 1) / lanes};
  }
};

// Numbers that a group holds in a pass: those of its rows' states or adjoints, operands and products; and, in vectors,
// its weights, and for each row carried values and `others`.
struct Numbers {
  int64 size;  // of one number a row and channel
  Storage memory, vectors;
  scalar *state, *next, *operand, *product;
  real *weights, *carried, *others;
  int64 sequence[max_rows];

  Numbers(const Group& group, int operands, int products, int num_carried, int num_others = 0)
      : size(group.rows * group.padded()), memory((2 * num_states + operands + products) * size * sizeof(scalar)),
        vectors((group.vectors * num_weights + (num_carried + num_others) * size / lanes) * sizeof(real)) {
    state = memory.as<scalar>();
    next = state + num_states * size;
    operand = next + num_states * size;
    product = operand + operands * size;
    weights = vectors.as<real>();
    carried = weights + group.vectors * num_weights;
    others = carried + num_carried * size / lanes;
    group.load_weights(weights);
  }
};

// Multiplies the operands of the round after a stage. Operands: [operand][row][padded channel]; products:
// [row][product][padded channel], those of one operand adjacent. `count`: of all products.
inline void multiply_round(const Group& group, const Packed& packed, const Product* products,
                           const int* first_product, int stage, int64 rows, const scalar* operands,
                           int64 operand_size, scalar* results, int count) {
  const int64 padded = group.padded();
  for (int p = first_product[stage], end; p < first_product[stage + 1]; p = end) {
    for (end = p; end < first_product[stage + 1] && products[end].operand == products[p].operand;) ++end;
    multiply(rows, operands + products[p].operand * operand_size, padded, packed.of(group.head, p),
             group.channels, (end - p) * group.vectors, results + p * padded, count * padded);
  }
}

}  // namespace pararnn
