// What the emitted code of a step calls. The threads of a block share the tensors of one head: a thread has the
// entries of a tensor whose indices it has along all axes. What lacks an axis is in all threads along it.
//
// Arrays of a thread are in registers: loops over them are unrolled.
#pragma once
#include "../functions.h"
#include "../tiles.h"

namespace pararnn {

// An axis over groups of lanes and of warps; neighbouring groups are lane_step and warp_step apart. A thread has
// `count` entries, with `pairs` neighbours in twos, as in fragments of tiles.
template <int size_, int lanes_, int lane_step_, int warps_, int warp_step, int count_, bool pairs> struct Axis {
  static constexpr int size = size_, lanes = lanes_, lane_step = lane_step_, warps = warps_, count = count_;
  static constexpr bool whole = size == lanes * warps * count, in_pairs = pairs;

  PARARNN_FUNCTION static int lane_place() { return lane() / lane_step % lanes; }
  PARARNN_FUNCTION static int warp_place() { return warp() / warp_step % warps; }
  PARARNN_FUNCTION static bool leads() { return lane_place() == 0 && warp_place() == 0; }
  // The index of a thread's n-th entry.
  PARARNN_FUNCTION static int index(int n) {
    const int first = warp_place() * (lanes * count);
    return first + (pairs ? 2 * lane_place() + n % 2 + n / 2 * (2 * lanes) : lane_place() + n * lanes);
  }
  PARARNN_FUNCTION static bool exists(int n) { return whole || index(n) < size; }
};
// Rows of a block that shares vectors.
using Single = Axis<1, 1, 1, 1, 1, 1, false>;

template <class A> PARARNN_FUNCTION real existing(real x, int n, real otherwise) {
  return A::exists(n) ? x : otherwise;
}

template <class A, class... Axes> struct Contains { static constexpr bool value = (same<A, Axes>::value || ...); };

// A thread's share of a tensor.
template <class... Axes> struct Share {
  static constexpr int count = 1, size = 1, place_size = 1;
  PARARNN_FUNCTION static int offset(int) { return 0; }
  PARARNN_FUNCTION static int place(int) { return 0; }
  PARARNN_FUNCTION static bool exists(int) { return true; }
  template <class Rows, class Columns, class... Along> PARARNN_FUNCTION static bool leads() {
    return (Contains<Rows, Along...>::value || Rows::leads()) && (Contains<Columns, Along...>::value || Columns::leads());
  }
};
template <class First, class... Rest> struct Share<First, Rest...> {
  using Inner = Share<Rest...>;
  static constexpr int count = First::count * Inner::count, size = First::size * Inner::size;
  // In shared memory rows are a number apart, so that columns are in different banks.
  static constexpr int stride = Inner::place_size + (sizeof...(Rest) > 0), place_size = First::size * stride;

  // Where a thread's i-th entry is in memory, and in shared memory.
  PARARNN_FUNCTION static int offset(int i) {
    return First::index(i / Inner::count) * Inner::size + Inner::offset(i % Inner::count);
  }
  PARARNN_FUNCTION static int place(int i) {
    return First::index(i / Inner::count) * stride + Inner::place(i % Inner::count);
  }
  PARARNN_FUNCTION static bool exists(int i) {
    return First::exists(i / Inner::count) && Inner::exists(i % Inner::count);
  }
  // True for one of the threads that have the same entries, or that differ along `Along` alone.
  template <class Rows, class Columns, class... Along> PARARNN_FUNCTION static bool leads() {
    return (Contains<Rows, First, Rest..., Along...>::value || Rows::leads()) &&
           (Contains<Columns, First, Rest..., Along...>::value || Columns::leads());
  }
};

// Combines what the lanes along an axis have; all get the result.
template <class A, class Combine, int count> PARARNN_FUNCTION void combine_lanes(real (&x)[count]) {
  PARARNN_UNROLL
  for (int with = A::lane_step; with < A::lane_step * A::lanes; with *= 2) {
    PARARNN_FOR(i, count) x[i] = Combine::of(x[i], __shfl_xor_sync(~0u, x[i], with));
  }
}

// The warps along some axes.
template <class... Axes> struct Grid {
  static constexpr int warps = 1;
  PARARNN_FUNCTION static int warp_place() { return 0; }
  PARARNN_FUNCTION static bool leads() { return true; }
};
template <class First, class... Rest> struct Grid<First, Rest...> {
  static constexpr int warps = First::warps * Grid<Rest...>::warps;
  PARARNN_FUNCTION static int warp_place() {
    return First::warp_place() * Grid<Rest...>::warps + Grid<Rest...>::warp_place();
  }
  PARARNN_FUNCTION static bool leads() { return First::lane_place() == 0 && Grid<Rest...>::leads(); }
};

// The same of warps: each writes its part, and after they have met all combine the parts in the same order.
template <class A, class S> PARARNN_FUNCTION void put_part(const real (&x)[S::count], real* memory) {
  if (!A::leads()) return;
  PARARNN_FOR(i, S::count)
    if (S::exists(i)) memory[A::warp_place() * S::size + S::offset(i)] = x[i];
}
template <class A, class S, class Combine>
PARARNN_FUNCTION void combine_parts(const real* memory, real (&x)[S::count]) {
  PARARNN_FOR(i, S::count) {
    if (!S::exists(i)) continue;
    x[i] = memory[S::offset(i)];
    PARARNN_UNROLL
    for (int part = 1; part < A::warps; ++part) x[i] = Combine::of(x[i], memory[part * S::size + S::offset(i)]);
  }
}

// Leaves a tensor in shared memory, of a reduction over `Along` the pieces that lanes and warps have. Where lanes along
// the first of these axes have several entries, each keeps a half of them and gets another lane's piece of it, `levels`
// times.
template <int levels, class... Along> struct PiecesOf {
  static constexpr int count = 1;
  PARARNN_FUNCTION static int number() { return 0; }
};
template <int levels, class First, class... Rest> struct PiecesOf<levels, First, Rest...> {
  using Inner = PiecesOf<0, Rest...>;
  static constexpr int count = ((First::lanes * First::warps) >> levels) * Inner::count;
  PARARNN_FUNCTION static int number() {
    return ((First::warp_place() * First::lanes + First::lane_place()) >> levels) * Inner::count + Inner::number();
  }
};
struct Nothing {
  static constexpr int lane_step = 1;
  PARARNN_FUNCTION static int lane_place() { return 0; }
};
template <class First = Nothing, class...> struct FirstOf { using type = First; };

// Halves the first `left` entries; returns the index of the first that a lane has then.
template <class A, class Combine, int left, int level, int levels, int count>
PARARNN_FUNCTION int spread(real (&x)[count]) {
  if constexpr (level == levels) {
    return 0;
  } else {
    constexpr int half = left / 2;
    const bool upper = A::lane_place() >> level & 1;
    PARARNN_FOR(i, half) {
      const real other = upper ? x[i] : x[i + half], own = upper ? x[i + half] : x[i];
      x[i] = Combine::of(own, __shfl_xor_sync(~0u, other, A::lane_step << level));
    }
    return (upper ? half : 0) + spread<A, Combine, half, level + 1, levels>(x);
  }
}

template <class S, int levels, class Combine, class Rows, class Columns, class... Along, int count>
PARARNN_FUNCTION void put_pieces(real (&x)[count], real* memory) {
  const int first = spread<typename FirstOf<Along...>::type, Combine, count, 0, levels>(x);
  if (!S::template leads<Rows, Columns, Along...>()) return;
  real* const target = memory + PiecesOf<levels, Along...>::number() * S::size;
  PARARNN_FOR(i, count >> levels)
    if (S::exists(first + i)) target[S::offset(first + i)] = x[i];
}
// Combines the pieces, in a warp whose lanes have all vectors.
template <class S, int pieces, class Combine>
PARARNN_FUNCTION void combine_pieces(const real* memory, real (&x)[S::count]) {
  if constexpr (S::size == 1) {
    x[0] = memory[lane() % pieces];
    PARARNN_UNROLL
    for (int piece = lanes; piece < pieces; piece += lanes)
      x[0] = Combine::of(x[0], memory[piece + lane()]);
    constexpr int across = pieces < lanes ? pieces : lanes;
    PARARNN_UNROLL
    for (int with = 1; with < across; with *= 2) x[0] = Combine::of(x[0], __shfl_xor_sync(~0u, x[0], with));
  } else {
    PARARNN_FOR(i, S::count) {
      if (!S::exists(i)) continue;
      x[i] = memory[S::offset(i)];
      PARARNN_UNROLL
      for (int piece = 1; piece < pieces; ++piece) x[i] = Combine::of(x[i], memory[piece * S::size + S::offset(i)]);
    }
  }
}

// Writes a tensor to shared memory, for products of which a thread needs others' entries.
template <class S> PARARNN_FUNCTION void put(const real (&x)[S::count], real* memory) {
  PARARNN_FOR(i, S::count)
    if (S::exists(i)) memory[S::place(i)] = x[i];
}

// The index of an entry along an axis, by its number among the axes; the entry's place without it.
template <int along, class First, class... Rest> struct Line {
  using S = Share<First, Rest...>;
  using Next = Line<along - 1, Rest...>;
  static constexpr int size = Next::size, stride = Next::stride;
  PARARNN_FUNCTION static int index(int i) { return Next::index(i % S::Inner::count); }
  PARARNN_FUNCTION static int rest(int i) {
    return First::index(i / S::Inner::count) * S::stride + Next::rest(i % S::Inner::count);
  }
};
template <class First, class... Rest> struct Line<0, First, Rest...> {
  using S = Share<First, Rest...>;
  static constexpr int size = First::size, stride = S::stride;
  PARARNN_FUNCTION static int index(int i) { return First::index(i / S::Inner::count); }
  PARARNN_FUNCTION static int rest(int i) { return S::Inner::place(i % S::Inner::count); }
};
template <class S, int along> struct LineOf;
template <int along, class... Axes> struct LineOf<Share<Axes...>, along> { using type = Line<along, Axes...>; };

// The square matrix of a head in shared memory, rows a number apart.
template <int size> PARARNN_FUNCTION const real* stage_matrix(const real* source, real* memory, int threads) {
  for (int i = threadIdx.x; i < size * size; i += threads) memory[i / size * (size + 1) + i % size] = source[i];
  return memory;
}

// y[..., l] = sum over j of x[..., j] matrix[j, l], or of its transpose; x is in shared memory.
template <class S, int along, bool transposed>
PARARNN_FUNCTION void multiply(const real* x, const real* matrix, real (&y)[S::count]) {
  using L = typename LineOf<S, along>::type;
  constexpr int row = L::size + 1;
  PARARNN_FOR(i, S::count) y[i] = constant(0);
#pragma unroll 4
  for (int j = 0; j < L::size; ++j) {
    PARARNN_FOR(i, S::count) {
      if (!S::exists(i)) continue;
      const real entry = transposed ? matrix[L::index(i) * row + j] : matrix[j * row + L::index(i)];
      y[i] = multiply_add(x[L::rest(i) + j * L::stride], entry, y[i]);
    }
  }
}

// A thread's sums of the gradient of a square matrix: entries (j, l) of a grid of threads.
template <int size, int warps> struct SquareSums {
  static constexpr int threads = warps * lanes;
  static constexpr int wide = size * size >= 4 * threads ? (size % 4 == 0 ? 4 : 2) : 1;
  static constexpr int across = (size + wide - 1) / wide < threads ? (size + wide - 1) / wide : threads;
  static constexpr int columns = (size + across - 1) / across;
  static constexpr int down = threads / across, rows = (size + down - 1) / down;
  real sums[rows][columns];

  PARARNN_FUNCTION static int row(int n) { return (int)threadIdx.x / across + n * down; }
  PARARNN_FUNCTION static int column(int m) { return (int)threadIdx.x % across + m * across; }
  PARARNN_FUNCTION static bool exists(int n, int m) {
    return (int)threadIdx.x < across * down && row(n) < size && column(m) < size;
  }
  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(n, rows) {
      PARARNN_FOR(m, columns) sums[n][m] = constant(0);
    }
  }
  // Adds the sum over all other axes of x[..., j] y[..., l], both in shared memory.
  template <class S, int along> PARARNN_FUNCTION void add(const real* x, const real* y) {
    using L = typename LineOf<S, along>::type;
    constexpr int others = S::size / size;
    constexpr int step = along == 0 ? 1 : S::stride;  // between entries of the other axis
#pragma unroll 4
    for (int other = 0; other < others; ++other) {
      PARARNN_FOR(n, rows) {
        PARARNN_FOR(m, columns)
          if (exists(n, m))
            sums[n][m] = multiply_add(x[other * step + row(n) * L::stride],
                                      y[other * step + column(m) * L::stride], sums[n][m]);
      }
    }
  }
  PARARNN_FUNCTION void add_to(real* target, int64) const {
    PARARNN_FOR(n, rows) {
      PARARNN_FOR(m, columns)
        if (exists(n, m)) target[row(n) * size + column(m)] += sums[n][m];
    }
  }
};

// Parts in bfloat16 of two numbers, in one word; what is left of them is in their place then. Infinity leaves NaN, of
// which the next part makes a finite number: next to infinity it counts for nothing.
PARARNN_FUNCTION unsigned first_parts(float& x, float& y) {
  const unsigned word = to_bfloat16s(x, y);
  x -= __uint_as_float(word << 16);
  y -= __uint_as_float(word & 0xffff0000u);
  return word;
}
PARARNN_FUNCTION unsigned next_parts(int part, float& x, float& y) {
  const unsigned word = first_parts(x, y);
  return part == 0 ? word : lesser_bfloat16s(word, 0x7f007f00u);
}

constexpr int operand_parts = 2;  // of the numbers that a matrix multiplies

// A head's matrix, or its transpose, as fragments of tiles: in a warp's registers, or in shared memory.
template <int size, bool transposed, bool in_registers, int parts> struct TileMatrix {
  static constexpr int depth = size / 16, columns = size / 8;
  unsigned own[in_registers ? depth * columns * parts * 2 : 1];
  unsigned* memory;

  PARARNN_FUNCTION void load(const real* matrix, unsigned* shared) {
    memory = shared;
    PARARNN_FOR(k, depth) {
      PARARNN_FOR(n, columns) {
        PARARNN_FOR(half, 2) {
          const int j = k * 16 + half * 8 + lane() % 4 * 2, l = n * 8 + lane() / 4;
          float x = (float)matrix[transposed ? l * size + j : j * size + l];
          float y = (float)matrix[transposed ? l * size + j + 1 : (j + 1) * size + l];
          PARARNN_FOR(part, parts) {
            const unsigned word = next_parts(part, x, y);
            const int index = (k * columns + n) * parts + part;
            if constexpr (in_registers) own[index * 2 + half] = word;
            else if (warp() == 0) shared[(index * lanes + lane()) * 2 + half] = word;
          }
        }
      }
    }
  }
  PARARNN_FUNCTION void fragment(int k, int n, int part, unsigned (&b)[2]) const {
    const int index = (k * columns + n) * parts + part;
    if constexpr (in_registers) {
      b[0] = own[index * 2];
      b[1] = own[index * 2 + 1];
    } else {
      const Pack<unsigned, 2> pack = *reinterpret_cast<const Pack<unsigned, 2>*>(memory + (index * lanes + lane()) * 2);
      b[0] = pack.items[0];
      b[1] = pack.items[1];
    }
  }
};

// y = x matrix, for the rows of a warp and all columns.
template <int size, bool transposed, bool in_registers, int parts, int count>
PARARNN_FUNCTION void multiply_tiles(const real (&x)[count],
                                     const TileMatrix<size, transposed, in_registers, parts>& matrix,
                                     real (&y)[count]) {
  constexpr int columns = size / 4, depth = size / 16;  // numbers of a row
  PARARNN_FOR(tile, count / columns / 2) {
    unsigned a[operand_parts][depth][4];
    PARARNN_FOR(k, depth) {
      PARARNN_FOR(i, 4) {
        const int first = (tile * 2 + i % 2) * columns + k * 4 + i / 2 * 2;
        float left = (float)x[first], right = (float)x[first + 1];
        PARARNN_FOR(part, operand_parts) a[part][k][i] = next_parts(part, left, right);
      }
    }
    PARARNN_FOR(n, size / 8) {
      float sum[4] = {0, 0, 0, 0};
      PARARNN_FOR(k, depth) {
        PARARNN_FOR(part, parts) {
          unsigned b[2];
          matrix.fragment(k, n, part, b);
          PARARNN_UNROLL
          for (int i = 0; i + part < operand_parts; ++i) add_product(sum, a[i][k], b);
        }
      }
      PARARNN_FOR(i, 4) y[(tile * 2 + i / 2) * columns + n * 2 + i % 2] = sum[i];
    }
  }
}

// A warp's sums of the gradient of a square matrix, over its rows.
template <int size, int parts> struct TileSums {
  static constexpr int columns = size / 4;
  float sums[size / 16][size / 8][4];

  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(m, size / 16) {
      PARARNN_FOR(n, size / 8) {
        PARARNN_FOR(i, 4) sums[m][n][i] = 0.0f;
      }
    }
  }
  // Transposed fragments of a tile of rows: (part, half of the rows, 8 columns).
  template <int count>
  PARARNN_FUNCTION static void transpose_rows(const real (&x)[count], int tile, unsigned (&t)[parts][2][size / 8]) {
    PARARNN_FOR(half, 2) {
      PARARNN_FOR(n, size / 8) {
        const int first = (tile * 2 + half) * columns + n * 2;
        float left = (float)x[first], right = (float)x[first + 1];
        PARARNN_FOR(part, parts) t[part][half][n] = transpose(next_parts(part, left, right));
      }
    }
  }
  template <int count> PARARNN_FUNCTION void add(const real (&x)[count], const real (&y)[count]) {
    PARARNN_FOR(tile, count / columns / 2) {
      unsigned left[parts][2][size / 8], right[parts][2][size / 8];
      transpose_rows(x, tile, left);
      transpose_rows(y, tile, right);
      PARARNN_FOR(m, size / 16) {
        PARARNN_FOR(p, parts) {
          const unsigned a[4] = {left[p][0][2 * m], left[p][0][2 * m + 1], left[p][1][2 * m], left[p][1][2 * m + 1]};
          PARARNN_FOR(n, size / 8) {
            PARARNN_UNROLL
            for (int q = 0; p + q < parts; ++q) {
              const unsigned b[2] = {right[q][0][n], right[q][1][n]};
              add_product(sums[m][n], a, b);
            }
          }
        }
      }
    }
  }
  PARARNN_FUNCTION void add_to(real* target, int64 copy_numbers) const {
    real* const own = target + warp() * copy_numbers;
    PARARNN_FOR(m, size / 16) {
      PARARNN_FOR(n, size / 8) {
        PARARNN_FOR(i, 4)
          own[(m * 16 + i / 2 * 8 + lane() / 4) * size + n * 8 + lane() % 4 * 2 + i % 2] += (real)sums[m][n][i];
      }
    }
  }
};

// The same of matrices that are too large for one warp's registers: rows of the gradient are divided over the warps,
// and tiles of all `others` rows of the factors go through shared memory, transposed.
template <int size, int parts, int others, int warps> struct SplitTileSums {
  static constexpr int columns = size / 4, tiles = size / 16, own_tiles = (tiles + warps - 1) / warps;
  static constexpr int depth = others / 8;
  float sums[own_tiles][size / 8][4];

  PARARNN_FUNCTION void clear() {
    PARARNN_FOR(m, own_tiles) {
      PARARNN_FOR(n, size / 8) {
        PARARNN_FOR(i, 4) sums[m][n][i] = 0.0f;
      }
    }
  }
  // The tile of 8 rows and 8 columns of a part.
  PARARNN_FUNCTION static unsigned tile(const real* memory, int part, int column, int row) {
    return shared_address(memory) + ((part * (size / 8) + column) * depth + row) * tile_bytes;
  }
  template <int count> PARARNN_FUNCTION static void put(const real (&x)[count], const real* memory) {
    constexpr int halves = count / columns;
    PARARNN_FOR(half, halves) {
      PARARNN_FOR(n, size / 8) {
        const int first = half * columns + n * 2;
        float left = (float)x[first], right = (float)x[first + 1];
        PARARNN_FOR(part, parts)
          store_transposed(tile(memory, part, n, warp() * halves + half), next_parts(part, left, right));
      }
    }
  }
  PARARNN_FUNCTION void add(const real* x, const real* y) {
    PARARNN_FOR(own, own_tiles) {
      const int m = warp() + own * warps;
      if (m >= tiles) continue;
      PARARNN_UNROLL
      for (int k = 0; k < depth; k += 2) {
        PARARNN_FOR(p, parts) {
          unsigned first[2], second[2];
          load_tiles(tile(x, p, 2 * m, k), first);
          load_tiles(tile(x, p, 2 * m + 1, k), second);
          const unsigned a[4] = {first[0], second[0], first[1], second[1]};
          PARARNN_FOR(n, size / 8) {
            PARARNN_UNROLL
            for (int q = 0; p + q < parts; ++q) {
              unsigned b[2];
              load_tiles(tile(y, q, n, k), b);
              add_product(sums[own][n], a, b);
            }
          }
        }
      }
    }
  }
  PARARNN_FUNCTION void add_to(real* target, int64) const {
    PARARNN_FOR(own, own_tiles) {
      const int m = warp() + own * warps;
      if (m >= tiles) continue;
      PARARNN_FOR(n, size / 8) {
        PARARNN_FOR(i, 4)
          target[(m * 16 + i / 2 * 8 + lane() / 4) * size + n * 8 + lane() % 4 * 2 + i % 2] += (real)sums[own][n][i];
      }
    }
  }
};

// The threads of a block, and the shared memory by which they exchange values: two rounds, as some may still read
// those of a step when others write those of the next one.
template <int warps, int numbers> struct Exchange {
  real* memory;
  int round;

  PARARNN_FUNCTION explicit Exchange(char* memory) : memory(reinterpret_cast<real*>(memory)), round(0) {}
  PARARNN_FUNCTION void turn() { round ^= 1; }
  PARARNN_FUNCTION real* region(int first) const { return memory + round * numbers + first; }
  PARARNN_FUNCTION void meet() const {
    if constexpr (warps == 1) __syncwarp();
    else __syncthreads();
  }
};

}  // namespace pararnn
