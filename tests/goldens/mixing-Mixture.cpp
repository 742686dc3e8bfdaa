constexpr int num_states = 3, num_gates = 2, num_fields = 1, num_params = 3, num_lefts = 3, num_rights = 3, num_sums = 2;
constexpr int channel_params[] = {2, 3, 4};
constexpr int gate_of_right[] = {-1, -1, -1};
constexpr int num_read_states = 3, read_states[] = {0, 1, 2};  // by the gradient
constexpr int num_read_gates = 1, read_gates[] = {1};  // by the gradient

constexpr int forward_stages = 3, forward_carried = 2;
constexpr int forward_first_operand[] = {0, 2, 3, 3};
constexpr int forward_first_product[] = {0, 2, 3, 3};
constexpr Product forward_products[] = {{0, 0, 0}, {1, 1, 1}, {2, 0, 1}};
constexpr int forward_sum_with[] = {0, 0, 1};
constexpr int forward_stage_of_new_state[] = {2, 2, 2};
constexpr int forward_stage_of_sum[] = {1, 2};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  const real state_c = state[1];
  operand[0] = state_h;
  operand[1] = state_c;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_c = state[1];
  const real gate_f = gate[1];
  const real field_gap = field[0];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real t5 = product_0 + product_1;
  const real t6 = t5 * field_gap;
  const real t7 = gate_f + t6;
  const real t8 = sigmoid(t7);
  const real t9 = t8 * state_c;
  sum[0] = t5;
  operand[2] = t9;
  carried[0] = t9;
  carried[1] = t8;
}

PARARNN_FUNCTION void forward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  const real state_trace = state[2];
  const real gate_i = gate[0];
  const real param_a = param[0];
  const real param_b = param[1];
  const real param_scale = param[2];
  const real product_2 = product[2];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real t9 = param_a * state_h;
  const real t10 = gate_i + t9;
  const real t11 = t10 + product_2;
  const real t12 = relu(t11);
  const real t13 = constant(1.0) - carried_1;
  const real t14 = tanh(t12);
  const real t15 = t13 * t14;
  const real t16 = carried_0 + t15;
  const real t17 = state_trace * constant(0.5);
  const mask t18 = t16 > constant(0.2);
  const real t19 = t16 * constant(0.1);
  const real t20 = select(t18, t16, t19);
  const real t21 = multiply_add(param_scale, t20, t17);
  const real t22 = param_b * t21;
  const real t23 = t16 + t22;
  const real t24 = tanh(t23);
  new_state[0] = t24;
  new_state[1] = t16;
  new_state[2] = t21;
  sum[1] = t11;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 2) forward_2(state, gate, field, param, product, carried, operand, new_state, sum);
}

constexpr int backward_stages = 4, backward_carried = 15;
constexpr int backward_first_operand[] = {0, 0, 1, 2, 2};
constexpr int backward_first_product[] = {0, 0, 1, 3, 3};
constexpr Product backward_products[] = {{0, 0, 0}, {1, 1, 0}, {1, 0, 1}};
constexpr int backward_sum_of_product[] = {0, 1, 2};
constexpr int backward_stage_of_state[] = {3, 3, 1};
constexpr int backward_stage_of_gate[] = {1, 2};
constexpr int backward_stage_of_field[] = {2};
constexpr int backward_stage_of_param[] = {1, 1, 1};
constexpr int backward_stage_of_left[] = {1, 0, 2};
constexpr int backward_stage_of_right[] = {0, 2, 0};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real state_c = state[1];
  const real state_trace = state[2];
  const real gate_f = gate[1];
  const real field_gap = field[0];
  const real param_b = param[1];
  const real param_scale = param[2];
  const real sum_0 = sum[0];
  const real sum_1 = sum[1];
  const real t9 = sum_0 * field_gap;
  const real t10 = gate_f + t9;
  const real t11 = sigmoid(t10);
  const real t12 = t11 * state_c;
  const real t13 = relu(sum_1);
  const real t14 = constant(1.0) - t11;
  const real t15 = tanh(t13);
  const real t16 = multiply_add(t14, t15, t12);
  const real t17 = state_trace * constant(0.5);
  const mask t18 = t16 > constant(0.2);
  const real t19 = t16 * constant(0.1);
  const real t20 = select(t18, t16, t19);
  const real t21 = multiply_add(param_scale, t20, t17);
  const real t22 = param_b * t21;
  const real t23 = t16 + t22;
  const real t24 = tanh(t23);
  const real t25 = t24 * t24;
  const real t26 = constant(1.0) - t25;
  const real t27 = t15 * t15;
  const real t28 = constant(1.0) - t27;
  const real t29 = t14 * t28;
  const mask t30 = t13 <= constant(0.0);
  const real t31 = t11 * t14;
  left[1] = state_h;
  right[0] = t12;
  right[2] = state_c;
  carried[0] = field_gap;
  carried[1] = sum_0;
  carried[2] = t31;
  carried[3] = state_h;
  carried[5] = state_c;
  carried[6] = t11;
  carried[7] = number(t30);
  carried[9] = t29;
  carried[10] = t15;
  carried[11] = number(t18);
  carried[12] = t20;
  carried[13] = t21;
  carried[14] = t26;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real param_b = param[1];
  const real param_scale = param[2];
  const real cotangent_h = cotangent[0];
  const real cotangent_c = cotangent[1];
  const real cotangent_trace = cotangent[2];
  const real carried_3 = carried[3];
  const real carried_7 = carried[7];
  const real carried_9 = carried[9];
  const real carried_11 = carried[11];
  const real carried_12 = carried[12];
  const real carried_13 = carried[13];
  const real carried_14 = carried[14];
  const real t12 = cotangent_h * carried_14;
  const real t13 = cotangent_c + t12;
  const real t14 = t12 * param_b;
  const real t15 = t12 * carried_13;
  const real t16 = cotangent_trace + t14;
  const real t17 = t16 * param_scale;
  const real t18 = t16 * carried_12;
  const real t19 = select(truth(carried_11), constant(0.0), t17);
  const real t20 = select(truth(carried_11), t17, constant(0.0));
  const real t21 = t13 + t20;
  const real t22 = t19 * constant(0.1);
  const real t23 = t21 + t22;
  const real t24 = t16 * constant(0.5);
  const real t25 = t23 * carried_9;
  const real t26 = select(truth(carried_7), constant(0.0), t25);
  const real t27 = t26 * carried_3;
  grad_state[2] = t24;
  grad_gate[0] = t26;
  grad_param[0] = t27;
  grad_param[1] = t15;
  grad_param[2] = t18;
  left[0] = t26;
  operand[0] = t26;
  carried[4] = t26;
  carried[8] = t23;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real product_0 = product[0];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real carried_2 = carried[2];
  const real carried_5 = carried[5];
  const real carried_8 = carried[8];
  const real carried_10 = carried[10];
  const real t7 = carried_8 * carried_10;
  const real t8 = -t7;
  const real t9 = carried_8 * carried_5;
  const real t10 = t8 + t9;
  const real t11 = product_0 * carried_5;
  const real t12 = t10 + t11;
  const real t13 = t12 * carried_2;
  const real t14 = t13 * carried_1;
  const real t15 = t13 * carried_0;
  grad_gate[1] = t13;
  grad_field[0] = t14;
  left[2] = t15;
  right[1] = t15;
  operand[1] = t15;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real param_a = param[0];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real carried_4 = carried[4];
  const real carried_6 = carried[6];
  const real carried_8 = carried[8];
  const real t7 = carried_8 * carried_6;
  const real t8 = multiply_add(product_0, carried_6, t7);
  const real t9 = carried_4 * param_a;
  const real t10 = t8 + product_1;
  const real t11 = t9 + product_2;
  grad_state[0] = t11;
  grad_state[1] = t10;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
