constexpr int num_states = 1, num_gates = 3, num_fields = 0, num_params = 0, num_lefts = 3, num_rights = 2;
constexpr int channel_params[] = {-1};

constexpr int forward_stages = 3, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 2, 2};
constexpr int forward_first_product[] = {0, 2, 3, 3};
constexpr Product forward_products[] = {{0, 0, 1}, {0, 1, 1}, {1, 2, 1}};
constexpr int forward_stage_of_new_state[] = {2};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_h = state[0];
  const real gate_r = gate[1];
  const real product_1 = product[1];
  const real t3 = gate_r + product_1;
  const real t4 = sigmoid(t3);
  const real t5 = state_h * t4;
  operand[1] = t5;
}

PARARNN_FUNCTION void forward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_h = state[0];
  const real gate_z = gate[0];
  const real gate_c = gate[2];
  const real product_0 = product[0];
  const real product_2 = product[2];
  const real t5 = gate_z + product_0;
  const real t6 = sigmoid(t5);
  const real t7 = gate_c + product_2;
  const real t8 = tanh(t7);
  const real t9 = constant(1.0) - t6;
  const real t10 = t6 * t8;
  const real t11 = multiply_add(t9, state_h, t10);
  new_state[0] = t11;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 2) forward_2(state, gate, field, param, product, carried, operand, new_state);
}

constexpr int backward_stages = 6, backward_carried = 8;
constexpr int backward_first_operand[] = {0, 1, 2, 2, 4, 5, 5};
constexpr int backward_first_product[] = {0, 2, 3, 3, 5, 6, 6};
constexpr Product backward_products[] = {{0, 0, 1}, {0, 1, 1}, {1, 2, 1}, {2, 2, 0}, {3, 0, 0}, {4, 1, 0}};
constexpr int backward_recomputed = 2, backward_saved = 7;
constexpr int backward_sum_of_product[] = {0, 1, 2, 3, 4, 5};
constexpr int backward_stage_of_state[] = {5};
constexpr int backward_stage_of_gate[] = {3, 4, 3};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {-1};
constexpr int backward_stage_of_left[] = {3, 4, 3};
constexpr int backward_stage_of_right[] = {2, 2};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real gate_r = gate[1];
  const real product_1 = product[1];
  const real t3 = gate_r + product_1;
  const real t4 = sigmoid(t3);
  const real t5 = state_h * t4;
  operand[1] = t5;
  carried[2] = t4;
  carried[7] = t5;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real gate_z = gate[0];
  const real gate_c = gate[2];
  const real product_0 = product[0];
  const real product_2 = product[2];
  const real carried_2 = carried[2];
  const real carried_7 = carried[7];
  const real t7 = gate_z + product_0;
  const real t8 = sigmoid(t7);
  const real t9 = gate_c + product_2;
  const real t10 = tanh(t9);
  const real t11 = constant(1.0) - t8;
  const real t12 = t10 * t10;
  const real t13 = constant(1.0) - t12;
  const real t14 = t8 * t13;
  const real t15 = constant(1.0) - carried_2;
  const real t16 = carried_2 * t15;
  const real t17 = state_h * t16;
  const real t18 = t8 * t11;
  right[0] = state_h;
  right[1] = carried_7;
  carried[0] = t18;
  carried[1] = t17;
  carried[3] = t14;
  carried[4] = state_h;
  carried[5] = t11;
  carried[6] = t10;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real carried_0 = carried[0];
  const real carried_3 = carried[3];
  const real carried_4 = carried[4];
  const real carried_6 = carried[6];
  const real t5 = cotangent_h * carried_6;
  const real t6 = cotangent_h * carried_4;
  const real t7 = -t6;
  const real t8 = t5 + t7;
  const real t9 = cotangent_h * carried_3;
  const real t10 = t8 * carried_0;
  grad_gate[0] = t10;
  grad_gate[2] = t9;
  left[0] = t10;
  left[2] = t9;
  operand[2] = t9;
  operand[3] = t10;
}

PARARNN_FUNCTION void backward_4(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real product_3 = product[3];
  const real carried_1 = carried[1];
  const real t2 = product_3 * carried_1;
  grad_gate[1] = t2;
  left[1] = t2;
  operand[4] = t2;
}

PARARNN_FUNCTION void backward_5(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real product_3 = product[3];
  const real product_4 = product[4];
  const real product_5 = product[5];
  const real carried_2 = carried[2];
  const real carried_5 = carried[5];
  const real t6 = cotangent_h * carried_5;
  const real t7 = multiply_add(product_3, carried_2, t6);
  const real t8 = t7 + product_5;
  const real t9 = t8 + product_4;
  grad_state[0] = t9;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 4) backward_4(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 5) backward_5(state, gate, field, param, product, cotangent, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
