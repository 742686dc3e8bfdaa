// What the blocks of a cluster tell each other, through each other's shared memory: round by round, into one of two
// boxes in turn, whose barrier counts the bytes. Every block sends every other as many bytes, what it has or filling. A
// box is written again two rounds later: a block sends then only what follows from the round between, which it gets from
// blocks that have read the box.
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

// Sends bits to the same place in another block, whose barrier counts them.
template <class Bits> PARARNN_FUNCTION void send(char* slot, Bits bits, int block, Barrier& barrier) {
#if PARARNN_CLUSTER
  send_bits(in_block(slot, block), bits, in_block(&barrier, block));
#else
  *reinterpret_cast<Bits*>(slot) = bits;
#endif
}
PARARNN_FUNCTION void send_pair(char* slot, float a, float b, int block, Barrier& barrier) {
  send(slot, (unsigned long long)bits_of(b) << 32 | bits_of(a), block, barrier);
}
PARARNN_FUNCTION void send_pair(char* slot, double a, double b, int block, Barrier& barrier) {
  send(slot, bits_of(a), block, barrier);
  send(slot + 8, bits_of(b), block, barrier);
}

// The two boxes of a block, and what it knows of rounds.
struct Boxes {
  char* const memory;
  int round = 0;

  PARARNN_FUNCTION explicit Boxes(char* memory) : memory(memory) {
#if PARARNN_CLUSTER
    if (threadIdx.x == 0) {
      each<2>([&](int i) { open_barrier(barrier_of(i), 1); });
      show_barriers();
    }
#endif
  }
  PARARNN_FUNCTION Barrier& barrier_of(int number) const {
    return *reinterpret_cast<Barrier*>(memory + 2 * box_bytes + number % 2 * 16);
  }
  PARARNN_FUNCTION Barrier& barrier() const { return barrier_of(round); }
  PARARNN_FUNCTION char* box() const { return memory + round % 2 * box_bytes; }
  // Waits for the bytes of a round, and begins the next one; returns the box of that round.
  PARARNN_FUNCTION char* receive(int bytes) {
    char* const own = box();
#if PARARNN_CLUSTER
    if (threadIdx.x == 0) expect_bytes(barrier(), bytes);
    while (!has_arrived(barrier(), round / 2)) {}
    __syncwarp();
#else
    __syncthreads();
#endif
    ++round;
    return own;
  }
};

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
};

// Sends an operand's tiles, or numbers, of this block to all: `parts` arrays of `bytes`, which are `layer` apart in a
// box, in which those of all blocks follow each other.
template <int parts, int bytes, int layer>
PARARNN_FUNCTION void send_to_all(const Place& place, const Boxes& boxes, const char* source, int at) {
  constexpr int words = bytes / 8, all = parts * words;
  char* const target = boxes.box() + at + place.slice * bytes;
  for (int i = threadIdx.x; i < all * slices; i += threads) {
    const int block = (i / all + place.slice) % slices, word = i % all;
    const Word bits = reinterpret_cast<const Word*>(source)[word];
    send(target + word / words * layer + word % words * 8, bits, block, boxes.barrier());
  }
}

// A lane's numbers of a tile of a matrix, or of a term of these.
struct Fragment { unsigned words[4]; };

PARARNN_FUNCTION Fragment fragment_at(const unsigned* tile_words, int part) {
  const Pack<unsigned, 4> pack = *reinterpret_cast<const Pack<unsigned, 4>*>(tile_words + (part * lanes + lane()) * 4);
  Fragment fragment;
  each<4>([&](int i) { fragment.words[i] = pack.items[i]; });
  return fragment;
}

// Sums of a warp for 16 units of a product and all rows, by the sizes of their terms.
struct Sums {
  float terms[orders][2][4];
  real wide_terms[4];

  PARARNN_FUNCTION Sums() {
    each<orders * 2>([&](int i) { each<4>([&](int j) { terms[i / 2][i % 2][j] = 0.0f; }); });
    each<4>([&](int j) { wide_terms[j] = constant(0); });
  }
  // Calls f(row, unit, first, second) for sums of a unit in two rows, `row` and the next.
  template <class F> PARARNN_FUNCTION void each_pair(const F& f) const {
    if constexpr (wide) {
      each<2>([&](int j) {
        f(lane() / tile * 4 + 2 * j, lane() % tile, wide_terms[2 * j], wide_terms[2 * j + 1]);
      });
      return;
    }
    float sum[4];
    each<4>([&](int j) {
      sum[j] = 0.0f;
      each<orders>([&](int i) { sum[j] += terms[orders - 1 - i][0][j] + terms[orders - 1 - i][1][j]; });
    });
    each<2>([&](int j) { f(lane() % 4 * 2, lane() / 4 + j * 8, (real)sum[2 * j], (real)sum[2 * j + 1]); });
  }
  // Adds products of a matrix's tiles with those of an operand of `tiles`, from `operand` on: of a number of tiles, of
  // which all `splits` have some.
  template <int tiles, int number, int splits>
  PARARNN_FUNCTION void add(const char* operand, int split, const unsigned* matrix) {
    constexpr int most = (number + splits - 1) / splits;
    const int first = split * number / splits, end = (split + 1) * number / splits;
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
    // The index of sums must be known: what is indexed at run time is no register.
#pragma unroll 4
    for (int j = 0; j < most; ++j) {
      const int k = first + j;
      if (number % splits != 0 && k >= end) break;
      unsigned x[operand_parts][2];
      each<operand_parts>([&](int i) { load_tiles(address + i * Operand<tiles>::layer + k * layer_tile, x[i]); });
      each<matrix_parts>([&](int part) {
        const Fragment fragment = fragment_at(matrix + k * matrix_words, part);
        each<operand_parts>([&](int i) {
          const int order = part + i;
          if (order >= orders) return;
          // Matrix units truncate as they add: large terms of float32 are added up outside of them.
          if (orders > 2 && order == 0) {
            float own[4];
            each<4>([&](int n) { own[n] = 0.0f; });
            add_product(own, fragment.words, x[i]);
            each<4>([&](int n) { terms[0][0][n] += own[n]; });
          } else {
            add_product(terms[order][j % 2], fragment.words, x[i]);
          }
        });
      });
    }
  }
};

// Calls add(sums, tile, split) and put(sums, tile, split) for this warp's tiles of 16 results, and divisions of their
// sums, which begin with a warp. A warp adds up two at a time where all have as many.
template <int tiles, int splits, class A, class P>
PARARNN_FUNCTION void each_tile(int begin, const A& add, const P& put) {
  constexpr int items = tiles * splits, count = items % (2 * warps) == 0 ? 2 : 1;
  constexpr bool is_even = items % warps == 0;
  const int first = is_even ? warp() : (warp() + warps - begin % warps) % warps;
  const auto tile_of = [](int item) { return splits == 1 ? item : item % tiles; };
  const auto split_of = [](int item) { return splits == 1 ? 0 : item / tiles; };
#pragma unroll 1
  for (int i = 0; is_even ? i < items / (count * warps) : first + i * warps < items; ++i) {
    const int item = first + i * count * warps;
    Sums sums[count];
    each<count>([&](int i) { add(sums[i], tile_of(item + i * warps), split_of(item + i * warps)); });
    each<count>([&](int i) { put(sums[i], tile_of(item + i * warps), split_of(item + i * warps)); });
  }
}

// Returns where the matrices of a block are in memory.
PARARNN_FUNCTION const unsigned* matrices_of(const unsigned* packed, const Place& place) {
  return packed + (place.head * slices + place.slice) * (block_matrix_tiles * matrix_words);
}
// Returns where the first ones are in shared memory, where they are copied to.
PARARNN_FUNCTION const unsigned* hold_matrices(const unsigned* source, char* memory) {
  unsigned* const copy = reinterpret_cast<unsigned*>(memory + matrices_at);
  for (int i = threadIdx.x * 4; i < held_tiles * matrix_words; i += threads * 4)
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

// The results of a reduction: all entries if all blocks get them, else the filled up ones of all blocks.
template <class R, bool whole> PARARNN_FUNCTION constexpr int results_of() { return whole ? R::numbers : R::padded; }

// Sends a block's result of a reduction: to all blocks, by threads `turn`, `turn` + `turns` ..., or to the one that has
// the entry.
template <class R, bool whole>
PARARNN_FUNCTION void send_result(const Place& place, const Boxes& boxes, int row, int result, int at, real x, int turn, int turns) {
  constexpr int kept = results_of<R, whole>() / (whole ? 1 : slices);
  const int number = (place.slice * cluster_rows + row) * kept + result % kept;
  char* const slot = boxes.box() + at + number * (int)sizeof(real);
  const int first = whole ? 0 : result / R::block, end = whole ? slices : first + 1;
  for (int block = first + turn; block < end; block += turns) send(slot, bits_of(x), block, boxes.barrier());
}

// Combines numbers of `count` lanes next to each other.
template <class Op, int count = lanes> PARARNN_FUNCTION real combine_lanes(real x) {
  PARARNN_UNROLL
  for (int distance = count / 2; distance > 0; distance /= 2) x = Op()(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// Combines the block's numbers (row, entry, filled up) of a value S along its last axes, of which it has whole results.
// A warp has one at a time, those from `begin` on first.
template <class S, class Op, int length>
PARARNN_FUNCTION void reduce_here(const real* numbers, real identity, real* target, int begin) {
  constexpr int results = S::block / length, turns = warps / cluster_rows;
  for (int result = (warp() / cluster_rows + turns - begin % turns) % turns; result < results; result += turns) {
    const int row = warp() % cluster_rows, first = row * S::block + result * length;
    real x = identity;
    for (int i = lane(); i < length; i += lanes) x = Op()(x, numbers[first + i]);
    x = combine_lanes<Op>(x);
    if (lane() == 0) target[row * results + result] = x;
  }
}
// The same of a thread's numbers, whose results it gets, where a warp has all of a row.
template <class S, class Op, int length> PARARNN_FUNCTION void reduce_row(const real* numbers, real* results) {
  static_assert(S::count * lanes >= S::block);
  constexpr int count = length == S::block ? S::count : length < lanes ? 1 : length / lanes;
  PARARNN_UNROLL
  for (int first = 0; first < S::count; first += count) {
    real x = numbers[first];
    each<count - 1>([&](int i) { x = Op()(x, numbers[first + 1 + i]); });
    x = combine_lanes<Op, (length < lanes ? length : lanes)>(x);
    each<count>([&](int i) { results[first + i] = x; });
  }
}

// Combines the block's numbers (row, entry, filled up) of a value S along some axes, and sends the results R, filled up:
// to all blocks if `whole`, else to those whose entries they are.
//
// Along the last axes: `length` entries, filled up, are one result. A warp has one at a time.
template <class S, class R, class Op, bool whole, int length>
PARARNN_FUNCTION void reduce_last(const Place& place, const Boxes& boxes, const real* numbers, real identity, int at) {
  const int first = place.slice * S::block;
  constexpr int results = results_of<R, whole>();
  for (int item = warp(); item < cluster_rows * results; item += warps) {
    const int row = item / results, result = item % results;
    const int flat = whole ? result : R::flat(result), from = max(flat * length, first);
    const int to = min((flat + 1) * length, min(first + S::block, S::tiles * tile));
    real x = identity;
    if (flat >= 0)
      for (int i = from + lane(); i < to; i += lanes) x = Op()(x, numbers[row * S::block + i - first]);
    x = combine_lanes<Op>(x);
    send_result<R, whole>(place, boxes, row, result, at, x, lane(), lanes);
  }
}

// Along axes before others: `length` entries `stride` apart, of the value without filling.
template <class S, class R, class Op, bool whole, int length, int stride>
PARARNN_FUNCTION void reduce_middle(const Place& place, const Boxes& boxes, const real* numbers, real identity, int at) {
  const int first = place.slice * S::block;
  constexpr int results = results_of<R, whole>();
  for (int item = threadIdx.x; item < cluster_rows * results; item += threads) {
    const int row = item / results, result = item % results, flat = whole ? result : R::flat(result);
    real x = identity;
    for (int i = 0; i < (flat < 0 ? 0 : length); ++i) {
      const int place_of = S::position(flat / stride * (stride * length) + i * stride + flat % stride) - first;
      if (place_of >= 0 && place_of < S::block) x = Op()(x, numbers[row * S::block + place_of]);
    }
    send_result<R, whole>(place, boxes, row, result, at, x, 0, 1);
  }
}

// Combines numbers inside lines of a value S with the axis of memories: f(entry), of which a block has whole lines. A
// warp has one at a time.
template <class S, class Op, class F>
PARARNN_FUNCTION void reduce_lines(const Place& place, const F& f, real identity, real* target) {
  constexpr int lines = S::block / S::line;
  for (int item = warp(); item < cluster_rows * lines; item += warps) {
    real x = identity;
    for (int i = lane(); i < S::line; i += lanes) {
      const Entry<S> e(place, item / lines, item % lines * S::line + i);
      if (e.there) x = Op()(x, f(e));
    }
    x = combine_lanes<Op>(x);
    if (lane() == 0) target[item] = x;
  }
}

// Combines numbers of all lines, f(entry), of the block: those of a result R lie `line` / results from each other. A
// thread has one result at a time, or a warp the only one.
template <class S, class R, class Op, bool whole, class F>
PARARNN_FUNCTION void reduce_all_lines(const Place& place, const Boxes& boxes, const F& f, real identity, int at) {
  constexpr int results = results_of<R, whole>();
  if constexpr (R::numbers == 1) {
    for (int item = warp(); item < cluster_rows * results; item += warps) {
      const int row = item / results, result = item % results;
      real x = identity;
      if (whole || R::flat(result) >= 0) {
        for (int i = lane(); i < S::block; i += lanes) {
          const Entry<S> e(place, row, i);
          if (e.there) x = Op()(x, f(e));
        }
      }
      x = combine_lanes<Op>(x);
      send_result<R, whole>(place, boxes, row, result, at, x, lane(), lanes);
    }
  } else {
    static_assert(S::line == R::numbers);
    for (int item = threadIdx.x; item < cluster_rows * results; item += threads) {
      const int row = item / results, result = item % results, flat = whole ? result : R::flat(result);
      real x = identity;
      for (int i = flat; flat >= 0 && i < S::block; i += S::line) {
        const Entry<S> e(place, row, i);
        if (e.there) x = Op()(x, f(e));
      }
      send_result<R, whole>(place, boxes, row, result, at, x, 0, 1);
    }
  }
}

// Products inside lines: numbers of a value S, of all rows, each the sum over `terms` of the same line of `source`, by
// weight(result, term). Arrays hold (line, number, row). adds: to what the target has.
template <class S, int terms, bool adds, class F>
PARARNN_FUNCTION void multiply_lines(const Place& place, const scalar* source, const F& weight, scalar* target) {
  for (int i = threadIdx.x; i < S::block; i += threads) {
    const int flat = place.slice * S::block + i, line = flat / S::line;
    if (!S::inside(place, flat)) return;
    scalar* const results = target + flat * cluster_rows;
    const scalar* const numbers = source + line * terms * cluster_rows;
    real sums[cluster_rows];
    each<cluster_rows>([&](int row) { sums[row] = adds ? results[row] : constant(0); });
#pragma unroll 4
    for (int term = 0; term < terms; ++term) {
      const real factor = weight(flat % S::line, term);
      each<cluster_rows / 4>([&](int n) {
        const Pack<scalar, 4> pack = *reinterpret_cast<const Pack<scalar, 4>*>(numbers + term * cluster_rows + n * 4);
        each<4>([&](int j) { sums[n * 4 + j] = multiply_add(factor, pack.items[j], sums[n * 4 + j]); });
      });
    }
    each<cluster_rows>([&](int row) { results[row] = sums[row]; });
  }
}

// Adds the sums over the block's `lines`, of `all` that there are, and all rows of outer products of `left` and `right`
// numbers of a line.
template <int lines, int left, int right>
PARARNN_FUNCTION void add_lines(const Place& place, int all, const scalar* lhs, const scalar* rhs, scalar* sums) {
  const int first = place.slice * lines, end = min(first + lines, all);
  for (int i = threadIdx.x; i < left * right; i += threads) {
    real sum = constant(0);
    for (int line = first; line < end; ++line) {
      const scalar* const a = lhs + (line * left + i / right) * cluster_rows;
      const scalar* const b = rhs + (line * right + i % right) * cluster_rows;
      each<cluster_rows>([&](int row) { sum = multiply_add(a[row], b[row], sum); });
    }
    sums[i] += sum;
  }
}

// Packs the matrices of all heads: for each head and slice tiles of 16 by 16, rows of which are results, as numbers in
// double precision, else as terms by fragments of a warp.
PARARNN_FUNCTION void pack_matrices(const PackProblem& p) {
  constexpr int tile_items = wide ? tile * tile : lanes * 4;
  const int64 count = p.heads * slices * block_matrix_tiles * tile_items;
  for (int64 i = (int64)blockIdx.x * 256 + threadIdx.x; i < count; i += (int64)gridDim.x * 256) {
    const int64 number = i / tile_items, block = number / block_matrix_tiles;
    const int item = (int)(i % tile_items), own = (int)(number % block_matrix_tiles);
    const auto entry = [&](int row, int column) {
      return matrix_entry(p, block / slices, (int)(block % slices), own, row, column);
    };
    if constexpr (wide) {
      reinterpret_cast<real*>(p.packed)[i] = entry(item / tile, item % tile);
    } else {
      const int at = item / 4, word = item % 4, row = at / 4 + word % 2 * 8, column = at % 4 * 2 + word / 2 * 8;
      float left[2] = {(float)entry(row, column), (float)entry(row, column + 1)};
      for (int part = 0; part < matrix_parts; ++part) {
        const unsigned bits = to_bfloat16s(left[0], left[1]);
        p.packed[((number * matrix_parts + part) * lanes + at) * 4 + word] = bits;
        left[0] = rest_of(left[0], bits << 16);
        left[1] = rest_of(left[1], bits & 0xffff0000u);
      }
    }
  }
}

// Combines what all blocks have sent, `distance` numbers apart.
template <class Op> PARARNN_FUNCTION real collect(const char* box, int first, int distance) {
  const real* const source = reinterpret_cast<const real*>(box) + first;
  real x = source[0];
  PARARNN_UNROLL
  for (int i = 1; i < slices; ++i) x = Op()(x, source[i * distance]);
  return x;
}

}  // namespace pararnn
