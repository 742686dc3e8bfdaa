constexpr int warps = 4, exchange_numbers = 0;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
using Axis_K = Axis<64, 8, 4, 1, 4, 8, false>;
constexpr int size_V = 32;
using Axis_V = Axis<32, 4, 1, 4, 1, 2, false>;
using Rows = Axis_K;
using Columns = Axis_V;
struct States {
  static constexpr int numbers = 2048, entries = 16;
  real x0[Share<Axis_K, Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K, Axis_V>(), own.x0, 0, 0);
  }
  PARARNN_FUNCTION void operator+=(const States& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K, Axis_V>::count; ++n) x0[n] += other.x0[n];
  }
};
struct Gates {
  static constexpr int numbers = 162, entries = 20;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<Axis_V>::count];
  real x3[Share<>::count];
  real x4[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<Axis_V>(), own.x2, 2, 128);
    f(Share<>(), own.x3, 3, 160);
    f(Share<>(), own.x4, 4, 161);
  }
  PARARNN_FUNCTION void operator+=(const Gates& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x4[n] += other.x4[n];
  }
};
struct Params {
  static constexpr int numbers = 0, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const Params& other) {
  }
};
struct Output {
  static constexpr int numbers = 32, entries = 2;
  real x0[Share<Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_V>(), own.x0, 0, 0);
  }
  PARARNN_FUNCTION void operator+=(const Output& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x0[n] += other.x0[n];
  }
};
constexpr int num_states = 1, num_params = 0;
constexpr bool of_all_heads[] = {0};
struct Matrices {
  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, real* memory, unsigned* fragments) {
  }
};
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, States& new_state) {
  real a2[1];
  PARARNN_UNROLL
  for (real& x : a2) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    a2[0] = a2[0] + existing<Axis_K>(t1, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a2);
  real a3[1];
  {
    const real x0 = a2[0];
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    a3[0] = t2;
  }
  real a4[8];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a3[0];
    const real t2 = x0 * x1;
    a4[i_K] = t2;
  }
  real a5[2];
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a4[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a5[i_V] = a5[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a5);
  real a0[1];
  real a1[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a0[0] = t1;
    const real x2 = gate.x4[0];
    const real t3 = sigmoid(x2);
    a1[0] = t3;
  }
  real a6[8];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a1[0];
    const real x1 = a4[i_K];
    const real t2 = x0 * x1;
    a6[i_K] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a6[i_K];
      const real x1 = a5[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = a0[0];
      const real t6 = x5 * t4;
      const real x7 = gate.x2[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t9;
    }
  }
}

PARARNN_FUNCTION void readout_step(Block& block, const Matrices& matrices, const Params& param, const States& new_state, const Gates& gate, Output& output) {
  real a0[1];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    const real t1 = x0 * x0;
    a0[0] = a0[0] + existing<Axis_K>(t1, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a0);
  real a1[1];
  {
    const real x0 = a0[0];
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    a1[0] = t2;
  }
  real a2[8];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    const real x1 = a1[0];
    const real t2 = x0 * x1;
    a2[i_K] = t2;
  }
  real a3[2];
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a2[i_K];
      const real x1 = new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a3[i_V] = a3[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a3);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a3[i_V];
    output.x0[i_V] = x0;
  }
}

constexpr int warps = 4, exchange_numbers = 1056;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
using Axis_K = Axis<64, 16, 2, 1, 4, 4, false>;
constexpr int size_V = 32;
using Axis_V = Axis<32, 2, 1, 4, 1, 4, false>;
using Rows = Axis_K;
using Columns = Axis_V;
struct States {
  static constexpr int numbers = 2048, entries = 16;
  real x0[Share<Axis_K, Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K, Axis_V>(), own.x0, 0, 0);
  }
  PARARNN_FUNCTION void operator+=(const States& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K, Axis_V>::count; ++n) x0[n] += other.x0[n];
  }
};
struct Gates {
  static constexpr int numbers = 162, entries = 14;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<Axis_V>::count];
  real x3[Share<>::count];
  real x4[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<Axis_V>(), own.x2, 2, 128);
    f(Share<>(), own.x3, 3, 160);
    f(Share<>(), own.x4, 4, 161);
  }
  PARARNN_FUNCTION void operator+=(const Gates& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x4[n] += other.x4[n];
  }
};
struct Params {
  static constexpr int numbers = 0, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const Params& other) {
  }
};
struct Output {
  static constexpr int numbers = 32, entries = 4;
  real x0[Share<Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_V>(), own.x0, 0, 0);
  }
  PARARNN_FUNCTION void operator+=(const Output& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x0[n] += other.x0[n];
  }
};
constexpr int num_states = 1, num_params = 0;
constexpr bool of_all_heads[] = {0};
struct Matrices {
  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, real* memory, unsigned* fragments) {
  }
};
struct Outers {
  PARARNN_FUNCTION void clear() {
  }
  PARARNN_FUNCTION void add_to(real* target, int64 copy_numbers) const {
  }
};
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, States& new_state) {
  real a2[1];
  PARARNN_UNROLL
  for (real& x : a2) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    a2[0] = a2[0] + existing<Axis_K>(t1, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a2);
  real a3[1];
  {
    const real x0 = a2[0];
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    a3[0] = t2;
  }
  real a4[4];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a3[0];
    const real t2 = x0 * x1;
    a4[i_K] = t2;
  }
  real a5[4];
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a4[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a5[i_V] = a5[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a5);
  real a0[1];
  real a1[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a0[0] = t1;
    const real x2 = gate.x4[0];
    const real t3 = sigmoid(x2);
    a1[0] = t3;
  }
  real a6[4];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a1[0];
    const real x1 = a4[i_K];
    const real t2 = x0 * x1;
    a6[i_K] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a6[i_K];
      const real x1 = a5[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = a0[0];
      const real t6 = x5 * t4;
      const real x7 = gate.x2[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t9;
    }
  }
}

PARARNN_FUNCTION void backward_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, const States& grad_new_state, const Output& grad_output, States& grad_state, Gates& grad_gate, Params& grad_param, Outers& grad_matrix) {
  block.turn();
  real a2[1];
  real a7[1];
  PARARNN_UNROLL
  for (real& x : a2) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a7) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    const real x2 = gate.x0[i_K];
    const real t3 = x2 * x2;
    a2[0] = a2[0] + existing<Axis_K>(t1, i_K, constant(0));
    a7[0] = a7[0] + existing<Axis_K>(t3, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a2);
  combine_lanes<Axis_K, Sum>(a7);
  real a0[1];
  real a1[1];
  real a3[1];
  real a8[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a0[0] = t1;
    const real x2 = gate.x4[0];
    const real t3 = sigmoid(x2);
    a1[0] = t3;
    const real x4 = a2[0];
    const real t5 = x4 + constant(1e-06);
    const real t6 = constant(1.0) / sqrt(t5);
    a3[0] = t6;
    const real x7 = a7[0];
    const real t8 = x7 + constant(1e-06);
    const real t9 = constant(1.0) / sqrt(t8);
    a8[0] = t9;
  }
  real a4[4];
  real a6[4];
  real a9[4];
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a3[0];
    const real t2 = x0 * x1;
    a4[i_K] = t2;
    const real x3 = a1[0];
    const real t4 = x3 * t2;
    a6[i_K] = t4;
    const real x5 = gate.x0[i_K];
    const real x6 = a8[0];
    const real t7 = x5 * x6;
    a9[i_K] = t7;
  }
  real a11[16];
  real a17[16];
  real a20[16];
  real a5[4];
  real a14[4];
  real a15[4];
  real a22[4];
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a14) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a15) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a22) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a4[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      const real x3 = grad_output.x0[i_V];
      const real x4 = a9[i_K];
      const real t5 = x3 * x4;
      const real x6 = grad_new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t7 = x6 + t5;
      a11[(i_K) * Axis_V::count + i_V] = t7;
      const real x8 = a6[i_K];
      const real t9 = t7 * x8;
      const real x10 = gate.x2[i_V];
      const real t11 = t7 * x10;
      const real x12 = a0[0];
      const real t13 = t7 * x12;
      a17[(i_K) * Axis_V::count + i_V] = t13;
      const real t14 = -t13;
      a20[(i_K) * Axis_V::count + i_V] = t14;
      const real t15 = t14 * x8;
      a5[i_V] = a5[i_V] + existing<Axis_K>(t2, i_K, constant(0));
      a14[i_K] = a14[i_K] + existing<Axis_V>(t11, i_V, constant(0));
      a15[i_V] = a15[i_V] + existing<Axis_K>(t9, i_K, constant(0));
      a22[i_V] = a22[i_V] + existing<Axis_K>(t15, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a5);
  combine_lanes<Axis_V, Sum>(a14);
  put_part<Grid<Axis_V>, Share<Axis_K>>(a14, block.region(0));
  combine_lanes<Axis_K, Sum>(a15);
  combine_lanes<Axis_K, Sum>(a22);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a15[i_V];
    grad_gate.x2[i_V] = x0;
  }
  real a10[4];
  real a18[4];
  real a21[4];
  real a24[4];
  PARARNN_UNROLL
  for (real& x : a10) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a18) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a21) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a24) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a6[i_K];
      const real x1 = a5[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = a0[0];
      const real t6 = x5 * t4;
      const real x7 = gate.x2[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      const real x10 = grad_output.x0[i_V];
      const real t11 = x10 * t9;
      const real x12 = a11[(i_K) * Axis_V::count + i_V];
      const real t13 = x12 * t4;
      const real x14 = a20[(i_K) * Axis_V::count + i_V];
      const real t15 = x14 * x1;
      const real x16 = a22[i_V];
      const real x17 = a4[i_K];
      const real t18 = x16 * x17;
      const real t19 = x16 * x3;
      const real x20 = a17[(i_K) * Axis_V::count + i_V];
      const real t21 = x20 + t18;
      a10[i_K] = a10[i_K] + existing<Axis_V>(t11, i_V, constant(0));
      a18[i_V] = a18[i_V] + existing<Axis_K>(t13, i_K, constant(0));
      a21[i_K] = a21[i_K] + existing<Axis_V>(t15, i_V, constant(0));
      a24[i_K] = a24[i_K] + existing<Axis_V>(t19, i_V, constant(0));
      grad_state.x0[(i_K) * Axis_V::count + i_V] = t21;
    }
  }
  combine_lanes<Axis_V, Sum>(a10);
  put_part<Grid<Axis_V>, Share<Axis_K>>(a10, block.region(256));
  combine_lanes<Axis_V, Sum>(a21);
  put_part<Grid<Axis_V>, Share<Axis_K>>(a21, block.region(512));
  combine_lanes<Axis_V, Sum>(a24);
  put_part<Grid<Axis_V>, Share<Axis_K>>(a24, block.region(768));
  real a19[1];
  PARARNN_UNROLL
  for (real& x : a19) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a18[i_V];
    a19[0] = a19[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  combine_lanes<Axis_V, Sum>(a19);
  combine_lanes<Axis_K, Sum>(a19);
  put_part<Grid<Axis_V>, Share<>>(a19, block.region(1024));
  block.meet();
  combine_parts<Grid<Axis_V>, Share<Axis_K>, Sum>(block.region(0), a14);
  combine_parts<Grid<Axis_V>, Share<Axis_K>, Sum>(block.region(256), a10);
  combine_parts<Grid<Axis_V>, Share<Axis_K>, Sum>(block.region(512), a21);
  combine_parts<Grid<Axis_V>, Share<Axis_K>, Sum>(block.region(768), a24);
  combine_parts<Grid<Axis_V>, Share<>, Sum>(block.region(1024), a19);
  real a16[1];
  PARARNN_UNROLL
  for (real& x : a16) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a14[i_K];
    const real x1 = a4[i_K];
    const real t2 = x0 * x1;
    a16[0] = a16[0] + existing<Axis_K>(t2, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a16);
  real a25[4];
  real a12[1];
  real a23[1];
  real a26[1];
  PARARNN_UNROLL
  for (real& x : a12) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a23) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a26) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a10[i_K];
    const real x1 = gate.x0[i_K];
    const real t2 = x0 * x1;
    const real x3 = a14[i_K];
    const real x4 = a1[0];
    const real t5 = x3 * x4;
    const real x6 = a21[i_K];
    const real t7 = x6 * x4;
    const real x8 = a4[i_K];
    const real t9 = x6 * x8;
    const real t10 = t5 + t7;
    const real x11 = a24[i_K];
    const real t12 = t10 + x11;
    a25[i_K] = t12;
    const real x13 = gate.x1[i_K];
    const real t14 = t12 * x13;
    a12[0] = a12[0] + existing<Axis_K>(t2, i_K, constant(0));
    a23[0] = a23[0] + existing<Axis_K>(t9, i_K, constant(0));
    a26[0] = a26[0] + existing<Axis_K>(t14, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a12);
  combine_lanes<Axis_K, Sum>(a23);
  combine_lanes<Axis_K, Sum>(a26);
  real a13[1];
  real a27[1];
  {
    const real x0 = a8[0];
    const real t1 = x0 * x0 * x0;
    const real x2 = a12[0];
    const real t3 = x2 * constant(-0.5);
    const real t4 = t3 * t1;
    a13[0] = t4;
    const real x5 = a16[0];
    const real x6 = a23[0];
    const real t7 = x5 + x6;
    const real x8 = a3[0];
    const real t9 = x8 * x8 * x8;
    const real x10 = a26[0];
    const real t11 = x10 * constant(-0.5);
    const real t12 = t11 * t9;
    a27[0] = t12;
    const real x13 = a1[0];
    const real t14 = constant(1.0) - x13;
    const real t15 = x13 * t14;
    const real t16 = t7 * t15;
    const real x17 = a0[0];
    const real t18 = constant(1.0) - x17;
    const real t19 = x17 * t18;
    const real x20 = a19[0];
    const real t21 = x20 * t19;
    grad_gate.x3[0] = t21;
    grad_gate.x4[0] = t16;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a10[i_K];
    const real x1 = a8[0];
    const real t2 = x0 * x1;
    const real x3 = gate.x0[i_K];
    const real t4 = x3;
    const real t5 = t4 * constant(2.0);
    const real x6 = a13[0];
    const real t7 = x6 * t5;
    const real t8 = t2 + t7;
    const real x9 = a25[i_K];
    const real x10 = a3[0];
    const real t11 = x9 * x10;
    const real x12 = gate.x1[i_K];
    const real t13 = x12;
    const real t14 = t13 * constant(2.0);
    const real x15 = a27[0];
    const real t16 = x15 * t14;
    const real t17 = t11 + t16;
    grad_gate.x0[i_K] = t8;
    grad_gate.x1[i_K] = t17;
  }
}
