// Functions whose every result depends on its own row alone, to the bit: see pararnn/lm/rows_op.py.
//
// Each has one path for all rows, and sums in an order that the size of a row decides. So there are no blocks of fewer
// rows and no other code at borders: missing rows are computed as copies of others, missing lanes as zeros.
#pragma once
#include <algorithm>

#include "functions.h"
#include "parallel.h"

namespace pararnn {

struct Threads {
  int64 count;
  void* openmp;
};

inline scalar total(real x) {
  scalar sums[lanes];
  std::memcpy(sums, &x, sizeof x);
  for (int n = lanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) sums[i] += sums[i + n];
  return sums[0];
}

inline scalar greatest(real x) {
  scalar result = -infinity;
  for (int i = 0; i < lanes; ++i) result = x[i] > result || x[i] != x[i] ? x[i] : result;
  return result;
}

// Calls f(first, count) for the vectors of a row.
template <class F> inline void by_vectors(int64 size, const F& f) {
  int64 i = 0;
  for (; i + lanes <= size; i += lanes) f(i, lanes);
  if (i < size) f(i, (int)(size - i));
}

inline mask first_lanes(int count) {
  mask m{};
  for (int i = 0; i < lanes; ++i) m[i] = i < count ? -1 : 0;
  return m;
}

constexpr int side = 4;  // rows and columns of a block: its 16 sums and 8 operands fit in registers
constexpr int64 tile = 64;

// W: the type of weights in memory. They are widened where they are read.
template <class W> struct Product {
  const scalar* x;
  const W* weight;
  scalar* y;
  int64 heads, rows, inputs, outputs, x_row, x_head;

  void block(const scalar* const* x_rows, const W* const* lines, scalar (*results)[side]) const {
    real sums[side][side] = {};
    by_vectors(inputs, [&](int64 i, int count) {
      real a[side], b[side];
      for (int r = 0; r < side; ++r) a[r] = load(x_rows[r] + i, count);
      for (int c = 0; c < side; ++c) b[c] = load(lines[c] + i, count);
      for (int r = 0; r < side; ++r)
        for (int c = 0; c < side; ++c) sums[r][c] = multiply_add(a[r], b[c], sums[r][c]);
    });
    for (int r = 0; r < side; ++r)
      for (int c = 0; c < side; ++c) results[r][c] = total(sums[r][c]);
  }

  void run_tile(int64 head, int64 first_row, int64 first_line) const {
    const W* const matrix = weight + head * outputs * inputs;
    scalar* const to = y + head * rows * outputs;
    const int64 end_row = std::min(first_row + tile, rows), end_line = std::min(first_line + tile, outputs);
    for (int64 row = first_row; row < end_row; row += side) {
      const scalar* x_rows[side];
      for (int r = 0; r < side; ++r) x_rows[r] = x + head * x_head + std::min(row + r, rows - 1) * x_row;
      for (int64 line = first_line; line < end_line; line += side) {
        const W* lines[side];
        for (int c = 0; c < side; ++c) lines[c] = matrix + std::min(line + c, outputs - 1) * inputs;
        scalar results[side][side];
        block(x_rows, lines, results);
        for (int r = 0; r < side && row + r < rows; ++r)
          for (int c = 0; c < side && line + c < outputs; ++c) to[(row + r) * outputs + line + c] = results[r][c];
      }
    }
  }

  void run(Threads threads) const {
    const int64 row_tiles = (rows + tile - 1) / tile, line_tiles = (outputs + tile - 1) / tile;
    run_tasks(heads * row_tiles * line_tiles, threads.count, threads.openmp, [&](int64 task) {
      run_tile(task / (row_tiles * line_tiles), task / line_tiles % row_tiles * tile, task % line_tiles * tile);
    });
  }
};

template <class F> inline void by_rows(int64 rows, Threads threads, const F& f) {
  run_tasks((rows + tile - 1) / tile, threads.count, threads.openmp, [&](int64 task) {
    for (int64 row = task * tile; row < std::min((task + 1) * tile, rows); ++row) f(row);
  });
}

inline real silu(real x) { return x * sigmoid(x); }

struct Norm {
  const scalar *x, *gate, *weight;
  scalar* y;
  int64 size;
  bool centred;
  double eps;

  void operator()(int64 row) const {
    const scalar *const source = x + row * size, *const gates = gate + row * size;
    scalar* const to = y + row * size;
    const auto value = [&](int64 i, int count) {
      const real v = load(source + i, count);
      return gate == nullptr ? v : v * silu(load(gates + i, count));
    };
    scalar mean = 0;
    real sums{};
    if (centred) {
      by_vectors(size, [&](int64 i, int count) { sums = sums + value(i, count); });
      mean = total(sums) / scalar(size);
      sums = real{};
    }
    by_vectors(size, [&](int64 i, int count) {
      const real v = select(first_lanes(count), value(i, count) - (mean - real{}), real{});
      sums = multiply_add(v, v, sums);
    });
    const scalar factor = scalar(1) / std::sqrt(total(sums) / scalar(size) + scalar(eps));
    by_vectors(size, [&](int64 i, int count) {
      const real v = (value(i, count) - (mean - real{})) * (factor - real{});
      store(to + i, v * load(weight + i, count), count);
    });
  }
};

// silu(conv(u)): taps by lag, inputs before the first row from the halo, none from before a document's first.
struct Conv {
  const scalar *u, *weight, *bias, *halo;
  const int64* since;
  scalar* y;
  int64 steps, size, taps;

  void operator()(int64 row) const {
    const int64 batch = row / steps, t = row % steps;
    const int64 back = since == nullptr ? taps : since[row];
    by_vectors(size, [&](int64 i, int count) {
      real sum = load(bias + i, count);
      for (int64 lag = 0; lag < taps; ++lag) {
        const scalar* source = nullptr;
        if (lag <= t) source = u + (row - lag) * size;
        else if (halo != nullptr) source = halo + (batch * (taps - 1) + taps - 1 + t - lag) * size;
        const real v = source == nullptr || lag > back ? real{} : load(source + i, count);
        sum = multiply_add(load(weight + lag * size + i, count), v, sum);
      }
      store(y + row * size + i, silu(sum), count);
    });
  }
};

// The logarithm of softmax(row)[target], 0 where the target is negative.
struct LogProb {
  const scalar* logits;
  const int64* target;
  scalar* y;
  int64 size;

  void operator()(int64 row) const {
    const scalar* const source = logits + row * size;
    if (target[row] < 0) {
      y[row] = 0;
      return;
    }
    real most = constant(-infinity);
    by_vectors(size, [&](int64 i, int count) {
      const real v = select(first_lanes(count), load(source + i, count), constant(-infinity));
      most = select(v > most, v, select(v != v, v, most));
    });
    const scalar largest = greatest(most);
    real sums{};
    by_vectors(size, [&](int64 i, int count) {
      const real v = exp(load(source + i, count) - (largest - real{}));
      sums = sums + select(first_lanes(count), v, real{});
    });
    y[row] = source[target[row]] - largest - std::log(total(sums));
  }
};

// softmax(q k^T scale) v of a query, over keys from the first to the last that it sees, counted from the first.
//
// W: the type of keys and values in memory, which are widened where they are read. With a table of a row's pages they
// are (pages, heads, page, size) instead of (batch, heads, keys, size), and k_row is the stride of pages.
template <class W> struct Attention {
  const scalar* q;
  const W *k, *v;
  const int64 *first, *last;
  const int32_t* table;
  scalar* y;
  int64 heads, steps, size, q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, table_row, page;
  double scale;

  void operator()(int64 row) const {
    const int64 head = row % heads, query = row / heads, batch = query / steps;
    const int64 begin = first[query], count = last[query] + 1 - begin;
    const scalar* const source = q + batch * q_row + head * q_head + query % steps * q_time;
    std::vector<scalar> weights(count);
    std::vector<const W*> values(count);
    scalar largest = -infinity;
    for (int64 j = 0; j < count; ++j) {
      const int64 key = begin + j;
      const int64 unit = table == nullptr ? batch : table[batch * table_row + key / page];
      const int64 time = table == nullptr ? key : key % page;
      const W* const line = k + unit * k_row + head * k_head + time * k_time;
      values[j] = v + unit * v_row + head * v_head + time * v_time;
      real sums{};
      by_vectors(size, [&](int64 i, int n) { sums = multiply_add(load(source + i, n), load(line + i, n), sums); });
      const scalar score = weights[j] = total(sums) * scalar(scale);
      largest = score > largest || score != score ? score : largest;
    }
    real sums{};
    by_vectors(count, [&](int64 j, int n) {
      const real weight = exp(load(&weights[j], n) - (largest - real{}));
      sums = sums + select(first_lanes(n), weight, real{});
      store(&weights[j], weight, n);
    });
    const real factor = scalar(1) / total(sums) - real{};
    by_vectors(size, [&](int64 i, int n) {
      real sum{};
      for (int64 j = 0; j < count; ++j) sum = multiply_add(weights[j] - real{}, load(values[j] + i, n), sum);
      store(y + row * size + i, sum * factor, n);
    });
  }
};

// Calls f with a pointer of the type of numbers of some bytes in memory, negative for float16.
template <class F> inline void by_kind(int64 kind, const void* numbers, const F& f) {
#if !PARARNN_WIDE
  if (kind == 2) return f((const bfloat16*)numbers);
  if (kind == -2) return f((const float16*)numbers);
#endif
  f((const scalar*)numbers);
}

}  // namespace pararnn

extern "C" {

#define PARARNN_ROWS_FUNCTION __attribute__((visibility("default"))) void

PARARNN_ROWS_FUNCTION product(const int64_t* words) {
  using namespace pararnn;
  by_kind(words[9], (const void*)words[1], [&](auto* weight) {
    const Product<std::remove_cv_t<std::remove_pointer_t<decltype(weight)>>> job = {
        (const scalar*)words[0], weight, (scalar*)words[2], words[3], words[4], words[5], words[6], words[7], words[8]};
    job.run({words[10], (void*)words[11]});
  });
}

PARARNN_ROWS_FUNCTION norm(const int64_t* words) {
  using namespace pararnn;
  double eps;
  std::memcpy(&eps, words + 7, sizeof eps);
  const Norm job = {(const scalar*)words[0], (const scalar*)words[1], (const scalar*)words[2], (scalar*)words[3],
                    words[5], words[6] != 0, eps};
  by_rows(words[4], {words[8], (void*)words[9]}, job);
}

PARARNN_ROWS_FUNCTION gated(const int64_t* words) {
  using namespace pararnn;
  const scalar *const a = (const scalar*)words[0], *const b = (const scalar*)words[1];
  scalar* const y = (scalar*)words[2];
  constexpr int64 size = 64 * lanes;
  const int64 numbers = words[3];
  by_rows((numbers + size - 1) / size, {words[4], (void*)words[5]}, [&](int64 row) {
    by_vectors(std::min(size, numbers - row * size), [&](int64 i, int count) {
      const int64 at = row * size + i;
      const real gate = silu(load(a + at, count));
      store(y + at, b == nullptr ? gate : gate * load(b + at, count), count);
    });
  });
}

PARARNN_ROWS_FUNCTION conv(const int64_t* words) {
  using namespace pararnn;
  const Conv job = {(const scalar*)words[0], (const scalar*)words[1], (const scalar*)words[2], (const scalar*)words[3],
                    (const int64*)words[4], (scalar*)words[5], words[7], words[8], words[9]};
  by_rows(words[6] * words[7], {words[10], (void*)words[11]}, job);
}

PARARNN_ROWS_FUNCTION log_prob(const int64_t* words) {
  using namespace pararnn;
  const LogProb job = {(const scalar*)words[0], (const int64*)words[1], (scalar*)words[2], words[4]};
  by_rows(words[3], {words[5], (void*)words[6]}, job);
}

PARARNN_ROWS_FUNCTION attention(const int64_t* words) {
  using namespace pararnn;
  double scale;
  std::memcpy(&scale, words + 23, sizeof scale);
  by_kind(words[22], (const void*)words[1], [&](auto* k) {
    const Attention<std::remove_cv_t<std::remove_pointer_t<decltype(k)>>> job = {
        (const scalar*)words[0], k, (decltype(k))words[2], (const int64*)words[3], (const int64*)words[4],
        (const int32_t*)words[5], (scalar*)words[6], words[8], words[9], words[10], words[11], words[12], words[13],
        words[14], words[15], words[16], words[17], words[18], words[19], words[20], words[21], scale};
    by_rows(words[7] * words[8] * words[9], {words[24], (void*)words[25]}, job);
  });
}

}  // extern "C"
