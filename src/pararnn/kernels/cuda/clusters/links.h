// What the blocks of a cluster tell each other, through each other's shared memory: round by round, into one of two
// boxes in turn, whose barrier counts the bytes. Every block sends every other as many bytes, what it has or filling. A
// box is written again two rounds later: a block sends then only what follows from the round between, which it gets from
// blocks that have read the box.
//
// Matrix units multiply in single precision: an operand, in shared memory, is split into bfloat16 numbers that add up
// to it, as matrices are (operand_parts, matrix_parts); products of parts i and j count where i + j < the larger number.
// In double precision every lane adds up products of its own.
#pragma once
#include "shares.h"

namespace pararnn {

constexpr int columns = 8;                      // of an operand of a matrix unit: of 4 rows two parts, of 8 rows one
constexpr int layer_tile = tile * columns * 2;  // bytes of a tile of an operand and a layer: two tiles of 8 by 8
constexpr int layer_parts = columns / cluster_rows, layers = (operand_parts + layer_parts - 1) / layer_parts;
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

// An operand of products in shared memory: `tiles` tiles of 16 units, of all rows.
template <int tiles> struct Operand {
  static constexpr int layer = tiles * layer_tile;
  static constexpr int step = wide ? tile * cluster_rows * 8 : layer_tile;  // from one tile to the next
  static constexpr int bytes = wide ? tiles * step : layers * layer;

  // Writes the numbers of a row and a unit, and the next one.
  static PARARNN_FUNCTION void write(char* memory, int row, int unit, const real (&x)[1]) {
    if constexpr (wide) {
      reinterpret_cast<real*>(memory)[unit * cluster_rows + row] = x[0];
      return;
    }
    float left = (float)x[0];
    each_part(memory, row, unit, [&](char* target) {
      const unsigned short part = to_bfloat16(left);
      *reinterpret_cast<unsigned short*>(target) = part;
      left = rest_of(left, (unsigned)part << 16);
    });
  }
  static PARARNN_FUNCTION void write(char* memory, int row, int unit, const real (&x)[2]) {
    if constexpr (wide) {
      each<2>([&](int i) { reinterpret_cast<real*>(memory)[(unit + i) * cluster_rows + row] = x[i]; });
      return;
    }
    float left[2] = {(float)x[0], (float)x[1]};
    each_part(memory, row, unit, [&](char* target) {
      const unsigned parts = to_bfloat16s(left[0], left[1]);
      *reinterpret_cast<unsigned*>(target) = parts;
      left[0] = rest_of(left[0], parts << 16);
      left[1] = rest_of(left[1], parts & 0xffff0000u);
    });
  }
  template <class F> static PARARNN_FUNCTION void each_part(char* memory, int row, int unit, const F& f) {
    char* const target = memory + unit / 8 * tile_bytes + row * layer_parts * 16 + unit % 8 * 2;
    each<operand_parts>([&](int i) { f(target + i / layer_parts * layer + i % layer_parts * 16); });
  }
};
// Writes the thread's entries of an operand.
template <class S> PARARNN_FUNCTION void write_operand(const Place& place, char* memory, const real (&numbers)[S::count]) {
  each_run<S, S::run>(place, [&](int k, const Entry<S>& e) {
    real x[S::run];
    each<S::run>([&](int i) { x[i] = numbers[k + i]; });
    Operand<S::block_tiles>::write(memory, e.row, e.at, x);
  });
}

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

// Sums of a warp for 16 units of a product and all rows: of large terms, and of small ones (of layers behind the first;
// `half`: of the last one of 4 rows, if one part fills half of it), by chains that do not wait for each other. Matrix
// units truncate as they add: large terms of float32 are added up outside of them, to `whole`.
struct Sums {
  static constexpr bool adds_outside = orders > 2, has_half = layer_parts == 2 && operand_parts % 2 == 1;
  static constexpr int chains = 4;
  float whole[4], large[2][4], small[2][4], half[chains][4];
  real wide_terms[cluster_rows / 2];

  PARARNN_FUNCTION Sums() {
    each<4>([&](int j) {
      whole[j] = -0.0f;  // to which the first term is added without an instruction
      each<2>([&](int i) { large[i][j] = small[i][j] = 0.0f; });
      each<chains>([&](int i) { half[i][j] = 0.0f; });
    });
    each<cluster_rows / 2>([&](int j) { wide_terms[j] = constant(0); });
  }
  // Calls f(row, unit, first, second) for two sums: of a unit in two rows, `row` and the next, or of 4 rows, but in double
  // precision, of `unit` and the eighth after it.
  static constexpr int other_row = wide || layer_parts == 1, other_unit = other_row ? 0 : 8;
  template <class F> PARARNN_FUNCTION void each_pair(const F& f) const {
    if constexpr (wide) {
      each<cluster_rows / 4>([&](int j) {
        f(lane() / tile * (cluster_rows / 2) + 2 * j, lane() % tile, wide_terms[2 * j], wide_terms[2 * j + 1]);
      });
      return;
    }
    float sum[4];
    each<4>([&](int j) {
      sum[j] = adds_outside ? whole[j] : large[0][j] + large[1][j];
      if (!has_half && orders > 1) sum[j] += small[0][j] + small[1][j];
      if (has_half && matrix_parts > 1) sum[j] += small[0][j] + small[1][j];
      if (has_half && j % 2 == 0) sum[j] += (half[0][j] + half[1][j]) + (half[2][j] + half[3][j]);
    });
    if constexpr (layer_parts == 1)
      each<2>([&](int j) { f(lane() % 4 * 2, lane() / 4 + j * 8, (real)sum[2 * j], (real)sum[2 * j + 1]); });
    else f(lane() % 4, lane() / 4, (real)(sum[0] + sum[1]), (real)(sum[2] + sum[3]));
  }
  // Adds products of a matrix's tiles with those of an operand of `tiles`, from `operand` on: of a number of tiles, of
  // which all `splits` have some.
  template <int tiles, int number, int splits>
  PARARNN_FUNCTION void add(const char* operand, int split, const unsigned* matrix) {
    const int first = split * number / splits, end = (split + 1) * number / splits;
    if constexpr (wide) {
      const real* const numbers = reinterpret_cast<const real*>(matrix) + lane() % tile * tile;
      const real* const x = reinterpret_cast<const real*>(operand) + lane() / tile * (cluster_rows / 2);
      for (int k = first * tile; k < end * tile; ++k) {
        const real weight = numbers[k / tile * tile * tile + k % tile];
        each<cluster_rows / 2>([&](int j) {
          wide_terms[j] = multiply_add(weight, x[k * cluster_rows + j], wide_terms[j]);
        });
      }
      return;
    }
    add_fragments<tiles, number, splits, 4>(operand, split, [&](int j, int part) {
      return fragment_at(matrix + (first + j) * matrix_words, part);
    });
  }
  // The same by fragment(j, part) of the j-th of these tiles; turns: of the loop over them that are one.
  template <int tiles, int number, int splits, int turns, class F>
  PARARNN_FUNCTION void add_fragments(const char* operand, int split, const F& fragment) {
    constexpr int most = (number + splits - 1) / splits;
    const int first = split * number / splits, end = (split + 1) * number / splits;
    const unsigned address = shared_address(operand);
    // The index of sums must be known: what is indexed at run time is no register.
#pragma unroll turns
    for (int j = 0; j < most; ++j) {
      const int k = first + j;
      if (number % splits != 0 && k >= end) break;
      unsigned x[layers][2];
      each<layers>([&](int i) { load_tiles(address + i * Operand<tiles>::layer + k * layer_tile, x[i]); });
      each<matrix_parts>([&](int part) {
        const Fragment words = fragment(j, part);
        each<layers>([&](int i) {
          const int order = part + i * layer_parts;
          if (order >= orders) return;
          if (adds_outside && order == 0) {
            float term[4];
            each<4>([&](int n) { term[n] = 0.0f; });
            add_product(term, words.words, x[i]);
            each<4>([&](int n) { whole[n] += term[n]; });
          } else {
            const bool is_half = has_half && i == layers - 1;
            add_product(is_half ? half[j % chains] : order == 0 ? large[j % 2] : small[(j + i) % 2], words.words, x[i]);
          }
        });
      });
    }
  }
};

// Sends two sums, as `Sums::each_pair` has them, to where the first one is in another block: arrays hold (unit, row).
PARARNN_FUNCTION void send_sums(char* slot, real a, real b, int block, Barrier& barrier) {
  if constexpr (Sums::other_row == 1) {
    send_pair(slot, a, b, block, barrier);
  } else {
    send(slot, bits_of(a), block, barrier);
    send(slot + Sums::other_unit * cluster_rows * (int)sizeof(real), bits_of(b), block, barrier);
  }
}

// Calls add(sums, tile, split, i), for the i-th one of a turn, and put(sums, tile, split) for this warp's tiles of 16 results, and divisions of their
// sums, which begin with a warp. A warp adds up two at a time where all have as many.
template <int tiles, int splits, class A, class P>
PARARNN_FUNCTION void each_tile(int begin, const A& add, const P& put) {
  constexpr int items = tiles * splits, at_once = items % (2 * warps) == 0 ? 2 : 1;
  constexpr int count = items == 4 * warps ? 4 : at_once;  // without a loop
  constexpr bool is_even = items % warps == 0;
  const int first = is_even ? warp() : (warp() + warps - begin % warps) % warps;
  const auto tile_of = [](int item) { return splits == 1 ? item : item % tiles; };
  const auto split_of = [](int item) { return splits == 1 ? 0 : item / tiles; };
#pragma unroll 1
  for (int i = 0; is_even ? i < items / (count * warps) : first + i * warps < items; ++i) {
    const int item = first + i * count * warps;
    Sums sums[count];
    each<count>([&](int i) { add(sums[i], tile_of(item + i * warps), split_of(item + i * warps), i); });
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
  for (int distance = count / 2; distance > 0; distance /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, distance));
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
    for (int i = lane(); i < length; i += lanes) x = Op::of(x, numbers[first + i]);
    x = combine_lanes<Op>(x);
    if (lane() == 0) target[row * results + result] = x;
  }
}
// The same of a thread's numbers, whose results it gets, where a warp has all of a row.
template <class S, class Op, int length> PARARNN_FUNCTION void reduce_row(const real* numbers, real* results) {
  static_assert(S::count * lanes >= S::block);
  constexpr int turn = lanes * S::run;  // entries that follow each other
  constexpr int count = length == S::block ? S::count : length < turn ? S::run : length / lanes;
  constexpr int threads = length < turn && length < S::block ? length / S::run : lanes;
  PARARNN_UNROLL
  for (int first = 0; first < S::count; first += count) {
    real x = numbers[first];
    each<count - 1>([&](int i) { x = Op::of(x, numbers[first + 1 + i]); });
    x = combine_lanes<Op, threads>(x);
    each<count>([&](int i) { results[first + i] = x; });
  }
}

// The sums of a thread's numbers, of `terms` values, by groups as in `reduce_row`, and of the squares of their distances
// from the mean: groups of as many numbers are joined, each with its mean.
template <class S, int terms, int length>
PARARNN_FUNCTION void sum_moments(const real (&numbers)[terms][S::count], real* sums, real* squares) {
  constexpr int turn = lanes * S::run;
  constexpr int count = length == S::block ? S::count : length < turn ? S::run : length / lanes;
  constexpr int threads = length < turn && length < S::block ? length / S::run : lanes, of_lane = count * terms;
  PARARNN_UNROLL
  for (int first = 0; first < S::count; first += count) {
    const auto number = [&](int i) { return numbers[i / count][first + i % count]; };
    real mean = number(0), square = constant(0);
    each<of_lane - 1>([&](int i) { mean += number(i + 1); });
    mean *= constant(1.0 / of_lane);
    each<of_lane>([&](int i) {
      const real distance = number(i) - mean;
      square = multiply_add(distance, distance, square);
    });
    int joined = of_lane;
    PARARNN_UNROLL
    for (int distance = threads / 2; distance > 0; distance /= 2) {
      const real other = __shfl_xor_sync(~0u, mean, distance), gap = other - mean;
      square = multiply_add(gap * gap, constant(0.5 * joined), square + __shfl_xor_sync(~0u, square, distance));
      mean = constant(0.5) * (mean + other);
      joined *= 2;
    }
    each<count>([&](int i) {
      sums[first + i] = mean * constant(joined);
      squares[first + i] = square;
    });
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
      for (int i = from + lane(); i < to; i += lanes) x = Op::of(x, numbers[row * S::block + i - first]);
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
      if (place_of >= 0 && place_of < S::block) x = Op::of(x, numbers[row * S::block + place_of]);
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
      if (e.there) x = Op::of(x, f(e));
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
          if (e.there) x = Op::of(x, f(e));
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
#pragma unroll 4
      for (int line = 0; line < S::block / S::line; ++line) {
        const Entry<S> e(place, row, line * S::line + max(flat, 0));
        if (flat >= 0 && e.there) x = Op::of(x, f(e));
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
  for (int i = 1; i < slices; ++i) x = Op::of(x, source[i * distance]);
  return x;
}

}  // namespace pararnn
