constexpr int num_states = 2, num_gates = 4, num_fields = 0, num_params = 0, num_lefts = 1, num_rights = 4;
constexpr int channel_params[] = {-1};

constexpr int forward_stages = 2, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 1};
constexpr int forward_first_product[] = {0, 4, 4};
constexpr Product forward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}, {0, 3, 0}};
constexpr int forward_stage_of_new_state[] = {1, 1};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
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
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state);
}

constexpr int backward_stages = 4, backward_carried = 6;
constexpr int backward_first_operand[] = {0, 1, 1, 5, 5};
constexpr int backward_first_product[] = {0, 4, 4, 8, 8};
constexpr Product backward_products[] = {{0, 0, 0}, {0, 1, 0}, {0, 2, 0}, {0, 3, 0}, {1, 3, 1}, {2, 2, 1}, {3, 1, 1}, {4, 0, 1}};
constexpr int backward_recomputed = 1, backward_saved = 6;
constexpr int backward_sum_of_product[] = {0, 1, 2, 3, 4, 4, 4, 4};
constexpr int backward_stage_of_state[] = {3, 2};
constexpr int backward_stage_of_gate[] = {2, 2, 2, 2};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {-1};
constexpr int backward_stage_of_left[] = {1};
constexpr int backward_stage_of_right[] = {2, 2, 2, 2};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real state_c = state[1];
  const real gate_i = gate[0];
  const real gate_f = gate[1];
  const real gate_g = gate[2];
  const real gate_o = gate[3];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real product_3 = product[3];
  const real t10 = gate_i + product_0;
  const real t11 = sigmoid(t10);
  const real t12 = gate_f + product_1;
  const real t13 = sigmoid(t12);
  const real t14 = gate_g + product_2;
  const real t15 = tanh(t14);
  const real t16 = gate_o + product_3;
  const real t17 = sigmoid(t16);
  const real t18 = t13 * state_c;
  const real t19 = multiply_add(t11, t15, t18);
  const real t20 = tanh(t19);
  const real t21 = t20 * t20;
  const real t22 = constant(1.0) - t21;
  const real t23 = t17 * t22;
  const real t24 = constant(1.0) - t17;
  const real t25 = t17 * t24;
  const real t26 = t20 * t25;
  const real t27 = t15 * t15;
  const real t28 = constant(1.0) - t27;
  const real t29 = t11 * t28;
  const real t30 = constant(1.0) - t13;
  const real t31 = t13 * t30;
  const real t32 = state_c * t31;
  const real t33 = constant(1.0) - t11;
  const real t34 = t11 * t33;
  const real t35 = t15 * t34;
  left[0] = state_h;
  carried[0] = t35;
  carried[1] = t32;
  carried[2] = t29;
  carried[3] = t26;
  carried[4] = t13;
  carried[5] = t23;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
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
  operand[1] = t11;
  operand[2] = t12;
  operand[3] = t13;
  operand[4] = t14;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real product_4 = product[4];
  const real product_5 = product[5];
  const real product_6 = product[6];
  const real product_7 = product[7];
  const real t4 = product_4 + product_5;
  const real t5 = t4 + product_6;
  const real t6 = t5 + product_7;
  grad_state[0] = t6;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
