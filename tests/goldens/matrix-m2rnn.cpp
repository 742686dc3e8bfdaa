constexpr int64 size_K = 6;
constexpr int64 size_V = 4;
constexpr int64 padded_K = (size_K + lanes - 1) / lanes * lanes;
constexpr int64 padded_V = (size_V + lanes - 1) / lanes * lanes;
constexpr int num_states = 1, num_gates = 4, num_params = 1, num_outputs = 1;
constexpr bool param_of_all_heads[] = {0};
// Sizes of the states of a head, as rows of one vector each, and the numbers of
// all arrays and of all tensors.
struct StateSizes {
  static constexpr int64 rows[] = {6}, count[] = {4};
  static constexpr int64 array = array_numbers(rows, count, num_states);
  static constexpr int64 numbers = pararnn::numbers(rows, count, num_states);
  explicit StateSizes(const int64*) {}
};
constexpr int64 gate_rows[] = {1, 1, 1, 1};
constexpr int64 gate_count[] = {size_K, size_K, size_V, 1};
constexpr int64 gate_array = array_numbers(gate_rows, gate_count, num_gates);
constexpr int64 param_rows[] = {size_V};
constexpr int64 param_count[] = {size_V};
constexpr int64 param_array = array_numbers(param_rows, param_count, num_params);
constexpr int64 output_rows[] = {1};
constexpr int64 output_count[] = {size_V};
constexpr int64 output_array = array_numbers(output_rows, output_count, num_outputs);
constexpr int num_products = 2;
constexpr PackedMatrix products[] = {{0, 0}, {0, 1}};
constexpr int64 row_block = 1;
constexpr int64 scratch_numbers = std::max<int64>({size_K * padded_V + lanes + lanes + padded_V, size_K * padded_V + lanes + lanes, size_K * padded_V + lanes + lanes + padded_K + size_K * padded_V + padded_V + lanes + padded_V + lanes + size_K * padded_V + padded_K + padded_V + size_K * padded_V});

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
  scratch += size_K * padded_V;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  scalar* const a3 = scratch;
  scratch += padded_V;
  multiply(size_K, at.state[0], padded_V, at.packed[0], size_V, padded_V / lanes, a0, padded_V);
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a1, t1);
    const real t2 = constant(1.0) - t1;
    store_as(a2, t2);
  }
  {
    real r14[padded_V / lanes];
    for (real& x : r14) x = constant(0);
    const real x6 = broadcast(a1[0]);
    const real x9 = broadcast(a2[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(at.gate[0][i_K]);
      const real x12 = broadcast(at.gate[1][i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.gate[2] + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(a0 + i_K * padded_V + v);
        const real t4 = x3 + t2;
        const real t5 = tanh(t4);
        const real x7 = load_as(at.state[0] + i_K * padded_V + v);
        const real t8 = x6 * x7;
        const real t10 = x9 * t5;
        const real t11 = t8 + t10;
        const real t13 = x12 * t11;
        r14[v / lanes] = r14[v / lanes] + t13;
        store_as(at.new_state[0] + i_K * padded_V + v, t11);
      }
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a3 + v, r14[v / lanes]);
  }
  {
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a3 + v);
      store_as(at.output[0] + v, x0);
    }
  }
}

inline void advance_step(const Arrays& at, int64, scalar* scratch) {
  scalar* const a0 = scratch;
  scratch += size_K * padded_V;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  multiply(size_K, at.state[0], padded_V, at.packed[0], size_V, padded_V / lanes, a0, padded_V);
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a1, t1);
    const real t2 = constant(1.0) - t1;
    store_as(a2, t2);
  }
  {
    const real x6 = broadcast(a1[0]);
    const real x9 = broadcast(a2[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(at.gate[0][i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.gate[2] + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(a0 + i_K * padded_V + v);
        const real t4 = x3 + t2;
        const real t5 = tanh(t4);
        const real x7 = load_as(at.state[0] + i_K * padded_V + v);
        const real t8 = x6 * x7;
        const real t10 = x9 * t5;
        const real t11 = t8 + t10;
        store_as(at.new_state[0] + i_K * padded_V + v, t11);
      }
    }
  }
}

inline void backward_step(const Arrays& at, int64, scalar* scratch) {
  scalar* const a0 = scratch;
  scratch += size_K * padded_V;
  scalar* const a1 = scratch;
  scratch += lanes;
  scalar* const a2 = scratch;
  scratch += lanes;
  scalar* const a3 = scratch;
  scratch += padded_K;
  scalar* const a4 = scratch;
  scratch += size_K * padded_V;
  scalar* const a5 = scratch;
  scratch += padded_V;
  scalar* const a6 = scratch;
  scratch += lanes;
  scalar* const a7 = scratch;
  scratch += padded_V;
  scalar* const a8 = scratch;
  scratch += lanes;
  scalar* const a9 = scratch;
  scratch += size_K * padded_V;
  scalar* const a10 = scratch;
  scratch += padded_K;
  scalar* const a11 = scratch;
  scratch += padded_V;
  scalar* const a12 = scratch;
  scratch += size_K * padded_V;
  {
    real r7[padded_V / lanes];
    for (real& x : r7) x = constant(0);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      const real x0 = broadcast(at.gate[1][i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.grad_output[0] + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(at.grad_new_state[0] + i_K * padded_V + v);
        const real t4 = x3 + t2;
        store_as(a4 + i_K * padded_V + v, t4);
        const real x5 = load_as(at.state[0] + i_K * padded_V + v);
        const real t6 = t4 * x5;
        r7[v / lanes] = r7[v / lanes] + t6;
      }
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a7 + v, r7[v / lanes]);
  }
  multiply(size_K, at.state[0], padded_V, at.packed[0], size_V, padded_V / lanes, a0, padded_V);
  {
    const real x0 = broadcast(at.gate[3][0]);
    const real t1 = sigmoid(x0);
    store_as(a1, t1);
    const real t2 = constant(1.0) - t1;
    store_as(a2, t2);
  }
  {
    real r0 = constant(0);
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a7 + v);
      r0 = r0 + inside<size_V>(x0, v, constant(0));
    }
    a8[0] = combine_lanes(r0, Sum());
  }
  {
    RowsOfLanes<Sum, size_K> rows_r22(a3 + 0);
    real r23[padded_V / lanes];
    for (real& x : r23) x = constant(0);
    RowsOfLanes<Sum, size_K> rows_r24(a10 + 0);
    real r25[padded_V / lanes];
    for (real& x : r25) x = constant(0);
    const real x6 = broadcast(a1[0]);
    const real x9 = broadcast(a2[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      real r22 = constant(0);
      real r24 = constant(0);
      const real x0 = broadcast(at.gate[0][i_K]);
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x1 = load_as(at.gate[2] + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(a0 + i_K * padded_V + v);
        const real t4 = x3 + t2;
        const real t5 = tanh(t4);
        const real x7 = load_as(at.state[0] + i_K * padded_V + v);
        const real t8 = x6 * x7;
        const real t10 = x9 * t5;
        const real t11 = t8 + t10;
        const real x12 = load_as(at.grad_output[0] + v);
        const real t13 = x12 * t11;
        const real x14 = load_as(a4 + i_K * padded_V + v);
        const real t15 = x14 * x9;
        const real t16 = x14 * t5;
        const real t17 = t5 * t5;
        const real t18 = constant(1.0) - t17;
        const real t19 = t15 * t18;
        store_as(a9 + i_K * padded_V + v, t19);
        const real t20 = t19 * x0;
        const real t21 = t19 * x1;
        r22 = r22 + inside<size_V>(t13, v, constant(0));
        r23[v / lanes] = r23[v / lanes] + t16;
        r24 = r24 + inside<size_V>(t21, v, constant(0));
        r25[v / lanes] = r25[v / lanes] + t20;
      }
      rows_r22.put(i_K, r22);
      rows_r24.put(i_K, r24);
    }
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a5 + v, r23[v / lanes]);
    for (int64 v = 0; v < padded_V; v += lanes) store_as(a11 + v, r25[v / lanes]);
  }
  multiply(size_K, a9, padded_V, at.packed[1], size_V, padded_V / lanes, a12, padded_V);
  add_outer<size_V, padded_V>(size_K, at.state[0], padded_V, a9, padded_V, at.grad_param[0]);
  {
    for (int64 v = 0; v < padded_K; v += lanes) {
      const real x0 = load_as(a10 + v);
      store_as(at.grad_gate[0] + v, x0);
      const real x1 = load_as(a3 + v);
      store_as(at.grad_gate[1] + v, x1);
    }
  }
  {
    real r0 = constant(0);
    for (int64 v = 0; v < padded_V; v += lanes) {
      const real x0 = load_as(a5 + v);
      r0 = r0 + inside<size_V>(x0, v, constant(0));
      const real x2 = load_as(a11 + v);
      store_as(at.grad_gate[2] + v, x2);
    }
    a6[0] = combine_lanes(r0, Sum());
  }
  {
    const real x1 = broadcast(a1[0]);
    for (int64 i_K = 0; i_K < size_K; ++i_K) {
      for (int64 v = 0; v < padded_V; v += lanes) {
        const real x0 = load_as(a4 + i_K * padded_V + v);
        const real t2 = x0 * x1;
        const real x3 = load_as(a12 + i_K * padded_V + v);
        const real t4 = t2 + x3;
        store_as(at.grad_state[0] + i_K * padded_V + v, t4);
      }
    }
  }
  {
    const real x0 = broadcast(a6[0]);
    const real t1 = -x0;
    const real x2 = broadcast(a8[0]);
    const real t3 = t1 + x2;
    const real x4 = broadcast(a1[0]);
    const real t5 = constant(1.0) - x4;
    const real t6 = x4 * t5;
    const real t7 = t3 * t6;
    store_as(at.grad_gate[3], t7);
  }
}
