constexpr int num_states = 2, num_gates = 2, num_fields = 1, num_params = 1, num_lefts = 2, num_rights = 2, num_sums = 2;
constexpr int channel_params[] = {2};
constexpr int gate_of_right[] = {0, -1};
constexpr int num_read_states = 2, read_states[] = {0, 1};  // by the gradient
constexpr int num_read_gates = 0, read_gates[] = {-1};  // by the gradient

constexpr int forward_stages = 3, forward_carried = 0;
constexpr int forward_first_operand[] = {0, 1, 2, 2};
constexpr int forward_first_product[] = {0, 1, 2, 2};
constexpr Product forward_products[] = {{0, 0, 0}, {1, 1, 1}};
constexpr int forward_sum_with[] = {0, 1};
constexpr int forward_stage_of_new_state[] = {1, 2};
constexpr int forward_stage_of_sum[] = {1, 2};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_b = state[1];
  operand[0] = state_b;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
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
  sum[0] = t5;
  operand[1] = t10;
}

PARARNN_FUNCTION void forward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_b = state[1];
  const real gate_y = gate[1];
  const real product_1 = product[1];
  const real t3 = gate_y + product_1;
  const real t4 = tanh(t3);
  const real t5 = state_b * constant(0.5);
  const real t6 = t4 + t5;
  new_state[1] = t6;
  sum[1] = t3;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 2) forward_2(state, gate, field, param, product, carried, operand, new_state, sum);
}

constexpr int backward_stages = 4, backward_carried = 6;
constexpr int backward_first_operand[] = {0, 0, 1, 2, 2};
constexpr int backward_first_product[] = {0, 0, 1, 2, 2};
constexpr Product backward_products[] = {{0, 1, 0}, {1, 0, 1}};
constexpr int backward_sum_of_product[] = {0, 1};
constexpr int backward_stage_of_state[] = {2, 3};
constexpr int backward_stage_of_gate[] = {2, 1};
constexpr int backward_stage_of_field[] = {2};
constexpr int backward_stage_of_param[] = {2};
constexpr int backward_stage_of_left[] = {0, 1};
constexpr int backward_stage_of_right[] = {2, 0};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_a = state[0];
  const real state_b = state[1];
  const real field_dt = field[0];
  const real param_leak = param[0];
  const real sum_0 = sum[0];
  const real sum_1 = sum[1];
  const real t6 = param_leak * state_a;
  const real t7 = sum_0 - t6;
  const real t8 = tanh(t7);
  const real t9 = relu(field_dt);
  const real t10 = t8 * t9;
  const real t11 = tanh(sum_1);
  const real t12 = t11 * t11;
  const real t13 = constant(1.0) - t12;
  const mask t14 = t9 <= constant(0.0);
  const real t15 = t8 * t8;
  const real t16 = constant(1.0) - t15;
  left[0] = state_b;
  right[1] = t10;
  carried[0] = state_a;
  carried[1] = t16;
  carried[2] = number(t14);
  carried[3] = t9;
  carried[4] = t8;
  carried[5] = t13;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_b = cotangent[1];
  const real carried_5 = carried[5];
  const real t2 = cotangent_b * carried_5;
  grad_gate[1] = t2;
  left[1] = t2;
  operand[0] = t2;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real param_leak = param[0];
  const real cotangent_a = cotangent[0];
  const real product_0 = product[0];
  const real carried_0 = carried[0];
  const real carried_1 = carried[1];
  const real carried_2 = carried[2];
  const real carried_3 = carried[3];
  const real carried_4 = carried[4];
  const real t8 = product_0 * carried_4;
  const real t9 = product_0 * carried_3;
  const real t10 = cotangent_a + t9;
  const real t11 = select(truth(carried_2), constant(0.0), t8);
  const real t12 = t10 * carried_1;
  const real t13 = -t12;
  const real t14 = t13 * param_leak;
  const real t15 = t13 * carried_0;
  grad_state[0] = t14;
  grad_gate[0] = t12;
  grad_field[0] = t11;
  grad_param[0] = t15;
  right[0] = t12;
  operand[1] = t12;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_b = cotangent[1];
  const real product_1 = product[1];
  const real t2 = cotangent_b * constant(0.5);
  const real t3 = t2 + product_1;
  grad_state[1] = t3;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
