// The sequential solver of matrix cells, and the entry points of its library: a task runs one head of some rows from
// the first step to the last. States stay in the cache of its core: memory gets the outputs, and the states before
// every checkpoint-th step, from which the backward pass computes those between again.
//
// Times t are in the caller's order; steps l are in processing order. The emitted functions take the arrays of the
// first of `rows` rows: those of the next row are StateSizes::array, gate_array, output_array or the function's scratch
// numbers further.
#pragma once
#include "../memory.h"
#include "../parallel.h"

namespace pararnn {

constexpr int64 checkpoint = 16;       // CHECKPOINT of program/matrix.py
constexpr int64 task_numbers = 32768;  // state numbers times steps that justify one more thread

constexpr int64 gate_numbers = numbers(gate_rows, gate_count, num_gates);
constexpr int64 param_numbers = numbers(param_rows, param_count, num_params);
constexpr int64 output_numbers = numbers(output_rows, output_count, num_outputs);

// Rows and columns of a packed matrix.
constexpr int64 packed_depth(const PackedMatrix& m) {
  if (m.depth > 0) return m.depth;
  return m.transposed ? param_count[m.param] : param_rows[m.param];
}
constexpr int64 packed_columns(const PackedMatrix& m) {
  if (m.depth > 0) return m.columns;
  return m.transposed ? param_rows[m.param] : param_count[m.param];
}
constexpr int64 packed_numbers(const PackedMatrix& m) { return packed_depth(m) * padded(packed_columns(m)); }
constexpr int64 packed_numbers() {
  int64 total = 0;
  for (int i = 0; i < num_products; ++i)
    total += products[i].counts[0] * products[i].counts[1] * packed_numbers(products[i]);
  return total;
}
// Packs all matrices of a head's parameter, one after the other.
inline void pack_all(const PackedMatrix& m, const scalar* param, scalar* packed) {
  const int64 stride = m.depth > 0 ? m.stride : param_count[m.param];
  for (int64 i = 0; i < m.counts[0]; ++i)
    for (int64 j = 0; j < m.counts[1]; ++j, packed += packed_numbers(m))
      pack(param + i * m.strides[0] + j * m.strides[1], stride, m.transposed != 0, packed_depth(m), packed_columns(m),
           packed);
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
template <class T> inline void point_to_states(const StateSizes& sizes, T* states, T** pointers) {
  point_to(states, sizes.rows, sizes.count, num_states, pointers);
}
template <class T> inline void point_to_gates(T* gates, T** pointers) {
  point_to(gates, gate_rows, gate_count, num_gates, pointers);
}

// The memories of a row: tensors that all steps of its sequence read.
struct Memories {
  int64 rows[num_memories + 1], count[num_memories + 1], array, numbers;
  explicit Memories(const int64* lengths) {
    sizes_of_memories(lengths, rows, count);
    array = array_numbers(rows, count, num_memories), numbers = pararnn::numbers(rows, count, num_memories);
  }
};

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
    const int64 step_numbers = StateSizes(memory_lengths).numbers + Memories(memory_lengths).numbers;
    return std::min(threads, 1 + rows * heads * length * step_numbers / task_numbers);
  }
};

// All heads of all rows, in groups of at most row_block rows of a head.
struct Groups {
  const Problem& p;
  const int64 in_head;

  int64 count() const { return p.heads * in_head; }
  int64 first(int64 group) const { return p.rows * group / in_head; }
};

// Some rows of one head: their arrays, of which `extra` numbers are the pass's.
struct Group {
  const Problem& p;
  int64 head, first, rows;
  Memories memories;
  StateSizes sizes;
  int64 scratch_row;
  Storage storage;
  scalar *bias, *gates, *scratch, *memory, *pass_arrays;
  int64 sequence[row_block];  // of each row's step
  int64 holds[row_block];     // the sequence whose memories a row's arrays hold
  Arrays at;

  // extra, extra_of_row: numbers of the pass's arrays, and of those that each row has.
  Group(const Groups& groups, int64 task, int64 extra, int64 extra_of_row)
      : p(groups.p), head(task % p.heads), first(groups.first(task / p.heads)),
        rows(groups.first(task / p.heads + 1) - first),
        memories(p.memory_lengths), sizes(p.memory_lengths),
        scratch_row(scratch_numbers + scratch_of_memories(p.memory_lengths)),
        storage((param_array + packed_numbers() + gate_array + extra +
                 rows * (gate_array + memories.array + scratch_row + extra_of_row)) * sizeof(scalar)), at{} {
    scalar* next = storage.as<scalar>();
    const auto take = [&](int64 count) { return std::exchange(next, next + count); };
    for_each(take(param_array), param_rows, param_count, num_params, [&](int i, scalar* array, int64 rows, int64 count) {
      to_array(p.params[i] + (param_of_all_heads[i] ? 0 : head * rows * count), rows, count, array);
      at.param[i] = array;
    });
    for (int i = 0; i < num_products; ++i) {
      const PackedMatrix& m = products[i];
      scalar* const packed = take(m.counts[0] * m.counts[1] * packed_numbers(m));
      pack_all(m, p.params[m.param] + head * param_rows[m.param] * param_count[m.param], packed);
      at.packed[i] = packed;
    }
    bias = take(gate_array), gates = take(rows * gate_array), scratch = take(rows * scratch_row);
    memory = take(rows * memories.array);
    pass_arrays = next;
    std::fill(holds, holds + row_block, -1);
    point_to_lengths(at);
    if (p.bias != nullptr) load_all(p.bias + head * gate_numbers, gate_rows, gate_count, num_gates, bias);
  }

  // Notes the sequences of a step, begins those that start there, in arrays of states, and loads the gates.
  void enter(int64 l, scalar* states, bool with_gates = true) {
    for (int64 r = 0; r < rows; ++r) {
      sequence[r] = p.sequence(first + r, l);
      if (sequence[r] < 0) continue;
      hold(r, sequence[r]);
      begin(l, r, states + r * sizes.array);
      if (with_gates) load_gates(l, r);
    }
  }
  void load_gates(int64 l, int64 r) const {
    scalar* const arrays = gates + r * gate_array;
    load_all(p.gates + (first + r) * p.gate_row + p.time(l) * p.gate_time + head * p.gate_head, gate_rows, gate_count,
             num_gates, arrays);
    if (p.bias != nullptr)
      for (int64 n = 0; n < gate_array; n += lanes) store_as(arrays + n, load_as(arrays + n) + load_as(bias + n));
  }

  // Copies the memories of a sequence into a row's arrays, unless they hold them.
  void hold(int64 r, int64 number) {
    if (holds[r] == number) return;
    holds[r] = number;
    for_each(memory + r * memories.array, memories.rows, memories.count, num_memories,
             [&](int i, scalar* array, int64 array_rows, int64 count) {
               to_array(p.memories[i] + (number * p.heads + head) * array_rows * count, array_rows, count, array);
             });
  }
  // Cells without memories have no pointers to them: templates, so that they need none.
  template <class A> void point_to_lengths(A& arrays) const {
    if constexpr (num_memories > 0)
      arrays.lengths = p.memory_lengths, arrays.memory_array = memories.array, arrays.state_array = sizes.array,
      arrays.scratch_row = scratch_row;
  }
  template <class A> void point_to_memories(A& arrays, int64 r, scalar* gradients) const {
    if constexpr (num_memories > 0) {
      point_to<const scalar>(memory + r * memories.array, memories.rows, memories.count, num_memories, arrays.memory);
      if (gradients != nullptr)
        point_to(gradients + r * memories.array, memories.rows, memories.count, num_memories, arrays.grad_memory);
    }
  }

  // Begins a row's step in an array of states: from zero, from the sequence's initial state, or as it is.
  void begin(int64 l, int64 r, scalar* states) const {
    const int64 row = first + r, number = p.sequence(row, l);
    if (p.is_reset(row, l)) return std::fill(states, states + sizes.array, scalar(0));
    if (number == p.sequence(row, l - 1)) return;
    for_each(states, sizes.rows, sizes.count, num_states, [&](int i, scalar* array, int64 rows, int64 count) {
      if (p.initial[i] == nullptr)
        std::fill(array, array + rows * padded(count), scalar(0));
      else
        to_array(p.initial[i] + (number * p.heads + head) * rows * count, rows, count, array);
    });
  }
  // Calls task(r, count) for runs of rows that have a step. gradients: of memories, or null.
  template <class Task> void for_runs(const Task& task, scalar* gradients = nullptr) {
    for (int64 r = 0, end; r < rows; r = end + 1) {
      for (end = r; end < rows && sequence[end] >= 0;) ++end;
      if (end == r) continue;
      point_to_gates<const scalar>(gates + r * gate_array, at.gate);
      point_to_memories(at, r, gradients);
      task(r, end - r);
    }
  }
  // All states of a row before a chunk of steps, in memory.
  int64 at_chunk(int64 chunk, int64 r) const {
    return (((first + r) * p.chunks() + chunk) * p.heads + head) * sizes.numbers;
  }
};

inline void forward_group(const ForwardLaunch& launch, const Groups& groups, int64 task) {
  Group group(groups, task, 0, 2 * StateSizes(groups.p.memory_lengths).array + output_array);
  const Problem& p = group.p;
  const StateSizes& sizes = group.sizes;
  const int64 rows = group.rows, head = group.head;
  scalar *states = group.pass_arrays, *next = states + rows * sizes.array, *const outputs = next + rows * sizes.array;
  for (int64 l = 0; l < p.length; ++l) {
    if (l % checkpoint == 0)
      for (int64 r = 0; r < rows; ++r)
        store_all(states + r * sizes.array, sizes.rows, sizes.count, num_states,
                  launch.memory + group.at_chunk(l / checkpoint, r));
    group.enter(l, states);
    group.for_runs([&](int64 r, int64 count) {
      point_to_states<const scalar>(sizes, states + r * sizes.array, group.at.state);
      point_to_states(sizes, next + r * sizes.array, group.at.new_state);
      point_to(outputs + r * output_array, output_rows, output_count, num_outputs, group.at.output);
      forward_step(group.at, count, group.scratch + r * group.scratch_row);
    });
    std::swap(states, next);
    for (int64 r = 0; r < rows; ++r) {
      const int64 row = group.first + r, number = group.sequence[r];
      io* const output = launch.output + ((row * p.length + p.time(l)) * p.heads + head) * output_numbers;
      if (number < 0) {
        std::memset((void*)output, 0, output_numbers * sizeof(io));
        continue;
      }
      store_all(outputs + r * output_array, output_rows, output_count, num_outputs, output);
      if (p.sequence(row, l + 1) != number)
        for_each(states + r * sizes.array, sizes.rows, sizes.count, num_states,
                 [&](int i, scalar* array, int64 rows, int64 count) {
                   from_array(array, rows, count, launch.final[i] + (number * p.heads + head) * rows * count);
                 });
    }
  }
}

// Gradients of a group, from the last step to the first.
struct BackwardGroup : Group {
  const BackwardLaunch& launch;
  const int64 task;
  scalar *trajectory, *adjoint, *next_adjoint, *grad_gates, *grad_output, *grad_params, *bias_total, *param_total,
      *bias_part, *grad_memories, *memory_total;

  static constexpr int64 shared = 2 * gate_array + 2 * param_array;
  static int64 of_row(const int64* lengths) {
    const int64 of_states = (checkpoint + 1 + 2) * StateSizes(lengths).array;
    return of_states + gate_array + output_array + 2 * Memories(lengths).array;
  }

  BackwardGroup(const BackwardLaunch& words, const Groups& groups, int64 task)
      : Group(groups, task, shared, of_row(groups.p.memory_lengths)), launch(words), task(task) {
    scalar* next = pass_arrays;
    const auto take = [&](int64 count) { return std::exchange(next, next + count); };
    trajectory = take((checkpoint + 1) * rows * sizes.array);
    adjoint = take(rows * sizes.array), next_adjoint = take(rows * sizes.array);
    grad_gates = take(rows * gate_array), grad_output = take(rows * output_array);
    bias_part = take(gate_array), bias_total = take(gate_array);
    grad_params = take(param_array), param_total = take(param_array);
    grad_memories = take(rows * memories.array), memory_total = take(rows * memories.array);
    point_to(grad_params, param_rows, param_count, num_params, at.grad_param);
  }

  void run() {
    for (int64 chunk = p.chunks(); chunk-- > 0;) {
      const int64 begin = chunk * checkpoint, end = std::min(p.length, begin + checkpoint);
      recompute(chunk, begin, end);
      for (int64 l = end; l-- > begin;) step(l, trajectory + (l - begin) * rows * sizes.array);
      // In parts, which keeps long sums accurate.
      add(bias_part, bias_total, gate_array);
      add(grad_params, param_total, param_array);
      add(grad_memories, memory_total, rows * memories.array);
    }
    scalar* sums = launch.partial + task * (gate_numbers + param_numbers);
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
  void recompute(int64 chunk, int64 begin, int64 end) {
    for (int64 r = 0; r < rows; ++r)
      load_all(launch.memory + at_chunk(chunk, r), sizes.rows, sizes.count, num_states, trajectory + r * sizes.array);
    for (int64 l = begin; l < end; ++l) {
      scalar* const states = trajectory + (l - begin) * rows * sizes.array;
      enter(l, states, l + 1 < end);
      if (l + 1 == end) return;
      for_runs([&](int64 r, int64 count) {
        point_to_states<const scalar>(sizes, states + r * sizes.array, at.state);
        point_to_states(sizes, states + (rows + r) * sizes.array, at.new_state);
        advance_step(at, count, scratch + r * scratch_row);
      });
    }
  }

  void step(int64 l, const scalar* states) {
    const int64 t = p.time(l);
    for (int64 r = 0; r < rows; ++r) {
      const int64 row = first + r, number = sequence[r] = p.sequence(row, l);
      if (number < 0) {
        std::memset((void*)gradient(row, t), 0, gate_numbers * sizeof(io));
        continue;
      }
      if (p.sequence(row, l + 1) != number)
        for_each(adjoint + r * sizes.array, sizes.rows, sizes.count, num_states,
                 [&](int i, scalar* array, int64 array_rows, int64 count) {
                   if (launch.grad_final[i] == nullptr)
                     std::fill(array, array + array_rows * padded(count), scalar(0));
                   else
                     to_array(launch.grad_final[i] + (number * p.heads + head) * array_rows * count, array_rows, count,
                              array);
                 });
      if (launch.grad_output != nullptr)
        load_all(launch.grad_output + row * launch.output_row + t * launch.output_time + head * launch.output_head,
                 output_rows, output_count, num_outputs, grad_output + r * output_array);
      load_gates(l, r);
      hold(r, number);
    }
    for_runs([&](int64 r, int64 count) {
      point_to_states(sizes, states + r * sizes.array, at.state);
      point_to_states<const scalar>(sizes, adjoint + r * sizes.array, at.grad_new_state);
      point_to_states(sizes, next_adjoint + r * sizes.array, at.grad_state);
      point_to<const scalar>(grad_output + r * output_array, output_rows, output_count, num_outputs, at.grad_output);
      point_to_gates(grad_gates + r * gate_array, at.grad_gate);
      backward_step(at, count, scratch + r * scratch_row);
    }, grad_memories);
    std::swap(adjoint, next_adjoint);
    for (int64 r = 0; r < rows; ++r) {
      const int64 row = first + r, number = sequence[r];
      if (number < 0) continue;
      const scalar* const grads = grad_gates + r * gate_array;
      store_all(grads, gate_rows, gate_count, num_gates, gradient(row, t));
      for (int64 n = 0; n < gate_array; n += lanes)
        store_as(bias_part + n, load_as(bias_part + n) + load_as(grads + n));
      scalar* const row_adjoint = adjoint + r * sizes.array;
      if (p.is_reset(row, l)) std::fill(row_adjoint, row_adjoint + sizes.array, scalar(0));
      if (p.sequence(row, l - 1) == number) continue;
      add(grad_memories + r * memories.array, memory_total + r * memories.array, memories.array);
      for_each(memory_total + r * memories.array, memories.rows, memories.count, num_memories,
               [&](int i, scalar* array, int64 array_rows, int64 count) {
                 from_array(array, array_rows, count,
                            launch.grad_memories[i] + (number * p.heads + head) * array_rows * count);
                 std::fill(array, array + array_rows * padded(count), scalar(0));
               });
      for_each(row_adjoint, sizes.rows, sizes.count, num_states,
                 [&](int i, scalar* array, int64 array_rows, int64 count) {
                   if (launch.grad_initial[i] != nullptr)
                     from_array(array, array_rows, count,
                                launch.grad_initial[i] + (number * p.heads + head) * array_rows * count);
                 });
    }
  }
  io* gradient(int64 row, int64 t) const {
    return launch.grad_gates + row * launch.grad_row + t * launch.grad_time + head * launch.grad_head;
  }
};

}  // namespace pararnn

extern "C" {

__attribute__((visibility("default"))) void forward(const pararnn::ForwardLaunch* launch) {
  using namespace pararnn;
  const Problem p{launch->in};
  expect_writes(launch->output, p.rows * p.length * p.heads * output_numbers * sizeof(io));
  const int64 threads = p.needed_threads(), heads = std::max<int64>(p.heads, 1);
  const int64 least = (p.rows + row_block - 1) / row_block;
  const Groups groups{p, std::min(p.rows, std::max(least, (threads + heads - 1) / heads))};
  run_tasks(groups.count(), threads, p.openmp, [&](int64 task) { forward_group(*launch, groups, task); });
}

__attribute__((visibility("default"))) void backward(const pararnn::BackwardLaunch* launch) {
  using namespace pararnn;
  const Problem p{launch->in};
  expect_writes(launch->grad_gates, p.rows * p.length * p.heads * gate_numbers * sizeof(io));
  const Groups groups{p, launch->groups};
  run_tasks(groups.count(), p.needed_threads(), p.openmp,
            [&](int64 task) { BackwardGroup(*launch, groups, task).run(); });
}

}  // extern "C"
