constexpr int num_states = 1, num_gates = 1, num_fields = 0, num_params = 1;

PARARNN_FUNCTION void step(const real* state, const real* gate, const real* field, const real* param, real* new_state) {
  const real state_h = state[0];
  const real gate_h_in = gate[0];
  const real param_a_h = param[0];
  const real t3 = param_a_h * state_h;
  const real t4 = gate_h_in + t3;
  const real t5 = tanh(t4);
  new_state[0] = t5;
}

PARARNN_FUNCTION void jacobian(const real* state, const real* gate, const real* field, const real* param, real* new_state, real* jacobian) {
  const real state_h = state[0];
  const real gate_h_in = gate[0];
  const real param_a_h = param[0];
  const real t3 = param_a_h * state_h;
  const real t4 = gate_h_in + t3;
  const real t5 = tanh(t4);
  const real t6 = t5 * t5;
  const real t7 = constant(1.0) - t6;
  const real t8 = t7 * param_a_h;
  new_state[0] = t5;
  jacobian[0] = t8;
}

PARARNN_FUNCTION void vjp(const real* state, const real* gate, const real* field, const real* param, const real* cotangent, real* grad_state, real* grad_gate, real* grad_field, real* grad_param) {
  const real state_h = state[0];
  const real gate_h_in = gate[0];
  const real param_a_h = param[0];
  const real cotangent_h = cotangent[0];
  const real t4 = param_a_h * state_h;
  const real t5 = gate_h_in + t4;
  const real t6 = tanh(t5);
  const real t7 = t6 * t6;
  const real t8 = constant(1.0) - t7;
  const real t9 = cotangent_h * t8;
  const real t10 = t9 * param_a_h;
  const real t11 = t9 * state_h;
  grad_state[0] = t10;
  grad_gate[0] = t9;
  grad_param[0] = t11;
}
