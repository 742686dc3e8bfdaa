constexpr int warps = 4, exchange_numbers = 128;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
using Axis_K = Axis<64, 8, 4, 4, 1, 2, false>;
constexpr int size_V = 32;
using Axis_V = Axis<32, 4, 1, 1, 1, 8, true>;
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
  static constexpr int numbers = 161, entries = 13;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<Axis_V>::count];
  real x3[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<Axis_V>(), own.x2, 2, 128);
    f(Share<>(), own.x3, 3, 160);
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
  }
};
struct Params {
  static constexpr int numbers = 1024, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const Params& other) {
  }
};
struct Output {
  static constexpr int numbers = 32, entries = 8;
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
constexpr int num_states = 1, num_params = 1;
constexpr bool of_all_heads[] = {0};
struct Matrices {
  TileMatrix<32, false, true, 1> tiles0;
  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, real* memory, unsigned* fragments) {
    tiles0.load(params[0] + head * 1024, fragments + 0);
  }
};
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, States& new_state) {
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  real a1[1];
  real a2[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a1[0] = t1;
    const real t2 = constant(1.0) - t1;
    a2[0] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = gate.x0[i_K];
      const real x1 = gate.x2[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = a1[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = a2[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t11;
    }
  }
}

PARARNN_FUNCTION void readout_step(Block& block, const Matrices& matrices, const Params& param, const States& new_state, const Gates& gate, Output& output) {
  block.turn();
  real a0[8];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = gate.x1[i_K];
      const real x1 = new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a0[i_V] = a0[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a0);
  put_part<Grid<Axis_K>, Share<Axis_V>>(a0, block.region(0));
  block.meet();
  combine_parts<Grid<Axis_K>, Share<Axis_V>, Sum>(block.region(0), a0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a0[i_V];
    output.x0[i_V] = x0;
  }
}

constexpr int warps = 4, exchange_numbers = 160;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
using Axis_K = Axis<64, 8, 4, 4, 1, 2, false>;
constexpr int size_V = 32;
using Axis_V = Axis<32, 4, 1, 1, 1, 8, true>;
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
  static constexpr int numbers = 161, entries = 13;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<Axis_V>::count];
  real x3[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<Axis_V>(), own.x2, 2, 128);
    f(Share<>(), own.x3, 3, 160);
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
  }
};
struct Params {
  static constexpr int numbers = 1024, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const Params& other) {
  }
};
struct Output {
  static constexpr int numbers = 32, entries = 8;
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
constexpr int num_states = 1, num_params = 1;
constexpr bool of_all_heads[] = {0};
struct Matrices {
  TileMatrix<32, false, true, 1> tiles0;
  TileMatrix<32, true, true, 1> tiles1;
  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, real* memory, unsigned* fragments) {
    tiles0.load(params[0] + head * 1024, fragments + 0);
    tiles1.load(params[0] + head * 1024, fragments + 0);
  }
};
struct Outers {
  TileSums<32, 1> w0;
  PARARNN_FUNCTION void clear() {
    w0.clear();
  }
  PARARNN_FUNCTION void add_to(real* target, int64 copy_numbers) const {
    w0.add_to(target + 0, copy_numbers);
  }
};
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, States& new_state) {
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  real a1[1];
  real a2[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a1[0] = t1;
    const real t2 = constant(1.0) - t1;
    a2[0] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = gate.x0[i_K];
      const real x1 = gate.x2[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = a1[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = a2[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t11;
    }
  }
}

PARARNN_FUNCTION void backward_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const Gates& gate, const States& grad_new_state, const Output& grad_output, States& grad_state, Gates& grad_gate, Params& grad_param, Outers& grad_matrix) {
  block.turn();
  real a4[16];
  real a7[8];
  PARARNN_UNROLL
  for (real& x : a7) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = gate.x1[i_K];
      const real x1 = grad_output.x0[i_V];
      const real t2 = x0 * x1;
      const real x3 = grad_new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      a4[(i_K) * Axis_V::count + i_V] = t4;
      const real x5 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t6 = t4 * x5;
      a7[i_V] = a7[i_V] + existing<Axis_K>(t6, i_K, constant(0));
    }
  }
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  real a1[1];
  real a2[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    a1[0] = t1;
    const real t2 = constant(1.0) - t1;
    a2[0] = t2;
  }
  real a8[1];
  PARARNN_UNROLL
  for (real& x : a8) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a7[i_V];
    a8[0] = a8[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  combine_lanes<Axis_V, Sum>(a8);
  combine_lanes<Axis_K, Sum>(a8);
  put_part<Grid<Axis_K>, Share<>>(a8, block.region(0));
  real a9[16];
  real a3[2];
  real a5[8];
  real a10[2];
  real a11[8];
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a10) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a11) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = gate.x0[i_K];
      const real x1 = gate.x2[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = a1[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = a2[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      const real x12 = grad_output.x0[i_V];
      const real t13 = x12 * t11;
      const real x14 = a4[(i_K) * Axis_V::count + i_V];
      const real t15 = x14 * x9;
      const real t16 = x14 * t5;
      const real t17 = t5 * t5;
      const real t18 = constant(1.0) - t17;
      const real t19 = t15 * t18;
      a9[(i_K) * Axis_V::count + i_V] = t19;
      const real t20 = t19 * x0;
      const real t21 = t19 * x1;
      a3[i_K] = a3[i_K] + existing<Axis_V>(t13, i_V, constant(0));
      a5[i_V] = a5[i_V] + existing<Axis_K>(t16, i_K, constant(0));
      a10[i_K] = a10[i_K] + existing<Axis_V>(t21, i_V, constant(0));
      a11[i_V] = a11[i_V] + existing<Axis_K>(t20, i_K, constant(0));
    }
  }
  combine_lanes<Axis_V, Sum>(a3);
  combine_lanes<Axis_V, Sum>(a10);
  combine_lanes<Axis_K, Sum>(a11);
  put_part<Grid<Axis_K>, Share<Axis_V>>(a11, block.region(4));
  real a12[16];
  multiply_tiles(a9, matrices.tiles1, a12);
  grad_matrix.w0.add(state.x0, a9);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = a10[i_K];
    grad_gate.x0[i_K] = x0;
    const real x1 = a3[i_K];
    grad_gate.x1[i_K] = x1;
  }
  real a6[1];
  PARARNN_UNROLL
  for (real& x : a6) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a5[i_V];
    a6[0] = a6[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  combine_lanes<Axis_V, Sum>(a6);
  combine_lanes<Axis_K, Sum>(a6);
  put_part<Grid<Axis_K>, Share<>>(a6, block.region(132));
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a4[(i_K) * Axis_V::count + i_V];
      const real x1 = a1[0];
      const real t2 = x0 * x1;
      const real x3 = a12[(i_K) * Axis_V::count + i_V];
      const real t4 = t2 + x3;
      grad_state.x0[(i_K) * Axis_V::count + i_V] = t4;
    }
  }
  block.meet();
  combine_parts<Grid<Axis_K>, Share<>, Sum>(block.region(0), a8);
  combine_parts<Grid<Axis_K>, Share<Axis_V>, Sum>(block.region(4), a11);
  combine_parts<Grid<Axis_K>, Share<>, Sum>(block.region(132), a6);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a11[i_V];
    grad_gate.x2[i_V] = x0;
  }
  {
    const real x0 = a6[0];
    const real t1 = -x0;
    const real x2 = a8[0];
    const real t3 = t1 + x2;
    const real x4 = a1[0];
    const real t5 = constant(1.0) - x4;
    const real t6 = x4 * t5;
    const real t7 = t3 * t6;
    grad_gate.x3[0] = t7;
  }
}
