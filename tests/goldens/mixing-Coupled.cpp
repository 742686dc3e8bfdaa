constexpr int num_states = 2, num_gates = 2, num_fields = 1, num_params = 1, num_lefts = 2, num_rights = 2;
constexpr int channel_params[] = {2};

constexpr int forward_stages = 3, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 2, 2};
constexpr int forward_first_product[] = {0, 1, 2, 2};
constexpr Product forward_products[] = {{0, 0, 0}, {1, 1, 1}};
constexpr int forward_stage_of_new_state[] = {1, 2};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_b = state[1];
  operand[0] = state_b;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_a = state[0];
  const real gate_x = gate[0];
  const real field_dt = field[0];
  const real param_leak = param[0];
  const real product_0 = product[0];
  const real t5 = gate_x + product_0;
  const real t6 = param_leak * state_a;
  const real t7 = t5 - t6;
  const real t8 = tanh(t7);
  const real t9 = relu(field_dt);
  const real t10 = t8 * t9;
  new_state[0] = t8;
  operand[1] = t10;
}

PARARNN_FUNCTION void forward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  const real state_b = state[1];
  const real gate_y = gate[1];
  const real product_1 = product[1];
  const real t3 = gate_y + product_1;
  const real t4 = tanh(t3);
  const real t5 = state_b * constant(0.5);
  const real t6 = t4 + t5;
  new_state[1] = t6;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state);
  if constexpr (stage == 2) forward_2(state, gate, field, param, product, carried, operand, new_state);
}

constexpr int backward_stages = 6, backward_carried = 7;
constexpr int backward_first_operand[] = {0, 1, 2, 2, 3, 4, 4};
constexpr int backward_first_product[] = {0, 1, 2, 2, 3, 4, 4};
constexpr Product backward_products[] = {{0, 0, 0}, {1, 1, 1}, {2, 1, 0}, {3, 0, 1}};
constexpr int backward_recomputed = 2, backward_saved = 6;
constexpr int backward_sum_of_product[] = {0, 1, 2, 3};
constexpr int backward_stage_of_state[] = {4, 5};
constexpr int backward_stage_of_gate[] = {4, 3};
constexpr int backward_stage_of_field[] = {4};
constexpr int backward_stage_of_param[] = {4};
constexpr int backward_stage_of_left[] = {2, 3};
constexpr int backward_stage_of_right[] = {4, 2};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_b = state[1];
  operand[0] = state_b;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_a = state[0];
  const real gate_x = gate[0];
  const real field_dt = field[0];
  const real param_leak = param[0];
  const real product_0 = product[0];
  const real t5 = gate_x + product_0;
  const real t6 = param_leak * state_a;
  const real t7 = t5 - t6;
  const real t8 = tanh(t7);
  const real t9 = relu(field_dt);
  const real t10 = t8 * t9;
  operand[1] = t10;
  carried[2] = t8;
  carried[4] = t9;
  carried[6] = t10;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_a = state[0];
  const real state_b = state[1];
  const real gate_y = gate[1];
  const real product_1 = product[1];
  const real carried_2 = carried[2];
  const real carried_4 = carried[4];
  const real carried_6 = carried[6];
  const real t7 = gate_y + product_1;
  const real t8 = tanh(t7);
  const real t9 = t8 * t8;
  const real t10 = constant(1.0) - t9;
  const mask t11 = carried_4 <= constant(0.0);
  const real t12 = carried_2 * carried_2;
  const real t13 = constant(1.0) - t12;
  left[0] = state_b;
  right[1] = carried_6;
  carried[0] = state_a;
  carried[1] = t13;
  carried[3] = number(t11);
  carried[5] = t10;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_b = cotangent[1];
  const real carried_5 = carried[5];
  const real t2 = cotangent_b * carried_5;
  grad_gate[1] = t2;
  left[1] = t2;
  operand[2] = t2;
}

PARARNN_FUNCTION void backward_4(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real param_leak = param[0];
  const real cotangent_a = cotangent[0];
  const real product_2 = product[2];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real carried_2 = carried[2];
  const real carried_3 = carried[3];
  const real carried_4 = carried[4];
  const real t8 = product_2 * carried_2;
  const real t9 = product_2 * carried_4;
  const real t10 = cotangent_a + t9;
  const real t11 = select(truth(carried_3), constant(0.0), t8);
  const real t12 = t10 * carried_1;
  const real t13 = -t12;
  const real t14 = t13 * param_leak;
  const real t15 = t13 * carried_0;
  grad_state[0] = t14;
  grad_gate[0] = t12;
  grad_field[0] = t11;
  grad_param[0] = t15;
  right[0] = t12;
  operand[3] = t12;
}

PARARNN_FUNCTION void backward_5(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_b = cotangent[1];
  const real product_3 = product[3];
  const real t2 = cotangent_b * constant(0.5);
  const real t3 = t2 + product_3;
  grad_state[1] = t3;
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
