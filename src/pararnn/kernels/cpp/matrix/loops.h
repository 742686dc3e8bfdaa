// What the emitted loops of a step call. Arrays have their last axis filled up to whole vectors; what stands in
// the rest of the last one is anything, and no result may depend on it.
#pragma once
#include "../products.h"

namespace pararnn {

// A parameter by which a step multiplies, or its transpose. A parameter of more axes is a matrix for each index of the
// others, (depth, columns) or its transpose, rows in memory `stride` apart; the others have counts and strides.
struct PackedMatrix {
  int param, transposed;
  int64 depth = 0, columns = 0, stride = 0, counts[2] = {1, 1}, strides[2] = {0, 0};
};

inline real broadcast(scalar x) { return x - real{}; }

// The lanes of the vector at v that are numbers of an axis; `other` in those beyond it.
inline real inside(real x, int64 v, int64 size, real other) {
  if (size % lanes == 0 || v + lanes <= size) return x;
  real lane;
  for (int i = 0; i < lanes; ++i) lane[i] = (scalar)i;
  return select(lane < constant((double)(size - v)), x, other);
}
template <int64 size> inline real inside(real x, int64 v, real other) { return inside(x, v, size, other); }

// Every second lane of a, then of b.
template <int first> inline real every_second(real a, real b) {
#if defined(__clang__)
  real x;
  for (int i = 0; i < lanes; ++i) x[i] = i < lanes / 2 ? a[2 * i + first] : b[2 * i + first - lanes];
  return x;
#else
  whole index;
  for (int i = 0; i < lanes; ++i) index[i] = 2 * i + first;
  return __builtin_shuffle(a, b, index);
#endif
}

// Combines the lanes of each of `lanes` vectors, in pairs: lane i of the result is that of vector i.
template <class Combine> inline real combine_rows(real* rows) {
#pragma GCC unroll 8
  for (int count = lanes; count > 1; count /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i) {
      const real a = rows[2 * i], b = rows[2 * i + 1];
      rows[i] = Combine::of(every_second<0>(a, b), every_second<1>(a, b));
    }
  return rows[0];
}

// The combined lanes of the rows of an axis, whose vectors come one after the other.
template <class Combine, int64 fixed_size = 0> struct RowsOfLanes {
  real rows[lanes] = {};
  scalar* target;
  int64 size;
  explicit RowsOfLanes(scalar* array, int64 length = fixed_size) : target(array), size(length) {}
  void put(int64 i, real row) {
    rows[i % lanes] = row;
    if (i % lanes == lanes - 1 || i + 1 == size) store_as(target + i / lanes * lanes, combine_rows<Combine>(rows));
  }
};

// The combined lanes of one vector.
template <class Combine> inline scalar combine_lanes(real x, Combine) {
  for (int i = 1; i < lanes; i *= 2) x = Combine::of(every_second<0>(x, x), every_second<1>(x, x));
  return x[0];
}

// y[b][l] = sum over j of x[b][j] matrix[j][l], where x[b][j] and y[b][l] are `width` numbers.
inline void multiply_columns(int64 rows, const scalar* x, int64 width, const scalar* matrix, int64 size, scalar* y) {
  for (int64 b = 0; b < rows; ++b)
    for (int64 l = 0; l < size; ++l)
      for (int64 v = 0; v < width; v += lanes) {
        real sum{};
        for (int64 j = 0; j < size; ++j) {
          const real factor = broadcast(matrix[(l / lanes * size + j) * lanes + l % lanes]);
          sum = multiply_add(factor, load_as(x + (b * size + j) * width + v), sum);
        }
        store_as(y + (b * size + l) * width + v, sum);
      }
}

// Adds `count` rows of an outer product in `vectors` columns of vectors, whose sums stay in registers.
template <int count, int vectors, int64 stride>
inline void add_outer_block(int64 rows, const scalar* left, int64 left_stride, const scalar* right,
                            int64 right_stride, scalar* target) {
  real sums[count][vectors];
#pragma GCC unroll 8
  for (int n = 0; n < count; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sums[n][v] = real{};
  for (int64 i = 0; i < rows; ++i) {
    real row[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) row[v] = load_as(right + i * right_stride + v * lanes);
#pragma GCC unroll 8
    for (int n = 0; n < count; ++n) {
      const real factor = broadcast(left[i * left_stride + n]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[n][v] = multiply_add(factor, row[v], sums[n][v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < count; ++n)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      scalar* const total = target + n * stride + v * lanes;
      store_as(total, load_as(total) + sums[n][v]);
    }
}

// target[j][l] += sum over rows of left[row][j] right[row][l]. stride: distance of the target's rows.
template <int64 size, int64 padded, int64 stride = padded>
inline void add_outer(int64 rows, const scalar* left, int64 left_stride, const scalar* right, int64 right_stride,
                      scalar* target) {
  constexpr int vectors = padded % (2 * lanes) == 0 ? 2 : 1, block = 8 / vectors;
  for (int64 l = 0; l < padded; l += vectors * lanes) {
    int64 j = 0;
    for (; j + block <= size; j += block)
      add_outer_block<block, vectors, stride>(rows, left + j, left_stride, right + l, right_stride,
                                              target + j * stride + l);
    for (; j < size; ++j)
      add_outer_block<1, vectors, stride>(rows, left + j, left_stride, right + l, right_stride,
                                          target + j * stride + l);
  }
}

// The same of an axis whose size a call decides, and rows that follow each other.
inline void add_outer(int64 size, int64 rows, const scalar* left, const scalar* right, scalar* target) {
  const int64 width = (size + lanes - 1) / lanes * lanes;
  for (int64 i = 0; i < rows; ++i)
    for (int64 j = 0; j < size; ++j) {
      const real factor = broadcast(left[i * width + j]);
      for (int64 l = 0; l < width; l += lanes) {
        scalar* const total = target + j * width + l;
        store_as(total, multiply_add(factor, load_as(right + i * width + l), load_as(total)));
      }
    }
}

// target[j][l] += sum over c < count of left[j][c] right[l][c].
template <int64 size, int64 padded>
inline void add_inner(int64 count, const scalar* left, const scalar* right, scalar* target) {
  const int64 stride = (count + lanes - 1) / lanes * lanes;
  for (int64 j = 0; j < size; ++j)
    for (int64 l = 0; l < size; ++l) {
      real sum{};
      int64 c = 0;
      for (; c + lanes <= count; c += lanes)
        sum = multiply_add(load_as(left + j * stride + c), load_as(right + l * stride + c), sum);
      scalar total = combine_lanes(sum, Sum());
      for (; c < count; ++c) total += left[j * stride + c] * right[l * stride + c];
      target[j * padded + l] += total;
    }
}

constexpr int64 padded(int64 count) { return (count + lanes - 1) / lanes * lanes; }

// y[b][l] = sum over j of x[b][j] matrix[j][l], or of its transpose, of a matrix of the row.
template <bool transposed>
inline void multiply_by_row(int64 size, int64 rows, const scalar* x, const scalar* matrix, scalar* y) {
  const int64 width = padded(size);
  for (int64 b = 0; b < rows; ++b, x += width, y += width) {
    if constexpr (transposed) {
      RowsOfLanes<Sum> sums(y, size);
      for (int64 j = 0; j < size; ++j) {
        real sum{};
        for (int64 v = 0; v < width; v += lanes)
          sum = multiply_add(inside(load_as(x + v), v, size, real{}), load_as(matrix + j * width + v), sum);
        sums.put(j, sum);
      }
    } else {
      for (int64 v = 0; v < width; v += lanes) {
        real sum{};
        for (int64 j = 0; j < size; ++j) sum = multiply_add(broadcast(x[j]), load_as(matrix + j * width + v), sum);
        store_as(y + v, sum);
      }
    }
  }
}

// Numbers of the tensors of a kind, and of their arrays.
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

// Copies between memory and an array: rows of `count` numbers.
template <class T> inline void to_array(const T* memory, int64 rows, int64 count, scalar* array) {
  for (int64 r = 0; r < rows; ++r)
    for (int64 c = 0; c < count; c += lanes)
      store_as(array + r * padded(count) + c, load(memory + r * count + c, (int)std::min<int64>(lanes, count - c)));
}
template <class T> inline void from_array(const scalar* array, int64 rows, int64 count, T* memory) {
  for (int64 r = 0; r < rows; ++r)
    for (int64 c = 0; c < count; c += lanes)
      store(memory + r * count + c, load_as(array + r * padded(count) + c), (int)std::min<int64>(lanes, count - c));
}

}  // namespace pararnn
