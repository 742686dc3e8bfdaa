// Tiles: the channels of a task, as vectors, and the inputs of their steps.
#pragma once
#include "../problem.h"

namespace pararnn {

constexpr int max_vectors = 16;         // of a task, side by side: its working set fits in L1
constexpr int min_vectors = 4;          // independent chains, to hide a step's latency

template <int size> struct Items { real items[size > 0 ? size : 1]; };
// For all vectors of a task: those of its first span, then those of the next.
template <int size> using Chains = Items<size>[max_vectors];

// Loads, and prefetches `distance` elements ahead. Prefetching past a tensor's end is a no-op.
template <class T> inline real load_ahead(const T* p, int64_t distance, int count) {
  __builtin_prefetch(p + distance);
  return load(p, count);
}

// A tile of one row and head: the channels of one task, from `first` on, at most max_vectors vectors.
struct Tile {
  const Problem& problem;
  int64_t row, head, first;
  int channels;
  Items<num_weights> weights[max_vectors];

  // Calls task(v, count) for every vector and its number of channels, a constant for all full vectors.
  template <class Task> void for_each_vector(const Task& task) const {
    const int full = channels / lanes;
#pragma GCC unroll 2  // two chains share their constants
    for (int v = 0; v < full; ++v) task(v, std::integral_constant<int, lanes>());
    if (full * lanes < channels) task(full, channels - full * lanes);
  }

  int vectors() const { return (channels + lanes - 1) / lanes; }
  int64_t offset() const { return head * problem.channels + first; }

  int64_t gate_offset(const GateStrides& strides, int g, int64_t t) const {
    return row * strides.row + t * strides.time + g * strides.gate + head * strides.head + first;
  }

  void load_weights() {
    for_each_vector([&](int v, int count) {
      const int64_t channel = offset() + v * lanes, width = problem.width();
      for (int g = 0; g < num_gates; ++g)
        weights[v].items[g] =
            problem.bias != nullptr ? load(problem.bias + g * width + channel, count)
                                    : constant(-0.0);  // x + -0 is x, also for x = -0
      for (int i = 0; i < num_params; ++i)
        weights[v].items[num_gates + i] = load(problem.params[i] + channel, count);
    });
  }
};

// Sources of the gates and fields of one step.
struct StepInputs {
  const io* gates[num_gates];
  const scalar* fields[num_fields + 1];
  bool by_channel[num_fields + 1];  // false: one value for all channels
  int64_t distance;

  StepInputs(const Tile& tile, int64_t t, int64_t soon) {
    const Problem& p = tile.problem;
    distance = soon * p.gate_strides.time;
    for (int g = 0; g < num_gates; ++g)
      gates[g] = p.gates + tile.gate_offset(p.gate_strides, g, t);
    for (int f = 0; f < num_fields; ++f) {
      by_channel[f] = p.field_channel[f] != 0;
      fields[f] = p.fields[f] + tile.row * p.field_row[f] + t * p.field_time[f] +
                  (by_channel[f] ? tile.offset() : 0);
    }
  }

  template <class Count>
  void load_vector(int v, Count count, const real* bias, real* gate, real* field) const {
    for (int g = 0; g < num_gates; ++g)
      gate[g] = load_ahead(gates[g] + v * lanes, distance, count) + bias[g];
    for (int f = 0; f < num_fields; ++f)
      field[f] = by_channel[f] ? load(fields[f] + v * lanes, count) : constant(*fields[f]);
  }
};

// All channels of all rows and heads, in tiles.
struct Tiles {
  const Problem& problem;
  int64_t each, in_head;  // channels of a tile (the last one of a head may have fewer), tiles of a head

  // At least `tiles` for each head, as even as vectors allow.
  Tiles(const Problem& p, int64_t tiles) : problem(p) {
    const int64_t vectors = vectors_of(p);
    each = (vectors + tiles - 1) / std::max<int64_t>(tiles, 1) * lanes;
    in_head = each > 0 ? (p.channels + each - 1) / each : 0;
  }
  static int64_t vectors_of(const Problem& p) { return (p.channels + lanes - 1) / lanes; }
  int vectors() const { return std::max(1, (int)each / lanes); }  // of a tile
  int64_t count() const { return problem.rows * problem.heads * in_head; }

  Tile operator[](int64_t i) const {
    const int64_t first = i % in_head * each, group = i / in_head;
    Tile tile{problem, group / problem.heads, group % problem.heads, first,
              (int)std::min(each, problem.channels - first), {}};
    tile.load_weights();
    return tile;
  }
};

}  // namespace pararnn
