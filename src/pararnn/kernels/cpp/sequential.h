// The sequential solver: each task runs some channels of one batch row through time. Included after
// num_states, num_gates, num_fields and num_params, and the cell's step() and vjp().
//
// Channels d = head * channels + j are contiguous in all tensors but the gates, whose heads have a
// stride. Times t of the tensors are in the caller's order; steps l are in processing order.
#pragma once
#include "functions.h"
#include "memory.h"
#include "parallel.h"

namespace pararnn {

constexpr int max_vectors = 16;         // of channels a task runs: its working set stays in L1
constexpr int min_vectors = 4;          // independent chains, which hide a step's latency
constexpr int64_t thread_work = 32768;  // channel steps that are worth another thread
constexpr int sum_block = 64;           // steps summed apart, so that long sums stay exact
constexpr int steps_ahead = 8;          // hardware does not foresee the jumps from step to step
constexpr int num_weights = num_gates + num_params;  // biases, then params

template <int size> struct Many { real items[size > 0 ? size : 1]; };

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

Problem read_problem(Reader& in) {
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

template <class Task> void for_each_tile(const Problem& p, const Task& task) {
  const int64_t vectors = (p.channels + lanes - 1) / lanes, groups = p.rows * p.heads;
  if (vectors == 0 || groups == 0) return;
  const int64_t threads = std::min(p.threads, 1 + p.rows * p.length * p.width() / thread_work);
  int64_t tiles = (vectors + max_vectors - 1) / max_vectors;
  if (groups * tiles < 4 * threads)
    tiles = std::max(tiles, std::min((4 * threads + groups - 1) / groups, vectors / min_vectors));
  const int64_t each = (vectors + tiles - 1) / tiles * lanes;  // channels
  tiles = (p.channels + each - 1) / each;
  run_tasks(groups * tiles, threads, p.openmp, [&](int64_t i) {
    const int64_t first = i % tiles * each, group = i / tiles;
    Tile tile{p, group / p.heads, group % p.heads, first,
              (int)std::min(each, p.channels - first), {}};
    tile.load_weights();
    task(tile);
  });
}

void run_forward(const Problem& p, scalar* const* final) {
  for_each_tile(p, [&](const Tile& tile) {
    Many<num_states> state[max_vectors];
    const int64_t row = tile.row, offset = tile.offset();
    int64_t before = -2;
    for (int64_t l = 0; l < p.length; ++l) {
      const int64_t sequence = p.sequence(row, l), start = sequence * p.width() + offset;
      const bool zero = sequence < 0 || p.is_reset(row, l);
      if (zero || sequence != before)
        tile.for_each_vector([&](int v, int count) {
          for (int n = 0; n < num_states; ++n)
            state[v].items[n] = zero ? real{} : load(p.initial[n] + start + v * lanes, count);
        });
      before = sequence;
      io* out[num_states];
      for (int n = 0; n < num_states; ++n) out[n] = p.state(n, row, l) + offset;
      const Inputs inputs(tile, p.time(l), p.soon(false));
      tile.for_each_vector([&](int v, auto count) {
        Many<num_states> next = state[v];
        if (sequence >= 0) {
          const real* weights = tile.weights[v].items;
          real gate[num_gates], field[num_fields + 1];
          inputs.load_vector(v, count, weights, gate, field);
          step(state[v].items, gate, field, weights + num_gates, next.items);
          state[v] = next;
        }
        for (int n = 0; n < num_states; ++n) store(out[n] + v * lanes, next.items[n], count);
      });
      if (sequence >= 0 && sequence != p.sequence(row, l + 1))
        tile.for_each_vector([&](int v, int count) {
          for (int n = 0; n < num_states; ++n)
            store(final[n] + start + v * lanes, state[v].items[n], count);
        });
    }
  });
}

struct Gradients {
  GateStrides gate_strides;
  Strides state_strides[num_states];
  const io* states[num_states];     // arriving; null: none
  const scalar* final[num_states];  // arriving; null: none
  io* gates;
  scalar* fields[num_fields + 1];  // (row, time, channel)
  scalar* initial[num_states];
  scalar* partial;  // (row, weight, channel)
  scalar* weights[num_weights];  // (channel)
};

void run_backward(const Problem& p, const Gradients& grad) {
  const int64_t width = p.width();
  for_each_tile(p, [&](const Tile& tile) {
    Many<num_states> adjoint[max_vectors];
    Many<num_weights> recent[max_vectors] = {}, total[max_vectors] = {};
    const int64_t row = tile.row, offset = tile.offset();
    int64_t after = -2;
    for (int64_t l = p.length - 1; l >= 0; --l) {
      const int64_t t = p.time(l), sequence = p.sequence(row, l);
      const int64_t start = sequence * width + offset;
      io* grad_gates[num_gates];
      for (int g = 0; g < num_gates; ++g)
        grad_gates[g] = grad.gates + tile.gate_offset(grad.gate_strides, g, t);
      scalar* grad_fields[num_fields + 1];
      for (int f = 0; f < num_fields; ++f)
        grad_fields[f] = grad.fields[f] + (row * p.length + t) * width + offset;
      if (sequence < 0) {
        tile.for_each_vector([&](int v, int count) {
          for (int g = 0; g < num_gates; ++g) store(grad_gates[g] + v * lanes, real{}, count);
          for (int f = 0; f < num_fields; ++f) store(grad_fields[f] + v * lanes, real{}, count);
        });
        after = sequence;
        continue;
      }
      const bool reset = p.is_reset(row, l), begins = sequence != p.sequence(row, l - 1);
      if (sequence != after)
        tile.for_each_vector([&](int v, int count) {
          for (int n = 0; n < num_states; ++n)
            adjoint[v].items[n] =
                grad.final[n] == nullptr ? real{} : load(grad.final[n] + start + v * lanes, count);
        });
      after = sequence;
      const Inputs inputs(tile, t, p.soon(true));
      const io* arriving[num_states];
      const io* saved[num_states];
      for (int n = 0; n < num_states; ++n) {
        const Strides& strides = grad.state_strides[n];
        arriving[n] = grad.states[n] == nullptr
                          ? nullptr
                          : grad.states[n] + row * strides.row + t * strides.time + offset;
        saved[n] = reset || begins ? nullptr : p.state(n, row, l - 1) + offset;
      }
      tile.for_each_vector([&](int v, auto count) {
        const real* weights = tile.weights[v].items;
        real previous[num_states], gate[num_gates], field[num_fields + 1];
        for (int n = 0; n < num_states; ++n) {
          if (arriving[n] != nullptr)
            adjoint[v].items[n] += load_ahead(
                arriving[n] + v * lanes, p.soon(true) * grad.state_strides[n].time, count);
          previous[n] = saved[n] != nullptr
                            ? load_ahead(saved[n] + v * lanes, p.soon(true) * width, count)
                        : reset ? real{}
                                : load(p.initial[n] + start + v * lanes, count);
        }
        inputs.load_vector(v, count, weights, gate, field);
        real grad_previous[num_states], grad_gate[num_gates];
        real grad_field[num_fields + 1], grad_param[num_params + 1];
        vjp(previous, gate, field, weights + num_gates, adjoint[v].items, grad_previous, grad_gate,
            grad_field, grad_param);
        for (int n = 0; n < num_states; ++n)
          adjoint[v].items[n] = reset ? real{} : grad_previous[n];
        for (int g = 0; g < num_gates; ++g) {
          recent[v].items[g] += grad_gate[g];
          store(grad_gates[g] + v * lanes, grad_gate[g], count);
        }
        for (int f = 0; f < num_fields; ++f) store(grad_fields[f] + v * lanes, grad_field[f], count);
        for (int i = 0; i < num_params; ++i) recent[v].items[num_gates + i] += grad_param[i];
      });
      tile.for_each_vector([&](int v, int count) {
        if (begins)
          for (int n = 0; n < num_states; ++n)
            store(grad.initial[n] + start + v * lanes, adjoint[v].items[n], count);
        if (l % sum_block == 0)
          for (int i = 0; i < num_weights; ++i) {
            total[v].items[i] += recent[v].items[i];
            recent[v].items[i] = real{};
          }
      });
    }
    tile.for_each_vector([&](int v, int count) {
      for (int i = 0; i < num_weights; ++i)
        store(grad.partial + (row * num_weights + i) * width + offset + v * lanes,
              total[v].items[i] + recent[v].items[i], count);
    });
  });
}

// By halves, always the same ones, so that the bits do not depend on threads.
real sum_rows(const scalar* column, int64_t stride, int64_t rows, int count) {
  if (rows == 0) return real{};
  if (rows == 1) return load(column, count);
  const int64_t half = rows / 2;
  return sum_rows(column, stride, half, count) +
         sum_rows(column + half * stride, stride, rows - half, count);
}

void sum_weights(const Problem& p, const Gradients& grad) {
  const int64_t width = p.width(), stride = num_weights * width;
  const int64_t threads = std::min(p.threads, 1 + p.rows * stride / thread_work);
  run_tasks(num_weights, threads, p.openmp, [&](int64_t i) {
    for (int64_t d = 0; d < width; d += lanes) {
      const int count = (int)std::min<int64_t>(lanes, width - d);
      const scalar* column = grad.partial + i * width + d;
      store(grad.weights[i] + d, sum_rows(column, stride, p.rows, count), count);
    }
  });
}

extern "C" {

__attribute__((visibility("default"))) void forward(const int64_t* sizes, void* const* pointers) {
  Reader in{sizes, pointers};
  const Problem p = read_problem(in);
  scalar* final[num_states];
  for (int n = 0; n < num_states; ++n) {
    in.pointer(final[n]);
    expect_writes(p.states[n], p.rows * p.length * p.width() * sizeof(io));
  }
  run_forward(p, final);
}

__attribute__((visibility("default"))) void backward(const int64_t* sizes, void* const* pointers) {
  Reader in{sizes, pointers};
  const Problem p = read_problem(in);
  Gradients grad;
  in.strides(grad.gate_strides);
  for (int n = 0; n < num_states; ++n) {
    in.size(grad.state_strides[n].row);
    in.size(grad.state_strides[n].time);
  }
  for (int n = 0; n < num_states; ++n) in.pointer(grad.states[n]);
  for (int n = 0; n < num_states; ++n) in.pointer(grad.final[n]);
  in.pointer(grad.gates);
  for (int f = 0; f < num_fields; ++f) in.pointer(grad.fields[f]);
  for (int n = 0; n < num_states; ++n) in.pointer(grad.initial[n]);
  in.pointer(grad.partial);
  for (int i = 0; i < num_weights; ++i) in.pointer(grad.weights[i]);
  expect_writes(grad.gates, p.rows * p.length * num_gates * p.width() * sizeof(io));
  run_backward(p, grad);
  sum_weights(p, grad);
}

}  // extern "C"

}  // namespace pararnn
