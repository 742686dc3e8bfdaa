// What both passes and both solvers have in common: the problem, tiles of channels, inputs of a step,
// spans of steps. Included after num_states, num_gates, num_fields and num_params, and the cell's
// step(), jacobian() and vjp().
//
// Channels d = head * channels + j are contiguous in all tensors but the gates, whose heads have a
// stride. Times t of the tensors are in the caller's order; steps l are in processing order.
#pragma once
#include "functions.h"
#include "memory.h"
#include "parallel.h"

namespace pararnn {

constexpr int max_vectors = 16;         // that a task runs side by side: its working set stays in L1
constexpr int min_vectors = 4;          // independent chains, which hide a step's latency
constexpr int64_t thread_work = 32768;  // channel steps that are worth another thread
constexpr int sum_block = 64;           // steps summed apart, so that long sums stay exact
constexpr int steps_ahead = 8;          // hardware does not foresee the jumps from step to step
constexpr int num_weights = num_gates + num_params;  // biases, then params

template <int size> struct Many { real items[size > 0 ? size : 1]; };
// Of all vectors of channels that a task runs: those of its first span, then those of the next.
template <int size> using Chains = Many<size>[max_vectors];

struct Strides { int64_t row, time, channel; };
struct GateStrides { int64_t row, time, gate, head; };

struct Problem {
  int64_t rows, length, heads, channels, reverse, threads;
  GateStrides gate_strides;
  Strides field_strides[num_fields + 1];
  openmp_parallel openmp;
  const io* gates;
  const scalar* bias;  // (gate, channel) or null
  const int32_t* seq;  // (row, time) or null: row b is sequence b
  const bool* reset;   // (row, time) or null
  const scalar* fields[num_fields + 1];
  const scalar* params[num_params + 1];
  const scalar* initial[num_states];  // (sequence, channel)
  io* states[num_states];             // (row, time, channel)

  int64_t width() const { return heads * channels; }
  // From a step's place in a tensor to that of the step that is due soon, in time.
  int64_t soon(bool backward) const {
    return backward == (reverse != 0) ? steps_ahead : -steps_ahead;
  }
  int64_t time(int64_t step) const { return reverse ? length - 1 - step : step; }
  int64_t sequence(int64_t row, int64_t step) const {
    if (step < 0 || step >= length) return -2;
    return seq != nullptr ? seq[row * length + time(step)] : row;
  }
  bool is_reset(int64_t row, int64_t step) const {
    return reset != nullptr && reset[row * length + time(step)];
  }
  io* state(int n, int64_t row, int64_t step) const {
    return states[n] + (row * length + time(step)) * width();
  }
};

// Loads, and asks for what stands `distance` further; beyond a tensor's end that does nothing.
template <class T> inline real load_ahead(const T* p, int64_t distance, int count) {
  __builtin_prefetch(p + distance);
  return load(p, count);
}

// Reads the caller's flat arrays in order.
struct Reader {
  const int64_t* sizes;
  void* const* pointers;
  void size(int64_t& out) { out = *sizes++; }
  void strides(GateStrides& out) {
    for (int64_t* stride : {&out.row, &out.time, &out.gate, &out.head}) size(*stride);
  }
  template <class T> void pointer(T*& out) { out = (T*)*pointers++; }
};

inline Problem read_problem(Reader& in) {
  Problem p;
  for (int64_t* size : {&p.rows, &p.length, &p.heads, &p.channels, &p.reverse, &p.threads})
    in.size(*size);
  in.strides(p.gate_strides);
  for (int f = 0; f < num_fields; ++f)
    for (int64_t* size : {&p.field_strides[f].row, &p.field_strides[f].time,
                          &p.field_strides[f].channel})
      in.size(*size);
  p.openmp = (openmp_parallel)*in.pointers++;
  in.pointer(p.gates);
  in.pointer(p.bias);
  in.pointer(p.seq);
  in.pointer(p.reset);
  for (int f = 0; f < num_fields; ++f) in.pointer(p.fields[f]);
  for (int i = 0; i < num_params; ++i) in.pointer(p.params[i]);
  for (int n = 0; n < num_states; ++n) in.pointer(p.initial[n]);
  for (int n = 0; n < num_states; ++n) in.pointer(p.states[n]);
  return p;
}

// The channels of one task: from channel `first` of a head on, at most max_vectors vectors.
struct Tile {
  const Problem& problem;
  int64_t row, head, first;
  int channels;
  Many<num_weights> weights[max_vectors];

  // Calls task(v, count) for every vector and the channels in it: a constant but for the last one.
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

// Where the gates and fields of one step are.
struct Inputs {
  const io* gates[num_gates];
  const scalar* fields[num_fields + 1];
  bool by_channel[num_fields + 1];  // else one value for all channels
  int64_t distance;

  Inputs(const Tile& tile, int64_t t, int64_t soon) {
    const Problem& p = tile.problem;
    distance = soon * p.gate_strides.time;
    for (int g = 0; g < num_gates; ++g)
      gates[g] = p.gates + tile.gate_offset(p.gate_strides, g, t);
    for (int f = 0; f < num_fields; ++f) {
      const Strides& strides = p.field_strides[f];
      by_channel[f] = strides.channel != 0;
      fields[f] = p.fields[f] + tile.row * strides.row + t * strides.time +
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
  int64_t each, in_head;  // channels of a tile (the last of a head may have fewer), tiles of a head

  // At least `tiles` a head, as even as vectors allow.
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

inline int64_t threads_for(const Problem& p, int64_t channel_steps) {
  return std::min(p.threads, 1 + channel_steps / thread_work);
}

// Steps of processing from `first` to before `end`. The pass starts at `begin`, from a guess, and what
// comes before `first` is only to forget it.
struct Span { int64_t begin, first, end; };

// One span, known to the compiler.
struct One {
  constexpr One(int = 1) {}
  constexpr operator int() const { return 1; }
};

// Runs spans side by side: run_step(s, j, burns) is step j of span s; ready() comes before the first
// steps that are not burnt.
template <bool burn_in, class Count, class Ready, class Step>
inline void for_each_step(const Span* spans, Count count, const Ready& ready, const Step& run_step) {
  int64_t before = 0, size = 0;
  for (int s = 0; s < count; ++s) {
    before = std::max(before, spans[s].first - spans[s].begin);
    size = std::max(size, spans[s].end - spans[s].first);
  }
  if constexpr (burn_in)
    for (int64_t i = -before; i < 0; ++i)
      for (int s = 0; s < count; ++s)
        if (spans[s].first + i >= spans[s].begin) run_step(s, spans[s].first + i, std::true_type());
  ready();
  for (int64_t i = 0; i < size; ++i)
    for (int s = 0; s < count; ++s)
      if (spans[s].first + i < spans[s].end) run_step(s, spans[s].first + i, std::false_type());
}

// What observes a sweep: here, nothing does; the others are in shooting.h.
struct Nothing {
  static constexpr bool burn_in = false, jacobians = false;
  void begin(int, const Chains<num_states>&) {}
  void forget(int) {}
  void note(int, const real*) {}
  void follow(int, const real*) {}
  void follow_back(int, const real*) {}
};

}  // namespace pararnn
