// The sequential solver of matrix cells, and the entry points of its library: a task runs one head of one row from the
// first step to the last. States stay in the cache of its core: memory gets the outputs, and the states before every
// checkpoint-th step, from which the backward pass computes those between again.
//
// Times t are in the caller's order; steps l are in processing order.
#pragma once
#include "../memory.h"
#include "../parallel.h"

namespace pararnn {

constexpr int64 checkpoint = 16;       // CHECKPOINT of program/matrix.py
constexpr int64 task_numbers = 32768;  // state numbers times steps that justify one more thread

constexpr int64 numbers(const int64* rows, const int64* count, int tensors) {
  int64 total = 0;
  for (int i = 0; i < tensors; ++i) total += rows[i] * count[i];
  return total;
}
constexpr int64 array_numbers(const int64* rows, const int64* count, int tensors) {
  int64 total = 0;
  for (int i = 0; i < tensors; ++i) total += rows[i] * padded(count[i]);
  return total;
}
constexpr int64 state_numbers = numbers(state_rows, state_count, num_states);
constexpr int64 gate_numbers = numbers(gate_rows, gate_count, num_gates);
constexpr int64 param_numbers = numbers(param_rows, param_count, num_params);
constexpr int64 state_array = array_numbers(state_rows, state_count, num_states);
constexpr int64 gate_array = array_numbers(gate_rows, gate_count, num_gates);
constexpr int64 param_array = array_numbers(param_rows, param_count, num_params);
constexpr int64 output_numbers = numbers(output_rows, output_count, num_outputs);
constexpr int64 output_array = array_numbers(output_rows, output_count, num_outputs);

constexpr int64 packed_numbers() {
  int64 total = 0;
  for (int i = 0; i < num_products; ++i)
    total += param_count[products[i].param] * padded(param_count[products[i].param]);
  return total;
}

// Calls task(i, array, rows, count) for the arrays of a kind, which follow each other.
template <class T, class Task>
inline void for_each(T* arrays, const int64* rows, const int64* count, int tensors, const Task& task) {
  for (int i = 0; i < tensors; ++i) {
    task(i, arrays, rows[i], count[i]);
    arrays += rows[i] * padded(count[i]);
  }
}

// Copies all tensors of a kind, which follow each other in memory, into arrays, and back.
template <class T>
inline void load_all(const T* memory, const int64* rows, const int64* count, int tensors, scalar* arrays) {
  for_each(arrays, rows, count, tensors, [&](int, scalar* array, int64 array_rows, int64 array_count) {
    to_array(memory, array_rows, array_count, array);
    memory += array_rows * array_count;
  });
}
template <class T>
inline void store_all(const scalar* arrays, const int64* rows, const int64* count, int tensors, T* memory) {
  for_each(arrays, rows, count, tensors, [&](int, const scalar* array, int64 array_rows, int64 array_count) {
    from_array(array, array_rows, array_count, memory);
    memory += array_rows * array_count;
  });
}
template <class T> inline void point_to(T* arrays, const int64* rows, const int64* count, int tensors, T** pointers) {
  for_each(arrays, rows, count, tensors, [&](int i, T* array, int64, int64) { pointers[i] = array; });
}

struct Problem : Inputs {
  int64 time(int64 step) const { return reverse ? length - 1 - step : step; }
  int64 sequence(int64 row, int64 step) const {
    if (step < 0 || step >= length) return -2;
    return seq != nullptr ? seq[row * length + time(step)] : row;
  }
  bool is_reset(int64 row, int64 step) const {
    return reset != nullptr && reset[row * length + time(step)];
  }
  int64 chunks() const { return (length + checkpoint - 1) / checkpoint; }
  int64 needed_threads() const {
    return std::min(threads, 1 + rows * heads * length * state_numbers / task_numbers);
  }
};

// One head of one row: its arrays, of which `extra` numbers are the pass's own.
struct Head {
  const Problem& p;
  int64 row, head;
  Storage storage;
  scalar *bias, *gates, *scratch, *own;
  Arrays at;

  Head(const Problem& problem, int64 task, int64 extra)
      : p(problem), row(task / problem.heads), head(task % problem.heads),
        storage((param_array + packed_numbers() + 2 * gate_array + scratch_numbers + extra) * sizeof(scalar)), at{} {
    scalar* next = storage.as<scalar>();
    const auto take = [&](int64 count) { return std::exchange(next, next + count); };
    for_each(take(param_array), param_rows, param_count, num_params, [&](int i, scalar* array, int64 rows, int64 count) {
      to_array(p.params[i] + (param_of_all_heads[i] ? 0 : head * rows * count), rows, count, array);
      at.param[i] = array;
    });
    for (int i = 0; i < num_products; ++i) {
      const int64 size = param_count[products[i].param];
      scalar* const packed = take(size * padded(size));
      pack(p.params[products[i].param] + head * size * size, products[i].transposed != 0, size, packed);
      at.packed[i] = packed;
    }
    bias = take(gate_array), gates = take(gate_array), scratch = take(scratch_numbers), own = next;
    if (p.bias != nullptr) load_gates(p.bias + head * gate_numbers, bias, nullptr);
    point_to<const scalar>(gates, gate_rows, gate_count, num_gates, at.gate);
  }

  template <class T> static void load_gates(const T* memory, scalar* arrays, const scalar* added) {
    load_all(memory, gate_rows, gate_count, num_gates, arrays);
    if (added != nullptr)
      for (int64 n = 0; n < gate_array; n += lanes) store_as(arrays + n, load_as(arrays + n) + load_as(added + n));
  }
  void load_gates_of(int64 l) const {
    load_gates(p.gates + row * p.gate_row + p.time(l) * p.gate_time + head * p.gate_head, gates,
               p.bias != nullptr ? bias : nullptr);
  }

  // Begins a step in an array of states: from zero, from the sequence's initial state, or as it is.
  void begin(int64 l, scalar* states) const {
    const int64 sequence = p.sequence(row, l);
    if (p.is_reset(row, l)) return std::fill(states, states + state_array, scalar(0));
    if (sequence == p.sequence(row, l - 1)) return;
    for_each(states, state_rows, state_count, num_states, [&](int i, scalar* array, int64 rows, int64 count) {
      if (p.initial[i] == nullptr)
        std::fill(array, array + rows * padded(count), scalar(0));
      else
        to_array(p.initial[i] + (sequence * p.heads + head) * rows * count, rows, count, array);
    });
  }
  // All states before a chunk of steps, in memory.
  int64 at_chunk(int64 chunk) const { return ((row * p.chunks() + chunk) * p.heads + head) * state_numbers; }
};

template <class T> inline void point_to_states(T* states, T** pointers) {
  point_to(states, state_rows, state_count, num_states, pointers);
}

inline void forward_head(const ForwardLaunch& launch, const Problem& p, int64 task) {
  Head own(p, task, 2 * state_array + output_array);
  scalar *states = own.own, *next = states + state_array, *const outputs = next + state_array;
  const int64 row = own.row, head = own.head;
  point_to(outputs, output_rows, output_count, num_outputs, own.at.output);
  for (int64 l = 0; l < p.length; ++l) {
    if (l % checkpoint == 0) {
      store_all(states, state_rows, state_count, num_states, launch.memory + own.at_chunk(l / checkpoint));
    }
    const int64 sequence = p.sequence(row, l);
    io* const output = launch.output + ((row * p.length + p.time(l)) * p.heads + head) * output_numbers;
    if (sequence < 0) {
      std::memset((void*)output, 0, output_numbers * sizeof(io));
      continue;
    }
    own.begin(l, states);
    own.load_gates_of(l);
    point_to_states<const scalar>(states, own.at.state);
    point_to_states(next, own.at.new_state);
    forward_step(own.at, own.scratch);
    store_all(outputs, output_rows, output_count, num_outputs, output);
    std::swap(states, next);
    if (p.sequence(row, l + 1) != sequence)
      for_each(states, state_rows, state_count, num_states, [&](int i, scalar* array, int64 rows, int64 count) {
        from_array(array, rows, count, launch.final[i] + (sequence * p.heads + head) * rows * count);
      });
  }
}

// Gradients of one head of one row, from the last step to the first.
struct BackwardHead : Head {
  const BackwardLaunch& launch;
  scalar *trajectory, *adjoint, *next_adjoint, *grad_gates, *grad_output, *grad_params, *bias_total, *param_total,
      *bias_part;

  static constexpr int64 numbers = (checkpoint + 1 + 2) * state_array + 3 * gate_array + output_array + 2 * param_array;

  BackwardHead(const BackwardLaunch& words, const Problem& problem, int64 task)
      : Head(problem, task, numbers), launch(words) {
    scalar* next = own;
    const auto take = [&](int64 count) { return std::exchange(next, next + count); };
    trajectory = take((checkpoint + 1) * state_array), adjoint = take(state_array), next_adjoint = take(state_array);
    grad_gates = take(gate_array), bias_part = take(gate_array), bias_total = take(gate_array);
    grad_output = take(output_array), grad_params = take(param_array), param_total = take(param_array);
    point_to<const scalar>(grad_output, output_rows, output_count, num_outputs, at.grad_output);
    point_to(grad_gates, gate_rows, gate_count, num_gates, at.grad_gate);
    point_to(grad_params, param_rows, param_count, num_params, at.grad_param);
  }

  void run() {
    for (int64 chunk = p.chunks(); chunk-- > 0;) {
      const int64 first = chunk * checkpoint, end = std::min(p.length, first + checkpoint);
      recompute(chunk, first, end);
      for (int64 l = end; l-- > first;) step(l, trajectory + (l - first) * state_array);
      // In parts, which keeps long sums accurate.
      add(bias_part, bias_total, gate_array);
      add(grad_params, param_total, param_array);
    }
    scalar* sums = launch.partial + (row * p.heads + head) * (gate_numbers + param_numbers);
    store_all(bias_total, gate_rows, gate_count, num_gates, sums);
    store_all(param_total, param_rows, param_count, num_params, sums + gate_numbers);
  }

 private:
  static void add(scalar* part, scalar* total, int64 count) {
    for (int64 n = 0; n < count; n += lanes) {
      store_as(total + n, load_as(total + n) + load_as(part + n));
      store_as(part + n, real{});
    }
  }

  // Computes the states before each step of a chunk.
  void recompute(int64 chunk, int64 first, int64 end) {
    load_all(launch.memory + at_chunk(chunk), state_rows, state_count, num_states, trajectory);
    for (int64 l = first; l < end; ++l) {
      if (p.sequence(row, l) < 0) continue;
      scalar* const states = trajectory + (l - first) * state_array;
      begin(l, states);
      if (l + 1 == end) continue;
      load_gates_of(l);
      point_to_states<const scalar>(states, at.state);
      point_to_states(states + state_array, at.new_state);
      advance_step(at, scratch);
    }
  }

  void step(int64 l, const scalar* states) {
    const int64 t = p.time(l), sequence = p.sequence(row, l);
    io* const gradient = launch.grad_gates + row * launch.grad_row + t * launch.grad_time + head * launch.grad_head;
    if (sequence < 0) {
      std::memset((void*)gradient, 0, gate_numbers * sizeof(io));
      return;
    }
    if (p.sequence(row, l + 1) != sequence)
      for_each(adjoint, state_rows, state_count, num_states, [&](int i, scalar* array, int64 rows, int64 count) {
        if (launch.grad_final[i] == nullptr)
          std::fill(array, array + rows * padded(count), scalar(0));
        else
          to_array(launch.grad_final[i] + (sequence * p.heads + head) * rows * count, rows, count, array);
      });
    if (launch.grad_output != nullptr)
      load_all(launch.grad_output + row * launch.output_row + t * launch.output_time + head * launch.output_head,
               output_rows, output_count, num_outputs, grad_output);
    load_gates_of(l);
    point_to_states(states, at.state);
    point_to_states<const scalar>(adjoint, at.grad_new_state);
    point_to_states(next_adjoint, at.grad_state);
    backward_step(at, scratch);
    std::swap(adjoint, next_adjoint);
    store_all(grad_gates, gate_rows, gate_count, num_gates, gradient);
    for (int64 n = 0; n < gate_array; n += lanes)
      store_as(bias_part + n, load_as(bias_part + n) + load_as(grad_gates + n));
    const bool is_reset = p.is_reset(row, l);
    if (is_reset) std::fill(adjoint, adjoint + state_array, scalar(0));
    if (p.sequence(row, l - 1) != sequence)
      for_each(adjoint, state_rows, state_count, num_states, [&](int i, scalar* array, int64 rows, int64 count) {
        if (launch.grad_initial[i] != nullptr)
          from_array(array, rows, count, launch.grad_initial[i] + (sequence * p.heads + head) * rows * count);
      });
  }
};

}  // namespace pararnn

extern "C" {

__attribute__((visibility("default"))) void forward(const pararnn::ForwardLaunch* launch) {
  using namespace pararnn;
  const Problem p{launch->in};
  expect_writes(launch->output, p.rows * p.length * p.heads * output_numbers * sizeof(io));
  run_tasks(p.rows * p.heads, p.needed_threads(), p.openmp,
            [&](int64 task) { forward_head(*launch, p, task); });
}

__attribute__((visibility("default"))) void backward(const pararnn::BackwardLaunch* launch) {
  using namespace pararnn;
  const Problem p{launch->in};
  expect_writes(launch->grad_gates, p.rows * p.length * p.heads * gate_numbers * sizeof(io));
  run_tasks(p.rows * p.heads, p.needed_threads(), p.openmp,
            [&](int64 task) { BackwardHead(*launch, p, task).run(); });
}

}  // extern "C"
