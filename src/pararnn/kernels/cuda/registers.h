// Arrays in registers. Loops over them are unrolled, so that no index remains at run time.
//
// Needs, in addition to real.h: per_lane.
#pragma once
#include "real.h"

namespace pararnn {

// n numbers of one channel. Converts to an array for emitted functions.
template <int n> struct Vec {
  using Array = real[n];
  Array items;

  PARARNN_FUNCTION operator Array&() { return items; }
  PARARNN_FUNCTION operator const Array&() const { return items; }
  PARARNN_FUNCTION real& operator[](int i) { return items[i]; }
  PARARNN_FUNCTION const real& operator[](int i) const { return items[i]; }
};

// Returns the vector of f(0) ... f(n - 1).
template <int n, class F> PARARNN_FUNCTION Vec<n> vec(const F& f) {
  Vec<n> x;
  each<n>([&](int i) { x[i] = f(i); });
  return x;
}

template <int n> PARARNN_FUNCTION Vec<n> filled(real value) {
  return vec<n>([&](int) { return value; });
}

// A lane's fragment of a tile of n rows: its neighbouring channels of each row.
template <int n> struct Fragment {
  using Row = real[per_lane];
  using Array = real[n][per_lane];
  Array rows;

  PARARNN_FUNCTION operator Array&() { return rows; }
  PARARNN_FUNCTION operator const Array&() const { return rows; }
  PARARNN_FUNCTION Row& operator[](int i) { return rows[i]; }
  PARARNN_FUNCTION const Row& operator[](int i) const { return rows[i]; }

  PARARNN_FUNCTION Vec<n> column(int c) const {
    return vec<n>([&](int i) { return rows[i][c]; });
  }
  PARARNN_FUNCTION void set_column(int c, const Vec<n>& x) {
    each<n>([&](int i) { rows[i][c] = x[i]; });
  }
  PARARNN_FUNCTION void fill(real value) {
    each<n>([&](int i) { each<per_lane>([&](int c) { rows[i][c] = value; }); });
  }
};

// The same for plain arrays.
template <int n> PARARNN_FUNCTION Vec<n> column_of(const real (&rows)[n][per_lane], int c) {
  return vec<n>([&](int i) { return rows[i][c]; });
}

}  // namespace pararnn
