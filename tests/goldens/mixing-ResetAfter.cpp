constexpr int num_states = 1, num_gates = 3, num_fields = 0, num_params = 1, num_lefts = 1, num_rights = 3;
constexpr int channel_params[] = {3};

constexpr int forward_stages = 2, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 1};
constexpr int forward_first_product[] = {0, 3, 3};
constexpr Product forward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}};
constexpr int forward_stage_of_new_state[] = {1};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
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
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state);
}

constexpr int backward_stages = 4, backward_carried = 7;
constexpr int backward_first_operand[] = {0, 1, 1, 4, 4};
constexpr int backward_first_product[] = {0, 3, 3, 6, 6};
constexpr Product backward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}, {1, 2, 1}, {2, 1, 1}, {3, 0, 1}};
constexpr int backward_recomputed = 1, backward_saved = 7;
constexpr int backward_sum_of_product[] = {0, 1, 2, 3, 3, 3};
constexpr int backward_stage_of_state[] = {3};
constexpr int backward_stage_of_gate[] = {2, 2, 2};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {2};
constexpr int backward_stage_of_left[] = {1};
constexpr int backward_stage_of_right[] = {2, 2, 2};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
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
  const real t17 = t15 * t15;
  const real t18 = constant(1.0) - t17;
  const real t19 = t16 * t18;
  const real t20 = t11 * t16;
  const real t21 = constant(1.0) - t9;
  const real t22 = t9 * t21;
  const real t23 = t12 * t22;
  left[0] = state_h;
  carried[0] = t23;
  carried[1] = t20;
  carried[2] = t9;
  carried[3] = t19;
  carried[4] = t15;
  carried[5] = state_h;
  carried[6] = t11;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
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
  operand[1] = t12;
  operand[2] = t13;
  operand[3] = t14;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real product_3 = product[3];
  const real product_4 = product[4];
  const real product_5 = product[5];
  const real carried_6 = carried[6];
  const real t5 = cotangent_h * carried_6;
  const real t6 = t5 + product_3;
  const real t7 = t6 + product_4;
  const real t8 = t7 + product_5;
  grad_state[0] = t8;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
