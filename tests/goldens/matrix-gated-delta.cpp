constexpr int64 size_K = 6;
constexpr int64 size_V = 4;
constexpr int64 padded_K = (size_K + lanes - 1) / lanes * lanes;
constexpr int64 padded_V = (size_V + lanes - 1) / lanes * lanes;
constexpr int num_states = 1, num_gates = 5, num_params = 0, num_outputs = 1;
constexpr bool param_of_all_heads[] = {0};
// Sizes of the states of a head, as rows of one vector each, and the numbers of
// all arrays and of all tensors.
struct StateSizes {
  static constexpr int64 rows[] = {6}, count[] = {4};
  static constexpr int64 array = array_numbers(rows, count, num_states);
  static constexpr int64 numbers = pararnn::numbers(rows, count, num_states);
  explicit StateSizes(const int64*) {}
};
constexpr int64 gate_rows[] = {1, 1, 1, 1, 1};
constexpr int64 gate_count[] = {size_K, size_K, size_V, 1, 1};
constexpr int64 gate_array = array_numbers(gate_rows, gate_count, num_gates);
constexpr int64 param_rows[] = {0};
constexpr int64 param_count[] = {0};
constexpr int64 param_array = array_numbers(param_rows, param_count, num_params);
constexpr int64 output_rows[] = {1};
constexpr int64 output_count[] = {size_V};
constexpr int64 output_array = array_numbers(output_rows, output_count, num_outputs);
constexpr int num_products = 0;
constexpr PackedMatrix products[] = {{0, 0}};
constexpr int64 row_block = 1;
constexpr int64 scratch_numbers = std::max<int64>({lanes + lanes + lanes + lanes + padded_K + padded_V + padded_K + lanes + lanes + padded_K + padded_V, lanes + lanes + lanes + lanes + padded_K + padded_V + padded_K, lanes + lanes + lanes + lanes + padded_K + padded_V + padded_K + lanes + lanes + padded_K + padded_K + size_K * padded_V + lanes + lanes + padded_K + padded_V + lanes + size_K * padded_V + padded_V + lanes + size_K * padded_V + padded_K + padded_V + lanes + padded_K + padded_K + lanes + lanes});

// Arrays of one head of one row, whose last axis is filled up to whole vectors.
struct Arrays {
  const scalar *state[num_states], *gate[num_gates], *param[num_params + 1];
  const scalar *packed[num_products + 1];
  scalar *new_state[num_states], *output[num_outputs];
  const scalar *grad_new_state[num_states], *grad_output[num_outputs];
  scalar *grad_state[num_states], *grad_gate[num_gates], *grad_param[num_params + 1];
};

inline void forward_step(const Arrays& at, int64, scalar* scratch) {
  scalar* const a0 = scratch;
  scratch += lanes;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  scalar* const a3 = scratch;
  scratch += lanes;
  scalar* const a4 = scratch;
  scratch += padded_K;
  scalar* const a5 = scratch;
  scratch += padded_V;
  scalar* const a6 = scratch;
  scratch += padded_K;
  scalar* const a7 = scratch;
  scratch += lanes;
  scalar* const a8 = scratch;
  scratch += lanes;
  scalar* const a9 = scratch;
  scratch += padded_K;
  scalar* const a10 = scratch;
  scratch += padded_V;
  {
    real r4 = constant(0);
    real r5 = constant(0);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t1 = x0 * x0;
      const real x2 = load_as(at.gate[0] + v);
      const real t3 = x2 * x2;
      r4 = r4 + inside<size_K>(t1, v, constant(0));
      r5 = r5 + inside<size_K>(t3, v, constant(0));
    }
    a2[0] = combine_lanes(r4, Sum());
    a7[0] = combine_lanes(r5, Sum());
  }
  {
    const real x0 = broadcast(a2[0]);
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    store_as(a3, t2);
  }
  {
    const real x1 = broadcast(a3[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t2 = x0 * x1;
      store_as(a4 + v, t2);
    }
  }
  {
    real r3[padded_V / lanes];
    for (real& x : r3) x = constant(0);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(a4[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.state[0] + i_K * padded_V + v);
        const real t2 = x0 * x1;
        r3[v / lanes] = r3[v / lanes] + t2;
      }
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a5 + v, r3[v / lanes]);
  }
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a0, t1);
    const real x2 = broadcast(at.gate[4][0]);
    const real t3 = sigmoid(x2);
    store_as(a1, t3);
    const real x4 = broadcast(a7[0]);
    const real t5 = x4 + constant(1e-06);
    const real t6 = constant(1.0) / sqrt(t5);
    store_as(a8, t6);
  }
  {
    const real x0 = broadcast(a1[0]);
    const real x4 = broadcast(a8[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x1 = load_as(a4 + v);
      const real t2 = x0 * x1;
      store_as(a6 + v, t2);
      const real x3 = load_as(at.gate[0] + v);
      const real t5 = x3 * x4;
      store_as(a9 + v, t5);
    }
  }
  {
    real r12[padded_V / lanes];
    for (real& x : r12) x = constant(0);
    const real x5 = broadcast(a0[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(a6[i_K]);
      const real x10 = broadcast(a9[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(a5 + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(at.state[0] + i_K * padded_V + v);
        const real t4 = x3 - t2;
        const real t6 = x5 * t4;
        const real x7 = load_as(at.gate[2] + v);
        const real t8 = x0 * x7;
        const real t9 = t6 + t8;
        const real t11 = x10 * t9;
        r12[v / lanes] = r12[v / lanes] + t11;
        store_as(at.new_state[0] + i_K * padded_V + v, t9);
      }
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a10 + v, r12[v / lanes]);
  }
  {
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a10 + v);
      store_as(at.output[0] + v, x0);
    }
  }
}

inline void advance_step(const Arrays& at, int64, scalar* scratch) {
  scalar* const a0 = scratch;
  scratch += lanes;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  scalar* const a3 = scratch;
  scratch += lanes;
  scalar* const a4 = scratch;
  scratch += padded_K;
  scalar* const a5 = scratch;
  scratch += padded_V;
  scalar* const a6 = scratch;
  scratch += padded_K;
  {
    real r2 = constant(0);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t1 = x0 * x0;
      r2 = r2 + inside<size_K>(t1, v, constant(0));
    }
    a2[0] = combine_lanes(r2, Sum());
  }
  {
    const real x0 = broadcast(a2[0]);
    const real t1 = x0 + constant(1e-06);
    const real t2 = constant(1.0) / sqrt(t1);
    store_as(a3, t2);
  }
  {
    const real x1 = broadcast(a3[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t2 = x0 * x1;
      store_as(a4 + v, t2);
    }
  }
  {
    real r3[padded_V / lanes];
    for (real& x : r3) x = constant(0);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(a4[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.state[0] + i_K * padded_V + v);
        const real t2 = x0 * x1;
        r3[v / lanes] = r3[v / lanes] + t2;
      }
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a5 + v, r3[v / lanes]);
  }
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a0, t1);
    const real x2 = broadcast(at.gate[4][0]);
    const real t3 = sigmoid(x2);
    store_as(a1, t3);
  }
  {
    const real x0 = broadcast(a1[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x1 = load_as(a4 + v);
      const real t2 = x0 * x1;
      store_as(a6 + v, t2);
    }
  }
  {
    const real x5 = broadcast(a0[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(a6[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(a5 + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(at.state[0] + i_K * padded_V + v);
        const real t4 = x3 - t2;
        const real t6 = x5 * t4;
        const real x7 = load_as(at.gate[2] + v);
        const real t8 = x0 * x7;
        const real t9 = t6 + t8;
        store_as(at.new_state[0] + i_K * padded_V + v, t9);
      }
    }
  }
}

inline void backward_step(const Arrays& at, int64, scalar* scratch) {
  scalar* const a0 = scratch;
  scratch += lanes;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  scalar* const a3 = scratch;
  scratch += lanes;
  scalar* const a4 = scratch;
  scratch += padded_K;
  scalar* const a5 = scratch;
  scratch += padded_V;
  scalar* const a6 = scratch;
  scratch += padded_K;
  scalar* const a7 = scratch;
  scratch += lanes;
  scalar* const a8 = scratch;
  scratch += lanes;
  scalar* const a9 = scratch;
  scratch += padded_K;
  scalar* const a10 = scratch;
  scratch += padded_K;
  scalar* const a11 = scratch;
  scratch += size_K * padded_V;
  scalar* const a12 = scratch;
  scratch += lanes;
  scalar* const a13 = scratch;
  scratch += lanes;
  scalar* const a14 = scratch;
  scratch += padded_K;
  scalar* const a15 = scratch;
  scratch += padded_V;
  scalar* const a16 = scratch;
  scratch += lanes;
  scalar* const a17 = scratch;
  scratch += size_K * padded_V;
  scalar* const a18 = scratch;
  scratch += padded_V;
  scalar* const a19 = scratch;
  scratch += lanes;
  scalar* const a20 = scratch;
  scratch += size_K * padded_V;
  scalar* const a21 = scratch;
  scratch += padded_K;
  scalar* const a22 = scratch;
  scratch += padded_V;
  scalar* const a23 = scratch;
  scratch += lanes;
  scalar* const a24 = scratch;
  scratch += padded_K;
  scalar* const a25 = scratch;
  scratch += padded_K;
  scalar* const a26 = scratch;
  scratch += lanes;
  scalar* const a27 = scratch;
  scratch += lanes;
  {
    real r4 = constant(0);
    real r5 = constant(0);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t1 = x0 * x0;
      const real x2 = load_as(at.gate[0] + v);
      const real t3 = x2 * x2;
      r4 = r4 + inside<size_K>(t1, v, constant(0));
      r5 = r5 + inside<size_K>(t3, v, constant(0));
    }
    a2[0] = combine_lanes(r4, Sum());
    a7[0] = combine_lanes(r5, Sum());
  }
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a0, t1);
    const real x2 = broadcast(at.gate[4][0]);
    const real t3 = sigmoid(x2);
    store_as(a1, t3);
    const real x4 = broadcast(a2[0]);
    const real t5 = x4 + constant(1e-06);
    const real t6 = constant(1.0) / sqrt(t5);
    store_as(a3, t6);
    const real x7 = broadcast(a7[0]);
    const real t8 = x7 + constant(1e-06);
    const real t9 = constant(1.0) / sqrt(t8);
    store_as(a8, t9);
  }
  {
    const real x1 = broadcast(a3[0]);
    const real x3 = broadcast(a1[0]);
    const real x6 = broadcast(a8[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(at.gate[1] + v);
      const real t2 = x0 * x1;
      store_as(a4 + v, t2);
      const real t4 = x3 * t2;
      store_as(a6 + v, t4);
      const real x5 = load_as(at.gate[0] + v);
      const real t7 = x5 * x6;
      store_as(a9 + v, t7);
    }
  }
  {
    real r16[padded_V / lanes];
    for (real& x : r16) x = constant(0);
    RowsOfLanes<Sum, size_K> rows_r17(a14 + 0);
    real r18[padded_V / lanes];
    for (real& x : r18) x = constant(0);
    real r19[padded_V / lanes];
    for (real& x : r19) x = constant(0);
    const real x12 = broadcast(a0[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      real r17 = constant(0);
      const real x0 = broadcast(a4[i_K]);
      const real x4 = broadcast(a9[i_K]);
      const real x8 = broadcast(a6[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.state[0] + i_K * padded_V + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(at.grad_output[0] + v);
        const real t5 = x3 * x4;
        const real x6 = load_as(at.grad_new_state[0] + i_K * padded_V + v);
        const real t7 = x6 + t5;
        store_as(a11 + i_K * padded_V + v, t7);
        const real t9 = t7 * x8;
        const real x10 = load_as(at.gate[2] + v);
        const real t11 = t7 * x10;
        const real t13 = t7 * x12;
        store_as(a17 + i_K * padded_V + v, t13);
        const real t14 = -t13;
        store_as(a20 + i_K * padded_V + v, t14);
        const real t15 = t14 * x8;
        r16[v / lanes] = r16[v / lanes] + t2;
        r17 = r17 + inside<size_V>(t11, v, constant(0));
        r18[v / lanes] = r18[v / lanes] + t9;
        r19[v / lanes] = r19[v / lanes] + t15;
      }
      rows_r17.put(i_K, r17);
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a5 + v, r16[v / lanes]);
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a15 + v, r18[v / lanes]);
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a22 + v, r19[v / lanes]);
  }
  {
    real r3 = constant(0);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(a14 + v);
      const real x1 = load_as(a4 + v);
      const real t2 = x0 * x1;
      r3 = r3 + inside<size_K>(t2, v, constant(0));
    }
    a16[0] = combine_lanes(r3, Sum());
  }
  {
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a15 + v);
      store_as(at.grad_gate[2] + v, x0);
    }
  }
  {
    RowsOfLanes<Sum, size_K> rows_r22(a10 + 0);
    real r23[padded_V / lanes];
    for (real& x : r23) x = constant(0);
    RowsOfLanes<Sum, size_K> rows_r24(a21 + 0);
    RowsOfLanes<Sum, size_K> rows_r25(a24 + 0);
    const real x5 = broadcast(a0[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      real r22 = constant(0);
      real r24 = constant(0);
      real r25 = constant(0);
      const real x0 = broadcast(a6[i_K]);
      const real x17 = broadcast(a4[i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(a5 + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(at.state[0] + i_K * padded_V + v);
        const real t4 = x3 - t2;
        const real t6 = x5 * t4;
        const real x7 = load_as(at.gate[2] + v);
        const real t8 = x0 * x7;
        const real t9 = t6 + t8;
        const real x10 = load_as(at.grad_output[0] + v);
        const real t11 = x10 * t9;
        const real x12 = load_as(a11 + i_K * padded_V + v);
        const real t13 = x12 * t4;
        const real x14 = load_as(a20 + i_K * padded_V + v);
        const real t15 = x14 * x1;
        const real x16 = load_as(a22 + v);
        const real t18 = x16 * x17;
        const real t19 = x16 * x3;
        const real x20 = load_as(a17 + i_K * padded_V + v);
        const real t21 = x20 + t18;
        r22 = r22 + inside<size_V>(t11, v, constant(0));
        r23[v / lanes] = r23[v / lanes] + t13;
        r24 = r24 + inside<size_V>(t15, v, constant(0));
        r25 = r25 + inside<size_V>(t19, v, constant(0));
        store_as(at.grad_state[0] + i_K * padded_V + v, t21);
      }
      rows_r22.put(i_K, r22);
      rows_r24.put(i_K, r24);
      rows_r25.put(i_K, r25);
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a18 + v, r23[v / lanes]);
  }
  {
    real r15 = constant(0);
    real r16 = constant(0);
    real r17 = constant(0);
    const real x4 = broadcast(a1[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(a10 + v);
      const real x1 = load_as(at.gate[0] + v);
      const real t2 = x0 * x1;
      const real x3 = load_as(a14 + v);
      const real t5 = x3 * x4;
      const real x6 = load_as(a21 + v);
      const real t7 = x6 * x4;
      const real x8 = load_as(a4 + v);
      const real t9 = x6 * x8;
      const real t10 = t5 + t7;
      const real x11 = load_as(a24 + v);
      const real t12 = t10 + x11;
      store_as(a25 + v, t12);
      const real x13 = load_as(at.gate[1] + v);
      const real t14 = t12 * x13;
      r15 = r15 + inside<size_K>(t2, v, constant(0));
      r16 = r16 + inside<size_K>(t9, v, constant(0));
      r17 = r17 + inside<size_K>(t14, v, constant(0));
    }
    a12[0] = combine_lanes(r15, Sum());
    a23[0] = combine_lanes(r16, Sum());
    a26[0] = combine_lanes(r17, Sum());
  }
  {
    real r0 = constant(0);
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a18 + v);
      r0 = r0 + inside<size_V>(x0, v, constant(0));
    }
    a19[0] = combine_lanes(r0, Sum());
  }
  {
    const real x0 = broadcast(a8[0]);
    const real t1 = x0 * x0 * x0;
    const real x2 = broadcast(a12[0]);
    const real t3 = x2 * constant(-0.5);
    const real t4 = t3 * t1;
    store_as(a13, t4);
    const real x5 = broadcast(a16[0]);
    const real x6 = broadcast(a23[0]);
    const real t7 = x5 + x6;
    const real x8 = broadcast(a3[0]);
    const real t9 = x8 * x8 * x8;
    const real x10 = broadcast(a26[0]);
    const real t11 = x10 * constant(-0.5);
    const real t12 = t11 * t9;
    store_as(a27, t12);
    const real x13 = broadcast(a1[0]);
    const real t14 = constant(1.0) - x13;
    const real t15 = x13 * t14;
    const real t16 = t7 * t15;
    const real x17 = broadcast(a0[0]);
    const real t18 = constant(1.0) - x17;
    const real t19 = x17 * t18;
    const real x20 = broadcast(a19[0]);
    const real t21 = x20 * t19;
    store_as(at.grad_gate[3], t21);
    store_as(at.grad_gate[4], t16);
  }
  {
    const real x1 = broadcast(a8[0]);
    const real x6 = broadcast(a13[0]);
    const real x10 = broadcast(a3[0]);
    const real x15 = broadcast(a27[0]);
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(a10 + v);
      const real t2 = x0 * x1;
      const real x3 = load_as(at.gate[0] + v);
      const real t4 = x3;
      const real t5 = t4 * constant(2.0);
      const real t7 = x6 * t5;
      const real t8 = t2 + t7;
      const real x9 = load_as(a25 + v);
      const real t11 = x9 * x10;
      const real x12 = load_as(at.gate[1] + v);
      const real t13 = x12;
      const real t14 = t13 * constant(2.0);
      const real t16 = x15 * t14;
      const real t17 = t11 + t16;
      store_as(at.grad_gate[0] + v, t8);
      store_as(at.grad_gate[1] + v, t17);
    }
  }
}
