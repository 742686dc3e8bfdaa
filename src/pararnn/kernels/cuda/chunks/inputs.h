// Steps of a chunk: where they are in memory, their gates, and the emitted forms that a chunk is made of.
//
// Needs, in addition to fragments.h and the structs of a launch: keys, values (channels of the axes, filled up to
// multiples of 16), size_keys, size_values, num_states, num_columns (corrected ones first), num_corrected, num_reads,
// num_queries, vector_decay, events (spans or resets are passed), has_bias, pairs (neighbours of 16 bits have even addresses),
// gate_words (4-byte words of a step's gates, if these are copied to shared memory), gate_row_bytes (of a step there).
#pragma once
#include "fragments.h"

namespace pararnn {

constexpr int blocks_of_values = values / chunk;
constexpr int reads = num_reads ? num_reads : 1, corrected = num_corrected ? num_corrected : 1;
constexpr int num_pure = num_columns - num_corrected, pure = num_pure ? num_pure : 1;

constexpr int warps = threads / 32;
PARARNN_FUNCTION int warp_number() { return threadIdx.x / 32; }

// A sequence and the head of a block; l counts the steps of the recurrence.
struct Span {
  int64 sequence, row, first, head, base;  // base: number of its first chunk among those of all sequences
  int count;
  bool reverse;
  PARARNN_FUNCTION Span(const Inputs& in, int64 number) : sequence(number / in.heads), head(number % in.heads) {
    row = sequence;
    first = 0;
    count = (int)in.length;
    reverse = in.reverse;
    base = row * chunks();
    if (events && in.spans != nullptr) {
      const int* span = in.spans + 4 * sequence;
      row = span[0];
      first = span[1];
      count = span[2];
      base = span[3];
    }
  }
  PARARNN_FUNCTION int64 time(int l) const { return first + (reverse ? count - 1 - l : l); }
  PARARNN_FUNCTION int chunks() const { return (count + chunk - 1) / chunk; }
  // Where a chunk of this head is in memory, in heads of chunks.
  PARARNN_FUNCTION int64 at(const Inputs& in, int number) const { return (base + number) * in.heads + head; }
};

// Copies the gates of a chunk's steps to shared memory, by a number of warps. A warp reads words of eight steps without a conflict of
// banks where rows are 4 words, or 8 of float32, off a multiple of 32.
constexpr bool copies_gates = gate_words > 0;
constexpr int gates_bytes = chunk * gate_row_bytes;
template <int count> PARARNN_FUNCTION void copy_gates(const Inputs& in, const Span& span, int number, char* target) {
  if constexpr (copies_gates) {
    const int word = threadIdx.x % (32 * count), rest = span.count - number * chunk;
    const io* const first = in.gates + span.row * in.gate_row + span.time(number * chunk) * in.gate_time + span.head * in.gate_head;
    const char* source = reinterpret_cast<const char*>(first) + 4 * word;
    const int64 stride = (span.reverse ? -in.gate_time : in.gate_time) * (int64)sizeof(io);
    unsigned to = shared_address(target + 4 * word);
#pragma unroll 4
    for (int l = 0; l < chunk; ++l) {
      if (l < rest)
        PARARNN_UNROLL
        for (int i = 0; i < gate_words; i += 32 * count)
          if (i + 32 * count <= gate_words || i + word < gate_words) copy_async<4>(to + 4 * i, source + 4 * i);
      source += stride;
      to += gate_row_bytes;
    }
  }
  end_group_of_copies();
}

// A lane's two steps of a chunk.
struct Steps {
  const Inputs& in;
  const Span& span;
  const io* gates[2];
  int64 time[2];
  bool valid[2], fresh[2];  // is a step; begins at zero

  // `copied`: where gates are in shared memory.
  PARARNN_FUNCTION Steps(const Inputs& in, const Span& span, int number, const char* copied) : in(in), span(span) {
    PARARNN_FOR(i, 2) {
      const int l = number * chunk + lane_row() + 8 * i;
      valid[i] = l < span.count;
      time[i] = span.time(valid[i] ? l : 0);
      if constexpr (copies_gates) {
        gates[i] = reinterpret_cast<const io*>(copied + (lane_row() + 8 * i) * gate_row_bytes);
      } else {
        gates[i] = in.gates + span.row * in.gate_row + time[i] * in.gate_time + span.head * in.gate_head;
      }
      fresh[i] = events && in.reset != nullptr && valid[i] && in.reset[span.row * in.length + time[i]];
    }
  }
  // Numbers of a step, which begin at an offset.
  template <int n, int size> PARARNN_FUNCTION Tile<n> vector(int offset) const {
    Tile<n> x;
    PARARNN_FOR(j, n / 8)
      PARARNN_FOR(i, 2) {
        const int channel = 8 * j + lane_column();
        real pair[2] = {constant(0), constant(0)};
        const io* source = gates[i] + offset + channel;
        if (pairs && sizeof(io) == 2 && size % 2 == 0) {
          if (valid[i] && (size == n || channel < size)) unpack(*reinterpret_cast<const Pack<io, 2>*>(source), pair);
        } else {
          PARARNN_FOR(e, 2)
            if (valid[i] && (size == n || channel + e < size)) pair[e] = widen(source[e]);
        }
        x[j][2 * i] = pair[0];
        x[j][2 * i + 1] = pair[1];
      }
    if constexpr (has_bias) {
      const scalar* bias = in.bias + span.head * in.width + offset;
      x.each([&](real& y, int, int channel) {
        if (channel < size) y += bias[channel];
      });
    }
    return x;
  }
  PARARNN_FUNCTION Row number(int offset) const {
    Row x;
    PARARNN_FOR(i, 2) {
      x[i] = valid[i] ? widen(gates[i][offset]) : constant(0);
      if (has_bias) x[i] += in.bias[span.head * in.width + offset];
    }
    return x;
  }
  // A field, float32 numbers next to each other.
  template <int n, int size> PARARNN_FUNCTION Tile<n> field_vector(int number) const {
    Tile<n> x;
    x.each([&](real& y, int i, int channel) {
      y = valid[i] && channel < size ? in.fields[number][field_place(i) * size + channel] : constant(0);
    });
    return x;
  }
  PARARNN_FUNCTION Row field_number(int number) const {
    Row x;
    PARARNN_FOR(i, 2) x[i] = valid[i] ? in.fields[number][field_place(i)] : constant(0);
    return x;
  }
  // Where a lane's step of this head is in a field, in vectors.
  PARARNN_FUNCTION int64 field_place(int i) const {
    return (span.row * in.length + time[i]) * in.heads + span.head;
  }
  template <int n, int size> PARARNN_FUNCTION Tile<n> param_vector(int number, bool of_all_heads) const {
    const scalar* source = in.params[number] + (of_all_heads ? 0 : span.head * size);
    Tile<n> x;
    x.each([&](real& y, int, int channel) { y = channel < size ? source[channel] : constant(0); });
    return x;
  }
  PARARNN_FUNCTION Row param_number(int number, bool of_all_heads) const {
    const real x = in.params[number][of_all_heads ? 0 : span.head];
    return Row{{x, x}};
  }
};

#if PARARNN_VECTOR_DECAY
using Decay = Tile<keys>;
using Factors = Square[num_states][num_states];  // of 16 keys
#else
using Decay = Row;
using Factors = Row[num_states][num_states];
#endif

// S'_i = sum_j decay_ij S_j + sum_c column_ci (sum_r gain_cr (sum_j read_rj^T S_j) + value_c); y_p = sum_i query_pi^T S'_i
struct Forms {
  Decay decay[num_states][num_states];
  Tile<keys> column[num_columns][num_states], read[reads][num_states], query[num_queries][num_states];
  Row gain[corrected][reads];
  Tile<values> value[num_columns];

  PARARNN_FUNCTION void fill(real x) {
    for_each([&](auto& form) { form.fill(x); });
  }
  template <class F> PARARNN_FUNCTION void for_each(const F& f) {
    PARARNN_FOR(i, num_states) {
      PARARNN_FOR(j, num_states) f(decay[i][j]);
      PARARNN_FOR(c, num_columns) f(column[c][i]);
      PARARNN_FOR(r, num_reads) f(read[r][i]);
      PARARNN_FOR(p, num_queries) f(query[p][i]);
    }
    PARARNN_FOR(c, num_columns) {
      f(value[c]);
      PARARNN_FOR(r, num_reads)
        if (c < num_corrected) f(gain[c][r]);
    }
  }
  // Makes steps outside of a sequence leave states as they are, and resets begin at zero. `branches`: not where there are none,
  // for which registers hold all forms.
  PARARNN_FUNCTION void adapt(const Steps& steps, bool branches = true) {
    const bool (&valid)[2] = steps.valid, (&fresh)[2] = steps.fresh;
    if (branches && __all_sync(~0u, valid[0] && valid[1] && !fresh[0] && !fresh[1])) return;
    for_each([&](auto& form) { form.each([&](real& x, int i, auto...) { x = valid[i] ? x : constant(0); }); });
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states)
        decay[i][j].each([&](real& x, int h, auto...) {
          x = !valid[h] ? constant(i == j) : fresh[h] ? constant(0) : x;
        });
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(r, num_reads) gain[c][r].each([&](real& x, int h) { x = fresh[h] ? constant(0) : x; });
  }
  // The same for gradients.
  PARARNN_FUNCTION void adapt_gradients(const Steps& steps) {
    const bool (&fresh)[2] = steps.fresh;
    PARARNN_FOR(i, num_states)
      PARARNN_FOR(j, num_states)
        decay[i][j].each([&](real& x, int h, auto...) { x = fresh[h] ? constant(0) : x; });
    PARARNN_FOR(c, num_corrected)
      PARARNN_FOR(r, num_reads) gain[c][r].each([&](real& x, int h) { x = fresh[h] ? constant(0) : x; });
  }
};

}  // namespace pararnn
