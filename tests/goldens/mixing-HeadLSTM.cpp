constexpr int num_states = 2, num_gates = 4, num_fields = 0, num_params = 0, num_lefts = 1, num_rights = 4, num_sums = 4;
constexpr int channel_params[] = {-1};
constexpr int gate_of_right[] = {0, 1, 2, 3};
constexpr int num_read_states = 2, read_states[] = {0, 1};  // by the gradient
constexpr int num_read_gates = 0, read_gates[] = {-1};  // by the gradient

constexpr int forward_stages = 2, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 1};
constexpr int forward_first_product[] = {0, 4, 4};
constexpr Product forward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}, {0, 3, 0}};
constexpr int forward_sum_with[] = {0, 1, 2, 3};
constexpr int forward_stage_of_new_state[] = {1, 1};
constexpr int forward_stage_of_sum[] = {1, 1, 1, 1};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_c = state[1];
  const real gate_i = gate[0];
  const real gate_f = gate[1];
  const real gate_g = gate[2];
  const real gate_o = gate[3];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real product_3 = product[3];
  const real t9 = gate_i + product_0;
  const real t10 = sigmoid(t9);
  const real t11 = gate_f + product_1;
  const real t12 = sigmoid(t11);
  const real t13 = gate_g + product_2;
  const real t14 = tanh(t13);
  const real t15 = gate_o + product_3;
  const real t16 = sigmoid(t15);
  const real t17 = t12 * state_c;
  const real t18 = multiply_add(t10, t14, t17);
  const real t19 = tanh(t18);
  const real t20 = t16 * t19;
  new_state[0] = t20;
  new_state[1] = t18;
  sum[0] = t9;
  sum[1] = t11;
  sum[2] = t13;
  sum[3] = t15;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state, sum);
}

constexpr int backward_stages = 3, backward_carried = 6;
constexpr int backward_first_operand[] = {0, 0, 4, 4};
constexpr int backward_first_product[] = {0, 0, 4, 4};
constexpr Product backward_products[] = {{0, 3, 1}, {1, 2, 1}, {2, 1, 1}, {3, 0, 1}};
constexpr int backward_sum_of_product[] = {0, 0, 0, 0};
constexpr int backward_stage_of_state[] = {2, 1};
constexpr int backward_stage_of_gate[] = {1, 1, 1, 1};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {-1};
constexpr int backward_stage_of_left[] = {0};
constexpr int backward_stage_of_right[] = {1, 1, 1, 1};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real state_c = state[1];
  const real sum_0 = sum[0];
  const real sum_1 = sum[1];
  const real sum_2 = sum[2];
  const real sum_3 = sum[3];
  const real t6 = sigmoid(sum_0);
  const real t7 = sigmoid(sum_1);
  const real t8 = tanh(sum_2);
  const real t9 = sigmoid(sum_3);
  const real t10 = t7 * state_c;
  const real t11 = multiply_add(t6, t8, t10);
  const real t12 = tanh(t11);
  const real t13 = t12 * t12;
  const real t14 = constant(1.0) - t13;
  const real t15 = t9 * t14;
  const real t16 = constant(1.0) - t9;
  const real t17 = t9 * t16;
  const real t18 = t12 * t17;
  const real t19 = t8 * t8;
  const real t20 = constant(1.0) - t19;
  const real t21 = t6 * t20;
  const real t22 = constant(1.0) - t7;
  const real t23 = t7 * t22;
  const real t24 = state_c * t23;
  const real t25 = constant(1.0) - t6;
  const real t26 = t6 * t25;
  const real t27 = t8 * t26;
  left[0] = state_h;
  carried[0] = t27;
  carried[1] = t24;
  carried[2] = t21;
  carried[3] = t18;
  carried[4] = t7;
  carried[5] = t15;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real cotangent_c = cotangent[1];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real carried_2 = carried[2];
  const real carried_3 = carried[3];
  const real carried_4 = carried[4];
  const real carried_5 = carried[5];
  const real t8 = cotangent_h * carried_5;
  const real t9 = cotangent_c + t8;
  const real t10 = t9 * carried_4;
  const real t11 = cotangent_h * carried_3;
  const real t12 = t9 * carried_2;
  const real t13 = t9 * carried_1;
  const real t14 = t9 * carried_0;
  grad_state[1] = t10;
  grad_gate[0] = t14;
  grad_gate[1] = t13;
  grad_gate[2] = t12;
  grad_gate[3] = t11;
  right[0] = t14;
  right[1] = t13;
  right[2] = t12;
  right[3] = t11;
  operand[0] = t11;
  operand[1] = t12;
  operand[2] = t13;
  operand[3] = t14;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real product_3 = product[3];
  const real t4 = product_0 + product_1;
  const real t5 = t4 + product_2;
  const real t6 = t5 + product_3;
  grad_state[0] = t6;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
