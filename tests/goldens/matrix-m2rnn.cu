constexpr int warps = 4, exchange_numbers = 0;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
constexpr int size_V = 32;
using Axis_K = Axis<64, 8, 4, 4, 1, 2, false>;
using Axis_V = Axis<32, 4, 1, 1, 1, 8, true>;
using Rows = Axis_K;
using Columns = Axis_V;
constexpr int slot_numbers = 128, ready_numbers = 162;
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
struct WideGates {
  static constexpr int numbers = 161, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideGates& other) {
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
struct WideParams {
  static constexpr int numbers = 1024, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideParams& other) {
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
struct WideOutput {
  static constexpr int numbers = 32, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideOutput& other) {
  }
};
struct AdvanceReady {
  static constexpr int numbers = 162, entries = 14;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  real x4[Share<Axis_K>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
    f(Share<Axis_K>(), own.x4, 4, 98);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
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
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const AdvanceReady& ready, const WideGates& gate, States& new_state) {
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = ready.x1[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = ready.x2[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = ready.x3[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t11;
    }
  }
}

PARARNN_FUNCTION void readout_step(Block& block, const Matrices& matrices, const Params& param, const States& new_state, const AdvanceReady& ready, const WideGates& gate, WideOutput& output, real* slot) {
  real a0[8];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x4[i_K];
      const real x1 = new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a0[i_V] = a0[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  put_pieces<Share<Axis_V>, 3, Sum, Rows, Columns, Axis_K>(a0, slot + 0);
}

namespace finish {
using Axis_K = Axis<64, 32, 1, 1, 1, 2, false>;
using Axis_V = Axis<32, 32, 1, 1, 1, 1, false>;
struct Gates {
  static constexpr int numbers = 161, entries = 6;
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
struct Output {
  static constexpr int numbers = 32, entries = 1;
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
struct AdvanceReady {
  static constexpr int numbers = 162, entries = 7;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  real x4[Share<Axis_K>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
    f(Share<Axis_K>(), own.x4, 4, 98);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
  }
};
PARARNN_FUNCTION void prepare_step(const Gates& gate, AdvanceReady& ready) {
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    const real t2 = constant(1.0) - t1;
    ready.x2[0] = t1;
    ready.x3[0] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    ready.x0[i_K] = x0;
    const real x1 = gate.x1[i_K];
    ready.x4[i_K] = x1;
  }
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x1[i_V] = x0;
  }
}

struct Links {
  real x0[Share<Axis_V>::count];
  PARARNN_FUNCTION void load(const real* slot) {
    combine_pieces<Share<Axis_V>, 4, Sum>(slot + 0, x0);
  }
};
PARARNN_FUNCTION void finish_step(const Links& link, const AdvanceReady& ready, Output& output) {
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = link.x0[i_V];
    output.x0[i_V] = x0;
  }
}

}
constexpr int warps = 4, exchange_numbers = 0;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
constexpr int size_V = 32;
using Axis_K = Axis<64, 8, 4, 4, 1, 2, false>;
using Axis_V = Axis<32, 4, 1, 1, 1, 8, true>;
using Rows = Axis_K;
using Columns = Axis_V;
constexpr int slot_numbers = 640, ready_numbers = 163;
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
struct WideGates {
  static constexpr int numbers = 161, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideGates& other) {
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
struct WideParams {
  static constexpr int numbers = 1024, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideParams& other) {
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
struct WideOutput {
  static constexpr int numbers = 32, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideOutput& other) {
  }
};
struct AdvanceReady {
  static constexpr int numbers = 98, entries = 12;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
  }
};
struct BackwardReady {
  static constexpr int numbers = 163, entries = 15;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  real x4[Share<Axis_K>::count];
  real x5[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
    f(Share<Axis_K>(), own.x4, 4, 98);
    f(Share<>(), own.x5, 5, 162);
  }
  PARARNN_FUNCTION void operator+=(const BackwardReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x5[n] += other.x5[n];
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
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const AdvanceReady& ready, const WideGates& gate, States& new_state) {
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = ready.x1[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = ready.x2[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = ready.x3[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t11;
    }
  }
}

PARARNN_FUNCTION void backward_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const BackwardReady& ready, const WideGates& gate, const States& grad_new_state, const Output& grad_output, States& grad_state, WideGates& grad_gate, WideParams& grad_param, Outers& grad_matrix, real* slot) {
  real a2[16];
  real a5[8];
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x4[i_K];
      const real x1 = grad_output.x0[i_V];
      const real t2 = x0 * x1;
      const real x3 = grad_new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      a2[(i_K) * Axis_V::count + i_V] = t4;
      const real x5 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t6 = t4 * x5;
      a5[i_V] = a5[i_V] + existing<Axis_K>(t6, i_K, constant(0));
    }
  }
  real a0[16];
  multiply_tiles(state.x0, matrices.tiles0, a0);
  real a6[1];
  PARARNN_UNROLL
  for (real& x : a6) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a5[i_V];
    a6[0] = a6[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  put_pieces<Share<>, 0, Sum, Rows, Columns, Axis_V, Axis_K>(a6, slot + 0);
  real a7[16];
  real a1[2];
  real a3[8];
  real a8[2];
  real a9[8];
  PARARNN_UNROLL
  for (real& x : a1) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a8) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a9) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = ready.x1[i_V];
      const real t2 = x0 * x1;
      const real x3 = a0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 + t2;
      const real t5 = tanh(t4);
      const real x6 = ready.x2[0];
      const real x7 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t8 = x6 * x7;
      const real x9 = ready.x3[0];
      const real t10 = x9 * t5;
      const real t11 = t8 + t10;
      const real x12 = grad_output.x0[i_V];
      const real t13 = x12 * t11;
      const real x14 = a2[(i_K) * Axis_V::count + i_V];
      const real t15 = x14 * x9;
      const real t16 = x14 * t5;
      const real t17 = t5 * t5;
      const real t18 = constant(1.0) - t17;
      const real t19 = t15 * t18;
      a7[(i_K) * Axis_V::count + i_V] = t19;
      const real t20 = t19 * x0;
      const real t21 = t19 * x1;
      a1[i_K] = a1[i_K] + existing<Axis_V>(t13, i_V, constant(0));
      a3[i_V] = a3[i_V] + existing<Axis_K>(t16, i_K, constant(0));
      a8[i_K] = a8[i_K] + existing<Axis_V>(t21, i_V, constant(0));
      a9[i_V] = a9[i_V] + existing<Axis_K>(t20, i_K, constant(0));
    }
  }
  put_pieces<Share<Axis_K>, 1, Sum, Rows, Columns, Axis_V>(a1, slot + 128);
  put_pieces<Share<Axis_K>, 1, Sum, Rows, Columns, Axis_V>(a8, slot + 256);
  put_pieces<Share<Axis_V>, 3, Sum, Rows, Columns, Axis_K>(a9, slot + 384);
  real a10[16];
  multiply_tiles(a7, matrices.tiles1, a10);
  grad_matrix.w0.add(state.x0, a7);
  real a4[1];
  PARARNN_UNROLL
  for (real& x : a4) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a3[i_V];
    a4[0] = a4[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  put_pieces<Share<>, 0, Sum, Rows, Columns, Axis_V, Axis_K>(a4, slot + 512);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = a2[(i_K) * Axis_V::count + i_V];
      const real x1 = ready.x2[0];
      const real t2 = x0 * x1;
      const real x3 = a10[(i_K) * Axis_V::count + i_V];
      const real t4 = t2 + x3;
      grad_state.x0[(i_K) * Axis_V::count + i_V] = t4;
    }
  }
}

namespace finish {
using Axis_K = Axis<64, 32, 1, 1, 1, 2, false>;
using Axis_V = Axis<32, 32, 1, 1, 1, 1, false>;
struct Gates {
  static constexpr int numbers = 161, entries = 6;
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
struct AdvanceReady {
  static constexpr int numbers = 98, entries = 5;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
  }
};
struct BackwardReady {
  static constexpr int numbers = 163, entries = 8;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_V>::count];
  real x2[Share<>::count];
  real x3[Share<>::count];
  real x4[Share<Axis_K>::count];
  real x5[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_V>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 96);
    f(Share<>(), own.x3, 3, 97);
    f(Share<Axis_K>(), own.x4, 4, 98);
    f(Share<>(), own.x5, 5, 162);
  }
  PARARNN_FUNCTION void operator+=(const BackwardReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x5[n] += other.x5[n];
  }
};
PARARNN_FUNCTION void prepare_step(const Gates& gate, AdvanceReady& ready) {
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    const real t2 = constant(1.0) - t1;
    ready.x2[0] = t1;
    ready.x3[0] = t2;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    ready.x0[i_K] = x0;
  }
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x1[i_V] = x0;
  }
}

PARARNN_FUNCTION void prepare_step(const Gates& gate, BackwardReady& ready) {
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    const real t2 = constant(1.0) - t1;
    const real t3 = constant(1.0) - t1;
    const real t4 = t1 * t3;
    ready.x2[0] = t1;
    ready.x3[0] = t2;
    ready.x5[0] = t4;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    ready.x0[i_K] = x0;
    const real x1 = gate.x1[i_K];
    ready.x4[i_K] = x1;
  }
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x1[i_V] = x0;
  }
}

struct Links {
  real x0[Share<Axis_K>::count];
  real x1[Share<>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_K>::count];
  real x4[Share<Axis_V>::count];
  PARARNN_FUNCTION void load(const real* slot) {
    combine_pieces<Share<Axis_K>, 2, Sum>(slot + 128, x0);
    combine_pieces<Share<>, 128, Sum>(slot + 512, x1);
    combine_pieces<Share<>, 128, Sum>(slot + 0, x2);
    combine_pieces<Share<Axis_K>, 2, Sum>(slot + 256, x3);
    combine_pieces<Share<Axis_V>, 4, Sum>(slot + 384, x4);
  }
};
PARARNN_FUNCTION void finish_step(const Links& link, const BackwardReady& ready, Gates& grad_gate, Params& grad_param) {
  {
    const real x0 = link.x1[0];
    const real t1 = -x0;
    const real x2 = link.x2[0];
    const real t3 = t1 + x2;
    const real x4 = ready.x5[0];
    const real t5 = t3 * x4;
    grad_gate.x3[0] = t5;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = link.x3[i_K];
    grad_gate.x0[i_K] = x0;
    const real x1 = link.x0[i_K];
    grad_gate.x1[i_K] = x1;
  }
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = link.x4[i_V];
    grad_gate.x2[i_V] = x0;
  }
}

}