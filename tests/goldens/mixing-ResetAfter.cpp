constexpr int num_states = 1, num_gates = 3, num_fields = 0, num_params = 1, num_lefts = 1, num_rights = 3, num_sums = 3;
constexpr int channel_params[] = {3};
constexpr int gate_of_right[] = {0, 1, -1};
constexpr int num_read_states = 1, read_states[] = {0};  // by the gradient
constexpr int num_read_gates = 1, read_gates[] = {2};  // by the gradient

constexpr int forward_stages = 2, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 1};
constexpr int forward_first_product[] = {0, 3, 3};
constexpr Product forward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}};
constexpr int forward_sum_with[] = {0, 1, 2};
constexpr int forward_stage_of_new_state[] = {1};
constexpr int forward_stage_of_sum[] = {1, 1, 1};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  const real gate_r = gate[0];
  const real gate_z = gate[1];
  const real gate_n = gate[2];
  const real param_b_n = param[0];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real t8 = gate_r + product_0;
  const real t9 = sigmoid(t8);
  const real t10 = gate_z + product_1;
  const real t11 = sigmoid(t10);
  const real t12 = product_2 + param_b_n;
  const real t13 = t9 * t12;
  const real t14 = gate_n + t13;
  const real t15 = tanh(t14);
  const real t16 = constant(1.0) - t11;
  const real t17 = t11 * state_h;
  const real t18 = multiply_add(t16, t15, t17);
  new_state[0] = t18;
  sum[0] = t8;
  sum[1] = t10;
  sum[2] = t12;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state, sum);
}

constexpr int backward_stages = 3, backward_carried = 7;
constexpr int backward_first_operand[] = {0, 0, 3, 3};
constexpr int backward_first_product[] = {0, 0, 3, 3};
constexpr Product backward_products[] = {{0, 2, 1}, {1, 1, 1}, {2, 0, 1}};
constexpr int backward_sum_of_product[] = {0, 0, 0};
constexpr int backward_stage_of_state[] = {2};
constexpr int backward_stage_of_gate[] = {1, 1, 1};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {1};
constexpr int backward_stage_of_left[] = {0};
constexpr int backward_stage_of_right[] = {1, 1, 1};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real gate_n = gate[2];
  const real sum_0 = sum[0];
  const real sum_1 = sum[1];
  const real sum_2 = sum[2];
  const real t5 = sigmoid(sum_0);
  const real t6 = sigmoid(sum_1);
  const real t7 = t5 * sum_2;
  const real t8 = gate_n + t7;
  const real t9 = tanh(t8);
  const real t10 = constant(1.0) - t6;
  const real t11 = t9 * t9;
  const real t12 = constant(1.0) - t11;
  const real t13 = t10 * t12;
  const real t14 = t6 * t10;
  const real t15 = constant(1.0) - t5;
  const real t16 = t5 * t15;
  const real t17 = sum_2 * t16;
  left[0] = state_h;
  carried[0] = t17;
  carried[1] = t14;
  carried[2] = t5;
  carried[3] = t13;
  carried[4] = t9;
  carried[5] = state_h;
  carried[6] = t6;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real carried_2 = carried[2];
  const real carried_3 = carried[3];
  const real carried_4 = carried[4];
  const real carried_5 = carried[5];
  const real t7 = cotangent_h * carried_5;
  const real t8 = cotangent_h * carried_4;
  const real t9 = -t8;
  const real t10 = t7 + t9;
  const real t11 = cotangent_h * carried_3;
  const real t12 = t11 * carried_2;
  const real t13 = t10 * carried_1;
  const real t14 = t11 * carried_0;
  grad_gate[0] = t14;
  grad_gate[1] = t13;
  grad_gate[2] = t11;
  grad_param[0] = t12;
  right[0] = t14;
  right[1] = t13;
  right[2] = t12;
  operand[0] = t12;
  operand[1] = t13;
  operand[2] = t14;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real carried_6 = carried[6];
  const real t5 = cotangent_h * carried_6;
  const real t6 = t5 + product_0;
  const real t7 = t6 + product_1;
  const real t8 = t7 + product_2;
  grad_state[0] = t8;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
