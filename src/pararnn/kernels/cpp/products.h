// Products of rows with a matrix, packed once.
//
// A packed matrix has its columns in vectors: [vector][row of the matrix][lane], the last vector filled up with
// zeros. Rows are multiplied in blocks whose sums stay in registers, so that a matrix is read once for several
// rows. A sum runs over the matrix's rows in order, whatever the block, and over partial_rows of them before it is added
// to the others: bits do not depend on the block, and rounding grows with the root of the sizes of both.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "functions.h"

namespace pararnn {

// Memory aligned for vectors, zeroed unless all of it is written anyway.
struct Storage {
  void* start = nullptr;
  explicit Storage(int64 bytes, bool zeroed = true) {
    const size_t size = ((size_t)bytes + 63) / 64 * 64 + 64;
    if (posix_memalign(&start, 64, size) != 0) throw std::bad_alloc();
    if (zeroed) std::memset(start, 0, size);
  }
  ~Storage() { std::free(start); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  template <class T> T* as() const { return (T*)start; }
};

// Rows of a block and vectors side by side: their sums, the vectors of the matrix and one factor fit in registers.
#if PARARNN_VECTOR_BYTES == 64
constexpr int block_rows = 8, block_vectors = 3;
#else
constexpr int block_rows = 6, block_vectors = 2;
#endif

constexpr int64 partial_rows = 128;

// y[row][vector] = sum over i of x[row][i] matrix[vector][i]; or this is added to y.
template <int rows, int vectors>
inline void multiply_block(const scalar* x, int64 x_stride, const scalar* matrix, int64 depth, scalar* y,
                           int64 y_stride, bool adds) {
  for (int64 begin = 0; begin == 0 || begin < depth; begin += partial_rows) {
    real sums[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) sums[r][v] = real{};
    for (int64 i = begin, end = std::min(depth, begin + partial_rows); i < end; ++i) {
      real column[vectors];
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) column[v] = load_as(matrix + (v * depth + i) * lanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const real factor = x[r * x_stride + i] - real{};
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add(factor, column[v], sums[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) {
        scalar* const total = y + r * y_stride + v * lanes;
        store_as(total, begin == 0 && !adds ? sums[r][v] : load_as(total) + sums[r][v]);
      }
  }
}

template <int vectors>
inline void multiply_rows(int rows, const scalar* x, int64 x_stride, const scalar* matrix, int64 depth, scalar* y,
                          int64 y_stride, bool adds) {
  switch (rows) {
#define PARARNN_ROWS(n) \
  case n: return multiply_block<n, vectors>(x, x_stride, matrix, depth, y, y_stride, adds);
    PARARNN_ROWS(1) PARARNN_ROWS(2) PARARNN_ROWS(3) PARARNN_ROWS(4) PARARNN_ROWS(5) PARARNN_ROWS(6)
#if PARARNN_VECTOR_BYTES == 64
    PARARNN_ROWS(7) PARARNN_ROWS(8)
#endif
#undef PARARNN_ROWS
  }
}

// Few rows need more vectors side by side, to hide the latency of a sum.
template <int vectors>
inline void multiply_few(int rows, const scalar* x, int64 x_stride, const scalar* matrix, int64 depth, scalar* y,
                         int64 y_stride, bool adds) {
  if (rows == 1) return multiply_block<1, vectors>(x, x_stride, matrix, depth, y, y_stride, adds);
  return multiply_block<2, vectors>(x, x_stride, matrix, depth, y, y_stride, adds);
}

// Multiplies `rows` rows of x by a packed matrix of `depth` rows and `vectors` vectors of columns. adds: to y.
inline void multiply(int64 rows, const scalar* x, int64 x_stride, const scalar* matrix, int64 depth, int64 vectors,
                     scalar* y, int64 y_stride, bool adds = false) {
  constexpr int most = 4;
  int64 v = 0;
  if (rows <= 2)
    for (; v + most <= vectors; v += most)
      multiply_few<most>((int)rows, x, x_stride, matrix + v * depth * lanes, depth, y + v * lanes, y_stride, adds);
  const int64 blocks = (rows + block_rows - 1) / block_rows;
  const auto columns = [&](auto count) PARARNN_INLINE {
    for (int64 b = 0; b < blocks; ++b) {
      const int64 first = rows * b / blocks, end = rows * (b + 1) / blocks;
      multiply_rows<decltype(count)::value>((int)(end - first), x + first * x_stride, x_stride,
                                            matrix + v * depth * lanes, depth, y + first * y_stride + v * lanes,
                                            y_stride, adds);
    }
  };
  for (; v + block_vectors <= vectors; v += block_vectors)
    columns(std::integral_constant<int, block_vectors>());
  for (; v < vectors; ++v) columns(std::integral_constant<int, 1>());
}

// Alternates the lanes of a and b, from lane `first` of both.
template <int first, int... lane>
inline real interleave(real a, real b, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (first + lane / 2 + lane % 2 * lanes)...);
#else
  return __builtin_shuffle(a, b, whole{(first + lane / 2 + lane % 2 * lanes)...});
#endif
}

// Transposes a square of numbers, whose rows are vectors. A round doubles the columns that are adjacent.
inline void transpose(real (&rows)[lanes]) {
  constexpr auto order = std::make_integer_sequence<int, lanes>();
  constexpr int half = lanes / 2;
#pragma GCC unroll 4
  for (int round = 1; round < lanes; round *= 2) {
    real next[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + half], order);
      next[2 * i + 1] = interleave<half>(rows[i], rows[i + half], order);
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) rows[i] = next[i];
  }
}

// Packs a matrix (depth, columns), or the transpose of one (columns, depth), whose rows in memory are `stride` apart.
inline void pack(const scalar* matrix, int64 stride, bool transposed, int64 depth, int64 columns, scalar* packed) {
  for (int64 first = 0; first < columns; first += lanes, packed += depth * lanes) {
    const int width = (int)std::min<int64>(lanes, columns - first);
    for (int64 i = 0; i < depth && !transposed; ++i)
      store_as(packed + i * lanes, load(matrix + i * stride + first, width));
    for (int64 i = 0; i < depth && transposed; i += lanes) {
      const int height = (int)std::min<int64>(lanes, depth - i);
      real square[lanes] = {};
      for (int j = 0; j < width; ++j) square[j] = load(matrix + (first + j) * stride + i, height);
      transpose(square);
      for (int j = 0; j < height; ++j) store_as(packed + (i + j) * lanes, square[j]);
    }
  }
}

}  // namespace pararnn
