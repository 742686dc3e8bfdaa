constexpr int num_states = 1, num_gates = 3, num_fields = 0, num_params = 0, num_lefts = 3, num_rights = 2, num_sums = 3;
constexpr int channel_params[] = {-1};
constexpr int gate_of_right[] = {-1, -1};
constexpr int num_read_states = 1, read_states[] = {0};  // by the gradient
constexpr int num_read_gates = 0, read_gates[] = {-1};  // by the gradient

constexpr int forward_stages = 3, forward_carried = 1;
constexpr int forward_first_operand[] = {0, 1, 2, 2};
constexpr int forward_first_product[] = {0, 2, 3, 3};
constexpr Product forward_products[] = {{0, 0, 1}, {0, 1, 1}, {1, 2, 1}};
constexpr int forward_sum_with[] = {0, 1, 2};
constexpr int forward_stage_of_new_state[] = {2};
constexpr int forward_stage_of_sum[] = {1, 1, 2};

PARARNN_FUNCTION void forward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  operand[0] = state_h;
}

PARARNN_FUNCTION void forward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  const real gate_z = gate[0];
  const real gate_r = gate[1];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real t5 = gate_z + product_0;
  const real t6 = gate_r + product_1;
  const real t7 = sigmoid(t6);
  const real t8 = state_h * t7;
  sum[0] = t5;
  sum[1] = t6;
  operand[1] = t8;
  carried[0] = t5;
}

PARARNN_FUNCTION void forward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  const real state_h = state[0];
  const real gate_c = gate[2];
  const real product_2 = product[2];
  const real carried_0 = carried[0];
  const real t4 = sigmoid(carried_0);
  const real t5 = gate_c + product_2;
  const real t6 = tanh(t5);
  const real t7 = constant(1.0) - t4;
  const real t8 = t7 * state_h;
  const real t9 = multiply_add(t4, t6, t8);
  new_state[0] = t9;
  sum[2] = t5;
}

template <int stage>
PARARNN_FUNCTION void forward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, real* carried, real* operand, real* new_state, real* sum) {
  if constexpr (stage == 0) forward_0(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 1) forward_1(state, gate, field, param, product, carried, operand, new_state, sum);
  if constexpr (stage == 2) forward_2(state, gate, field, param, product, carried, operand, new_state, sum);
}

constexpr int backward_stages = 4, backward_carried = 7;
constexpr int backward_first_operand[] = {0, 0, 2, 3, 3};
constexpr int backward_first_product[] = {0, 0, 2, 3, 3};
constexpr Product backward_products[] = {{0, 2, 0}, {1, 0, 0}, {2, 1, 0}};
constexpr int backward_sum_of_product[] = {0, 1, 2};
constexpr int backward_stage_of_state[] = {3};
constexpr int backward_stage_of_gate[] = {1, 2, 1};
constexpr int backward_stage_of_field[] = {-1};
constexpr int backward_stage_of_param[] = {-1};
constexpr int backward_stage_of_left[] = {1, 2, 1};
constexpr int backward_stage_of_right[] = {0, 0};

PARARNN_FUNCTION void backward_0(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real state_h = state[0];
  const real sum_0 = sum[0];
  const real sum_1 = sum[1];
  const real sum_2 = sum[2];
  const real t4 = sigmoid(sum_0);
  const real t5 = sigmoid(sum_1);
  const real t6 = state_h * t5;
  const real t7 = tanh(sum_2);
  const real t8 = constant(1.0) - t4;
  const real t9 = t7 * t7;
  const real t10 = constant(1.0) - t9;
  const real t11 = t4 * t10;
  const real t12 = constant(1.0) - t5;
  const real t13 = t5 * t12;
  const real t14 = state_h * t13;
  const real t15 = t4 * t8;
  right[0] = state_h;
  right[1] = t6;
  carried[0] = t15;
  carried[1] = t14;
  carried[2] = t5;
  carried[3] = t11;
  carried[4] = state_h;
  carried[5] = t8;
  carried[6] = t7;
}

PARARNN_FUNCTION void backward_1(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
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
  operand[0] = t9;
  operand[1] = t10;
}

PARARNN_FUNCTION void backward_2(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real product_0 = product[0];
  const real carried_1 = carried[1];
  const real t2 = product_0 * carried_1;
  grad_gate[1] = t2;
  left[1] = t2;
  operand[2] = t2;
}

PARARNN_FUNCTION void backward_3(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  const real cotangent_h = cotangent[0];
  const real product_0 = product[0];
  const real product_1 = product[1];
  const real product_2 = product[2];
  const real carried_2 = carried[2];
  const real carried_5 = carried[5];
  const real t6 = cotangent_h * carried_5;
  const real t7 = multiply_add(product_0, carried_2, t6);
  const real t8 = t7 + product_2;
  const real t9 = t8 + product_1;
  grad_state[0] = t9;
}

template <int stage>
PARARNN_FUNCTION void backward_stage(const real* state, const real* gate, const real* field, const real* param, const real* product, const real* cotangent, const real* sum, real* carried, real* operand, real* grad_state, real* grad_gate, real* grad_field, real* grad_param, real* left, real* right) {
  if constexpr (stage == 0) backward_0(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 1) backward_1(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 2) backward_2(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
  if constexpr (stage == 3) backward_3(state, gate, field, param, product, cotangent, sum, carried, operand, grad_state, grad_gate, grad_field, grad_param, left, right);
}
