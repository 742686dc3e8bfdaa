// What the blocks of a cluster tell each other: through memory, which holds the numbers of two steps in turn, between
// barriers of the cluster. A slot is written again two steps later, after a barrier that all of its readers have passed.
//
// Matrix units multiply in single precision: an operand, in shared memory, is split into bfloat16 numbers that add up
// to it, as matrices are (operand_parts, matrix_parts); products of parts i and j count where i + j < the larger number.
// In double precision every lane adds up products of its own.
#pragma once
#include "../tiles.h"
#include "shares.h"

namespace pararnn {

constexpr int layer_tile = tile * cluster_rows * 2;  // bytes of a tile of an operand and a part: two tiles of 8 by 8
constexpr int matrix_words = wide ? 512 : matrix_parts * lanes * 4;  // of a tile of 16 by 16
constexpr int orders = operand_parts > matrix_parts ? operand_parts : matrix_parts;

// A number, and four neighbours, that other blocks have written to memory.
PARARNN_FUNCTION real load_sent(const scalar* source) { return __ldcg(source); }
PARARNN_FUNCTION void load_sent(const scalar* source, real (&x)[4]) {
  constexpr int words = sizeof(scalar) / 2;
  alignas(16) scalar numbers[4];
  PARARNN_UNROLL
  for (int i = 0; i < words; ++i) {
    const Word word = __ldcg(reinterpret_cast<const Word*>(source) + i);
    if constexpr (wide) {
      numbers[i] = __longlong_as_double((long long)word);
    } else {
      numbers[2 * i] = __uint_as_float((unsigned)word);
      numbers[2 * i + 1] = __uint_as_float((unsigned)(word >> 32));
    }
  }
  PARARNN_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = numbers[i];
}

// The rest of a number after its first part; none of infinity.
PARARNN_FUNCTION float rest_of(float x, unsigned first_part) {
  const float left = x - __uint_as_float(first_part);
  return left == left ? left : 0.0f;
}

// An operand of products in shared memory: `tiles` tiles of 16 units, of all rows.
template <int tiles> struct Operand {
  static constexpr int layer = tiles * layer_tile;
  static constexpr int step = wide ? tile * cluster_rows * 8 : layer_tile;  // from one tile to the next
  static constexpr int bytes = wide ? tiles * step : operand_parts * layer;

  // Writes the number of a row and a unit.
  static PARARNN_FUNCTION void write(char* memory, int row, int unit, real x) {
    if constexpr (wide) {
      reinterpret_cast<real*>(memory)[unit * cluster_rows + row] = x;
      return;
    }
    float left = (float)x;
    char* const target = memory + unit / 8 * tile_bytes + row * 16 + unit % 8 * 2;
    each<operand_parts>([&](int i) {
      const unsigned short part = to_bfloat16(left);
      *reinterpret_cast<unsigned short*>(target + i * layer) = part;
      left = rest_of(left, (unsigned)part << 16);
    });
  }
  // Writes those of four units from `unit` on.
  static PARARNN_FUNCTION void write_four(char* memory, int row, int unit, const real (&x)[4]) {
    if constexpr (wide) {
      each<4>([&](int i) { write(memory, row, unit + i, x[i]); });
      return;
    }
    float left[4];
    each<4>([&](int i) { left[i] = (float)x[i]; });
    char* const target = memory + unit / 8 * tile_bytes + row * 16 + unit % 8 * 2;
    each<operand_parts>([&](int i) {
      Pack<unsigned, 2> words;
      each<2>([&](int j) {
        const unsigned word = words.items[j] = to_bfloat16s(left[2 * j], left[2 * j + 1]);
        left[2 * j] = rest_of(left[2 * j], word << 16);
        left[2 * j + 1] = rest_of(left[2 * j + 1], word & 0xffff0000u);
      });
      *reinterpret_cast<Pack<unsigned, 2>*>(target + i * layer) = words;
    });
  }
};

// Copies tiles of a value, from `first` on, which blocks have written to memory, to an operand in shared memory.
template <class S, int most> PARARNN_FUNCTION void stage(const scalar* source, int first, int count, char* memory) {
  const int quads = count * (tile / 4);
  for (int i = threadIdx.x; i < cluster_rows * quads; i += threads) {
    const int row = i / quads, unit = i % quads * 4;
    real x[4];
    load_sent(source + row * S::padded + first * tile + unit, x);
    Operand<most>::write_four(memory, row, unit, x);
  }
}

// Copies all entries of a value, filled up, to shared memory.
template <class S> PARARNN_FUNCTION void copy_whole(const scalar* source, real* target) {
  for (int i = threadIdx.x; i < cluster_rows * S::padded / 4; i += threads) {
    real x[4];
    load_sent(source + i * 4, x);
    each<4>([&](int j) { target[i * 4 + j] = x[j]; });
  }
}

// Sums of a warp for 16 units of a product and all rows, by the sizes of their terms.
struct Sums {
  float terms[orders][2][4];
  real wide_terms[4];

  PARARNN_FUNCTION Sums() {
    each<orders * 2>([&](int i) { each<4>([&](int j) { terms[i / 2][i % 2][j] = 0.0f; }); });
    each<4>([&](int j) { wide_terms[j] = constant(0); });
  }
  // Calls f(row, unit, sum).
  template <class F> PARARNN_FUNCTION void each_sum(const F& f) const {
    if constexpr (wide) {
      each<4>([&](int j) { f(lane() / tile * 4 + j, lane() % tile, wide_terms[j]); });
      return;
    }
    each<4>([&](int j) {
      float sum = 0.0f;
      each<orders>([&](int i) { sum += terms[orders - 1 - i][0][j] + terms[orders - 1 - i][1][j]; });
      f(lane() % 4 * 2 + j % 2, lane() / 4 + j / 2 * 8, (real)sum);
    });
  }
  // Adds products of tiles `first` to `end` - 1 of a matrix with those of an operand of `tiles`, from `operand` on.
  template <int tiles> PARARNN_FUNCTION void add(const char* operand, int first, int end, const unsigned* matrix) {
    if constexpr (wide) {
      const real* const numbers = reinterpret_cast<const real*>(matrix) + lane() % tile * tile;
      const real* const x = reinterpret_cast<const real*>(operand) + lane() / tile * 4;
      for (int k = first * tile; k < end * tile; ++k) {
        const real weight = numbers[k / tile * tile * tile + k % tile];
        each<4>([&](int j) { wide_terms[j] = multiply_add(weight, x[k * cluster_rows + j], wide_terms[j]); });
      }
      return;
    }
    const unsigned address = shared_address(operand);
#pragma unroll 4
    for (int k = first; k < end; ++k) {
      unsigned x[operand_parts][2];
      each<operand_parts>([&](int i) { load_tiles(address + i * Operand<tiles>::layer + k * layer_tile, x[i]); });
      each<matrix_parts>([&](int part) {
        const Pack<unsigned, 4> pack =
            *reinterpret_cast<const Pack<unsigned, 4>*>(matrix + k * matrix_words + (part * lanes + lane()) * 4);
        unsigned fragments[4];
        each<4>([&](int i) { fragments[i] = pack.items[i]; });
        each<operand_parts>([&](int i) {
          const int order = part + i;
          if (order >= orders) return;
          // Matrix units truncate as they add: large terms of float32 are added up outside of them.
          if (orders > 2 && order == 0) {
            float own[4];
            each<4>([&](int j) { own[j] = 0.0f; });
            add_product(own, fragments, x[i]);
            each<4>([&](int j) { terms[0][0][j] += own[j]; });
          } else {
            add_product(terms[order][k % 2], fragments, x[i]);
          }
        });
      });
    }
  }
};

// Runs f(tile, split, sums) for tiles of 16 results of a block, divided among its warps from `begin` on, and calls put(row, tile,
// unit, split, sum) for the sums.
template <int tiles, int splits, class F, class Put>
PARARNN_FUNCTION void multiply(int begin, const F& f, const Put& put) {
  for (int item = (warp() + warps - begin % warps) % warps; item < tiles * splits; item += warps) {
    const int own = item % tiles, split = item / tiles;
    Sums sums;
    f(own, split, sums);
    sums.each_sum([&](int row, int unit, real sum) { put(row, own, unit, split, sum); });
  }
}

// Returns where the block's matrices are: in shared memory, where they are copied to, if it has room.
PARARNN_FUNCTION const unsigned* place_matrices(const unsigned* packed, const Place& place, char* memory) {
  constexpr int words = block_matrix_tiles * matrix_words;
  const unsigned* const source = packed + (place.head * slices + place.slice) * words;
  if constexpr (!holds_matrices) return source;
  unsigned* const copy = reinterpret_cast<unsigned*>(memory + matrices_at);
  for (int i = threadIdx.x * 4; i < words; i += threads * 4)
    *reinterpret_cast<Pack<unsigned, 4>*>(copy + i) = *reinterpret_cast<const Pack<unsigned, 4>*>(source + i);
  return copy;
}

struct Sum {
  PARARNN_FUNCTION real operator()(real a, real b) const { return a + b; }
};
struct Max {
  PARARNN_FUNCTION real operator()(real a, real b) const { return maximum(a, b); }
};
struct Min {
  PARARNN_FUNCTION real operator()(real a, real b) const { return minimum(a, b); }
};

// Combines numbers of all lanes.
template <class Op> PARARNN_FUNCTION real combine_lanes(real x) {
  PARARNN_UNROLL
  for (int distance = lanes / 2; distance > 0; distance /= 2) x = Op()(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// Combines the block's numbers (row, entry, filled up) of a value, along its last axes: `length` entries, filled up, are
// one. A warp has one at a time, of those that the block has any entry of.
template <class S, class Op, int length>
PARARNN_FUNCTION void reduce_last(const Place& place, const real* numbers, real identity, scalar* target) {
  constexpr int results = S::tiles * tile / length;
  const int first = place.slice * S::block, end = min(first + S::block, S::tiles * tile);
  if (first >= end) return;
  const int first_result = first / length, count = (end - 1) / length - first_result + 1;
  for (int item = warp(); item < cluster_rows * count; item += warps) {
    const int row = item % cluster_rows, result = first_result + item / cluster_rows;
    const int from = result * length > first ? result * length : first, to = min((result + 1) * length, end);
    real x = identity;
    for (int i = from + lane(); i < to; i += lanes) x = Op()(x, numbers[row * S::block + i - first]);
    x = combine_lanes<Op>(x);
    if (lane() == 0) target[row * results + result] = x;
  }
}

// Combines the block's numbers along an axis before others: `length` entries `stride` apart, of the value without
// filling.
template <class S, class Op, int length, int stride>
PARARNN_FUNCTION void reduce_middle(const Place& place, const real* numbers, real identity, scalar* target) {
  constexpr int results = S::numbers / length;
  const int first = place.slice * S::block;
  for (int item = threadIdx.x; item < cluster_rows * results; item += threads) {
    const int row = item / results, result = item % results;
    real x = identity;
    for (int i = 0; i < length; ++i) {
      const int at = S::position(result / stride * (stride * length) + i * stride + result % stride) - first;
      if (at >= 0 && at < S::block) x = Op()(x, numbers[row * S::block + at]);
    }
    target[item] = x;
  }
}

// Combines what all blocks have sent, `distance` apart.
template <class Op> PARARNN_FUNCTION real collect(const scalar* source, int distance) {
  real x = load_sent(source);
  PARARNN_UNROLL
  for (int i = 1; i < slices; ++i) x = Op()(x, load_sent(source + i * distance));
  return x;
}

}  // namespace pararnn
