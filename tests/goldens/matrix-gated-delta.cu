constexpr int warps = 4, exchange_numbers = 0;
using Block = Exchange<warps, exchange_numbers>;
constexpr int size_K = 64;
constexpr int size_V = 32;
using Axis_K = Axis<64, 4, 8, 1, 4, 16, false>;
using Axis_V = Axis<32, 8, 1, 4, 1, 1, false>;
using Rows = Axis_K;
using Columns = Axis_V;
constexpr int slot_numbers = 128, ready_numbers = 225;
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
  static constexpr int numbers = 162, entries = 35;
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
struct WideGates {
  static constexpr int numbers = 162, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideGates& other) {
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
struct WideParams {
  static constexpr int numbers = 0, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideParams& other) {
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
struct WideOutput {
  static constexpr int numbers = 32, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideOutput& other) {
  }
};
struct AdvanceReady {
  static constexpr int numbers = 225, entries = 50;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  real x4[Share<Axis_K>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
    f(Share<Axis_K>(), own.x4, 4, 161);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
  }
};
constexpr int num_states = 1, num_params = 0;
constexpr bool of_all_heads[] = {0};
struct Matrices {
  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, real* memory, unsigned* fragments) {
  }
};
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const AdvanceReady& ready, const WideGates& gate, States& new_state) {
  real a0[1];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a0[i_V] = a0[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x1[i_K];
      const real x1 = a0[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = ready.x2[0];
      const real t6 = x5 * t4;
      const real x7 = ready.x3[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t9;
    }
  }
}

PARARNN_FUNCTION void readout_step(Block& block, const Matrices& matrices, const Params& param, const States& new_state, const AdvanceReady& ready, const WideGates& gate, WideOutput& output, real* slot) {
  real a0[1];
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
  put_pieces<Share<Axis_V>, 0, Sum, Rows, Columns, Axis_K>(a0, slot + 0);
}

namespace finish {
using Axis_K = Axis<64, 32, 1, 1, 1, 2, false>;
using Axis_V = Axis<32, 32, 1, 1, 1, 1, false>;
struct Gates {
  static constexpr int numbers = 162, entries = 7;
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
  static constexpr int numbers = 225, entries = 8;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  real x4[Share<Axis_K>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
    f(Share<Axis_K>(), own.x4, 4, 161);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
  }
};
PARARNN_FUNCTION void prepare_step(const Gates& gate, AdvanceReady& ready) {
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    ready.x2[0] = t1;
  }
  real a1[1];
  real a3[1];
  PARARNN_UNROLL
  for (real& x : a1) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    const real x2 = gate.x0[i_K];
    const real t3 = x2 * x2;
    a1[0] = a1[0] + existing<Axis_K>(t1, i_K, constant(0));
    a3[0] = a3[0] + existing<Axis_K>(t3, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a1);
  combine_lanes<Axis_K, Sum>(a3);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x3[i_V] = x0;
  }
  real a0[1];
  real a2[1];
  real a4[1];
  {
    const real x0 = gate.x4[0];
    const real t1 = sigmoid(x0);
    a0[0] = t1;
    const real x2 = a1[0];
    const real t3 = x2 + constant(1e-06);
    const real t4 = constant(1.0) / sqrt(t3);
    a2[0] = t4;
    const real x5 = a3[0];
    const real t6 = x5 + constant(1e-06);
    const real t7 = constant(1.0) / sqrt(t6);
    a4[0] = t7;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a2[0];
    const real t2 = x0 * x1;
    const real x3 = a0[0];
    const real t4 = x3 * t2;
    const real x5 = gate.x0[i_K];
    const real x6 = a4[0];
    const real t7 = x5 * x6;
    ready.x0[i_K] = t2;
    ready.x1[i_K] = t4;
    ready.x4[i_K] = t7;
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
using Axis_K = Axis<64, 4, 8, 1, 4, 16, false>;
using Axis_V = Axis<32, 8, 1, 4, 1, 1, false>;
using Rows = Axis_K;
using Columns = Axis_V;
constexpr int slot_numbers = 1280, ready_numbers = 488;
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
  static constexpr int numbers = 162, entries = 35;
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
struct WideGates {
  static constexpr int numbers = 162, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideGates& other) {
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
struct WideParams {
  static constexpr int numbers = 0, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideParams& other) {
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
struct WideOutput {
  static constexpr int numbers = 32, entries = 0;
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
  }
  PARARNN_FUNCTION void operator+=(const WideOutput& other) {
  }
};
struct AdvanceReady {
  static constexpr int numbers = 161, entries = 34;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
  }
};
struct BackwardReady {
  static constexpr int numbers = 488, entries = 121;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  real x4[Share<Axis_K>::count];
  real x5[Share<Axis_K>::count];
  real x6[Share<>::count];
  real x7[Share<>::count];
  real x8[Share<Axis_K>::count];
  real x9[Share<>::count];
  real x10[Share<Axis_K>::count];
  real x11[Share<>::count];
  real x12[Share<>::count];
  real x13[Share<Axis_K>::count];
  real x14[Share<>::count];
  real x15[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
    f(Share<Axis_K>(), own.x4, 4, 161);
    f(Share<Axis_K>(), own.x5, 5, 225);
    f(Share<>(), own.x6, 6, 289);
    f(Share<>(), own.x7, 7, 290);
    f(Share<Axis_K>(), own.x8, 8, 291);
    f(Share<>(), own.x9, 9, 355);
    f(Share<Axis_K>(), own.x10, 10, 356);
    f(Share<>(), own.x11, 11, 420);
    f(Share<>(), own.x12, 12, 421);
    f(Share<Axis_K>(), own.x13, 13, 422);
    f(Share<>(), own.x14, 14, 486);
    f(Share<>(), own.x15, 15, 487);
  }
  PARARNN_FUNCTION void operator+=(const BackwardReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x5[n] += other.x5[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x6[n] += other.x6[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x7[n] += other.x7[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x8[n] += other.x8[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x9[n] += other.x9[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x10[n] += other.x10[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x11[n] += other.x11[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x12[n] += other.x12[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x13[n] += other.x13[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x14[n] += other.x14[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x15[n] += other.x15[n];
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
PARARNN_FUNCTION void advance_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const AdvanceReady& ready, const WideGates& gate, States& new_state) {
  real a0[1];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      a0[i_V] = a0[i_V] + existing<Axis_K>(t2, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x1[i_K];
      const real x1 = a0[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = ready.x2[0];
      const real t6 = x5 * t4;
      const real x7 = ready.x3[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      new_state.x0[(i_K) * Axis_V::count + i_V] = t9;
    }
  }
}

PARARNN_FUNCTION void backward_step(Block& block, const Matrices& matrices, const Params& param, const States& state, const BackwardReady& ready, const WideGates& gate, const States& grad_new_state, const Output& grad_output, States& grad_state, WideGates& grad_gate, WideParams& grad_param, Outers& grad_matrix, real* slot) {
  real a2[16];
  real a5[16];
  real a8[16];
  real a0[1];
  real a3[16];
  real a4[1];
  real a10[1];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a4) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a10) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x0[i_K];
      const real x1 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t2 = x0 * x1;
      const real x3 = grad_output.x0[i_V];
      const real x4 = ready.x4[i_K];
      const real t5 = x3 * x4;
      const real x6 = grad_new_state.x0[(i_K) * Axis_V::count + i_V];
      const real t7 = x6 + t5;
      a2[(i_K) * Axis_V::count + i_V] = t7;
      const real x8 = ready.x1[i_K];
      const real t9 = t7 * x8;
      const real x10 = ready.x3[i_V];
      const real t11 = t7 * x10;
      const real x12 = ready.x2[0];
      const real t13 = t7 * x12;
      a5[(i_K) * Axis_V::count + i_V] = t13;
      const real t14 = -t13;
      a8[(i_K) * Axis_V::count + i_V] = t14;
      const real t15 = t14 * x8;
      a0[i_V] = a0[i_V] + existing<Axis_K>(t2, i_K, constant(0));
      a3[i_K] = a3[i_K] + existing<Axis_V>(t11, i_V, constant(0));
      a4[i_V] = a4[i_V] + existing<Axis_K>(t9, i_K, constant(0));
      a10[i_V] = a10[i_V] + existing<Axis_K>(t15, i_K, constant(0));
    }
  }
  combine_lanes<Axis_K, Sum>(a0);
  put_pieces<Share<Axis_K>, 3, Sum, Rows, Columns, Axis_V>(a3, slot + 0);
  put_pieces<Share<Axis_V>, 0, Sum, Rows, Columns, Axis_K>(a4, slot + 256);
  combine_lanes<Axis_K, Sum>(a10);
  real a1[16];
  real a6[1];
  real a9[16];
  real a11[16];
  PARARNN_UNROLL
  for (real& x : a1) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a6) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a9) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a11) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    PARARNN_UNROLL
    for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
      const real x0 = ready.x1[i_K];
      const real x1 = a0[i_V];
      const real t2 = x0 * x1;
      const real x3 = state.x0[(i_K) * Axis_V::count + i_V];
      const real t4 = x3 - t2;
      const real x5 = ready.x2[0];
      const real t6 = x5 * t4;
      const real x7 = ready.x3[i_V];
      const real t8 = x0 * x7;
      const real t9 = t6 + t8;
      const real x10 = grad_output.x0[i_V];
      const real t11 = x10 * t9;
      const real x12 = a2[(i_K) * Axis_V::count + i_V];
      const real t13 = x12 * t4;
      const real x14 = a8[(i_K) * Axis_V::count + i_V];
      const real t15 = x14 * x1;
      const real x16 = a10[i_V];
      const real x17 = ready.x0[i_K];
      const real t18 = x16 * x17;
      const real t19 = x16 * x3;
      const real x20 = a5[(i_K) * Axis_V::count + i_V];
      const real t21 = x20 + t18;
      a1[i_K] = a1[i_K] + existing<Axis_V>(t11, i_V, constant(0));
      a6[i_V] = a6[i_V] + existing<Axis_K>(t13, i_K, constant(0));
      a9[i_K] = a9[i_K] + existing<Axis_V>(t15, i_V, constant(0));
      a11[i_K] = a11[i_K] + existing<Axis_V>(t19, i_V, constant(0));
      grad_state.x0[(i_K) * Axis_V::count + i_V] = t21;
    }
  }
  put_pieces<Share<Axis_K>, 3, Sum, Rows, Columns, Axis_V>(a1, slot + 384);
  put_pieces<Share<Axis_K>, 3, Sum, Rows, Columns, Axis_V>(a9, slot + 640);
  put_pieces<Share<Axis_K>, 3, Sum, Rows, Columns, Axis_V>(a11, slot + 896);
  real a7[1];
  PARARNN_UNROLL
  for (real& x : a7) x = constant(0);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = a6[i_V];
    a7[0] = a7[0] + existing<Axis_V>(x0, i_V, constant(0));
  }
  put_pieces<Share<>, 0, Sum, Rows, Columns, Axis_V, Axis_K>(a7, slot + 1152);
}

namespace finish {
using Axis_K = Axis<64, 32, 1, 1, 1, 2, false>;
using Axis_V = Axis<32, 32, 1, 1, 1, 1, false>;
struct Gates {
  static constexpr int numbers = 162, entries = 7;
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
struct AdvanceReady {
  static constexpr int numbers = 161, entries = 6;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
  }
  PARARNN_FUNCTION void operator+=(const AdvanceReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
  }
};
struct BackwardReady {
  static constexpr int numbers = 488, entries = 23;
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<>::count];
  real x3[Share<Axis_V>::count];
  real x4[Share<Axis_K>::count];
  real x5[Share<Axis_K>::count];
  real x6[Share<>::count];
  real x7[Share<>::count];
  real x8[Share<Axis_K>::count];
  real x9[Share<>::count];
  real x10[Share<Axis_K>::count];
  real x11[Share<>::count];
  real x12[Share<>::count];
  real x13[Share<Axis_K>::count];
  real x14[Share<>::count];
  real x15[Share<>::count];
  // Calls f(share, own numbers, index, numbers before it).
  template <class Own, class F> PARARNN_FUNCTION static void each(Own& own, const F& f) {
    f(Share<Axis_K>(), own.x0, 0, 0);
    f(Share<Axis_K>(), own.x1, 1, 64);
    f(Share<>(), own.x2, 2, 128);
    f(Share<Axis_V>(), own.x3, 3, 129);
    f(Share<Axis_K>(), own.x4, 4, 161);
    f(Share<Axis_K>(), own.x5, 5, 225);
    f(Share<>(), own.x6, 6, 289);
    f(Share<>(), own.x7, 7, 290);
    f(Share<Axis_K>(), own.x8, 8, 291);
    f(Share<>(), own.x9, 9, 355);
    f(Share<Axis_K>(), own.x10, 10, 356);
    f(Share<>(), own.x11, 11, 420);
    f(Share<>(), own.x12, 12, 421);
    f(Share<Axis_K>(), own.x13, 13, 422);
    f(Share<>(), own.x14, 14, 486);
    f(Share<>(), own.x15, 15, 487);
  }
  PARARNN_FUNCTION void operator+=(const BackwardReady& other) {
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x0[n] += other.x0[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x1[n] += other.x1[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x2[n] += other.x2[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_V>::count; ++n) x3[n] += other.x3[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x4[n] += other.x4[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x5[n] += other.x5[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x6[n] += other.x6[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x7[n] += other.x7[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x8[n] += other.x8[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x9[n] += other.x9[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x10[n] += other.x10[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x11[n] += other.x11[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x12[n] += other.x12[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<Axis_K>::count; ++n) x13[n] += other.x13[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x14[n] += other.x14[n];
    PARARNN_UNROLL
    for (int n = 0; n < Share<>::count; ++n) x15[n] += other.x15[n];
  }
};
PARARNN_FUNCTION void prepare_step(const Gates& gate, AdvanceReady& ready) {
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    ready.x2[0] = t1;
  }
  real a1[1];
  PARARNN_UNROLL
  for (real& x : a1) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    a1[0] = a1[0] + existing<Axis_K>(t1, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a1);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x3[i_V] = x0;
  }
  real a0[1];
  real a2[1];
  {
    const real x0 = gate.x4[0];
    const real t1 = sigmoid(x0);
    a0[0] = t1;
    const real x2 = a1[0];
    const real t3 = x2 + constant(1e-06);
    const real t4 = constant(1.0) / sqrt(t3);
    a2[0] = t4;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a2[0];
    const real t2 = x0 * x1;
    const real x3 = a0[0];
    const real t4 = x3 * t2;
    ready.x0[i_K] = t2;
    ready.x1[i_K] = t4;
  }
}

PARARNN_FUNCTION void prepare_step(const Gates& gate, BackwardReady& ready) {
  real a0[1];
  {
    const real x0 = gate.x3[0];
    const real t1 = sigmoid(x0);
    const real x2 = gate.x4[0];
    const real t3 = sigmoid(x2);
    a0[0] = t3;
    const real t4 = constant(1.0) - t3;
    const real t5 = t3 * t4;
    const real t6 = constant(1.0) - t1;
    const real t7 = t1 * t6;
    ready.x2[0] = t1;
    ready.x9[0] = t3;
    ready.x14[0] = t5;
    ready.x15[0] = t7;
  }
  real a1[1];
  real a3[1];
  PARARNN_UNROLL
  for (real& x : a1) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real t1 = x0 * x0;
    const real x2 = gate.x0[i_K];
    const real t3 = x2 * x2;
    const real t4 = x2;
    const real t5 = t4 * constant(2.0);
    const real t6 = x0;
    const real t7 = t6 * constant(2.0);
    a1[0] = a1[0] + existing<Axis_K>(t1, i_K, constant(0));
    a3[0] = a3[0] + existing<Axis_K>(t3, i_K, constant(0));
    ready.x8[i_K] = t5;
    ready.x13[i_K] = t7;
  }
  combine_lanes<Axis_K, Sum>(a1);
  combine_lanes<Axis_K, Sum>(a3);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x0[i_K];
    ready.x5[i_K] = x0;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    ready.x10[i_K] = x0;
  }
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = gate.x2[i_V];
    ready.x3[i_V] = x0;
  }
  real a2[1];
  real a4[1];
  {
    const real x0 = a1[0];
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    a2[0] = t2;
    const real x3 = a3[0];
    const real t4 = x3 + constant(1e-06);
    const real t5 = constant(1.0) / sqrt(t4);
    a4[0] = t5;
    const real t6 = t5 * t5 * t5;
    const real t7 = t2 * t2 * t2;
    ready.x6[0] = t5;
    ready.x7[0] = t6;
    ready.x11[0] = t2;
    ready.x12[0] = t7;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = gate.x1[i_K];
    const real x1 = a2[0];
    const real t2 = x0 * x1;
    const real x3 = a0[0];
    const real t4 = x3 * t2;
    const real x5 = gate.x0[i_K];
    const real x6 = a4[0];
    const real t7 = x5 * x6;
    ready.x0[i_K] = t2;
    ready.x1[i_K] = t4;
    ready.x4[i_K] = t7;
  }
}

struct Links {
  real x0[Share<Axis_K>::count];
  real x1[Share<Axis_K>::count];
  real x2[Share<Axis_V>::count];
  real x3[Share<>::count];
  real x4[Share<Axis_K>::count];
  real x5[Share<Axis_K>::count];
  PARARNN_FUNCTION void load(const real* slot) {
    combine_pieces<Share<Axis_K>, 4, Sum>(slot + 384, x0);
    combine_pieces<Share<Axis_K>, 4, Sum>(slot + 0, x1);
    combine_pieces<Share<Axis_V>, 4, Sum>(slot + 256, x2);
    combine_pieces<Share<>, 128, Sum>(slot + 1152, x3);
    combine_pieces<Share<Axis_K>, 4, Sum>(slot + 640, x4);
    combine_pieces<Share<Axis_K>, 4, Sum>(slot + 896, x5);
  }
};
PARARNN_FUNCTION void finish_step(const Links& link, const BackwardReady& ready, Gates& grad_gate, Params& grad_param) {
  {
    const real x0 = link.x3[0];
    const real x1 = ready.x15[0];
    const real t2 = x0 * x1;
    grad_gate.x3[0] = t2;
  }
  real a4[2];
  real a0[1];
  real a2[1];
  real a3[1];
  real a5[1];
  PARARNN_UNROLL
  for (real& x : a0) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a2) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a3) x = constant(0);
  PARARNN_UNROLL
  for (real& x : a5) x = constant(0);
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = link.x0[i_K];
    const real x1 = ready.x5[i_K];
    const real t2 = x0 * x1;
    const real x3 = link.x1[i_K];
    const real x4 = ready.x9[0];
    const real t5 = x3 * x4;
    const real x6 = ready.x0[i_K];
    const real t7 = x3 * x6;
    const real x8 = link.x4[i_K];
    const real t9 = x8 * x4;
    const real t10 = x8 * x6;
    const real t11 = t5 + t9;
    const real x12 = link.x5[i_K];
    const real t13 = t11 + x12;
    a4[i_K] = t13;
    const real x14 = ready.x10[i_K];
    const real t15 = t13 * x14;
    a0[0] = a0[0] + existing<Axis_K>(t2, i_K, constant(0));
    a2[0] = a2[0] + existing<Axis_K>(t7, i_K, constant(0));
    a3[0] = a3[0] + existing<Axis_K>(t10, i_K, constant(0));
    a5[0] = a5[0] + existing<Axis_K>(t15, i_K, constant(0));
  }
  combine_lanes<Axis_K, Sum>(a0);
  combine_lanes<Axis_K, Sum>(a2);
  combine_lanes<Axis_K, Sum>(a3);
  combine_lanes<Axis_K, Sum>(a5);
  PARARNN_UNROLL
  for (int i_V = 0; i_V < Axis_V::count; ++i_V) {
    const real x0 = link.x2[i_V];
    grad_gate.x2[i_V] = x0;
  }
  real a1[1];
  real a6[1];
  {
    const real x0 = a0[0];
    const real t1 = x0 * constant(-0.5);
    const real x2 = ready.x7[0];
    const real t3 = t1 * x2;
    a1[0] = t3;
    const real x4 = a2[0];
    const real x5 = a3[0];
    const real t6 = x4 + x5;
    const real x7 = a5[0];
    const real t8 = x7 * constant(-0.5);
    const real x9 = ready.x12[0];
    const real t10 = t8 * x9;
    a6[0] = t10;
    const real x11 = ready.x14[0];
    const real t12 = t6 * x11;
    grad_gate.x4[0] = t12;
  }
  PARARNN_UNROLL
  for (int i_K = 0; i_K < Axis_K::count; ++i_K) {
    const real x0 = link.x0[i_K];
    const real x1 = ready.x6[0];
    const real t2 = x0 * x1;
    const real x3 = a1[0];
    const real x4 = ready.x8[i_K];
    const real t5 = x3 * x4;
    const real t6 = t2 + t5;
    const real x7 = a4[i_K];
    const real x8 = ready.x11[0];
    const real t9 = x7 * x8;
    const real x10 = a6[0];
    const real x11 = ready.x13[i_K];
    const real t12 = x10 * x11;
    const real t13 = t9 + t12;
    grad_gate.x0[i_K] = t6;
    grad_gate.x1[i_K] = t13;
  }
}

}