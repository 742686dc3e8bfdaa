"""`verify` passes what is right, fails what is wrong, and reads well."""

import pytest
import torch
from table import make_case, needs_compiler
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import pararnn
from pararnn.check import oracle as oracle_module
from pararnn.check.contract import check_solve
from pararnn.engines.fused import matrix
from pararnn.solve import run
from pararnn.solvers import newton as newton_module


class Expands(pararnn.Cell):
    """A matrix cell that enlarges most changes of its state at each step."""

    states = {"S": ("K", "V")}
    gates = {"x": ("K", "V")}

    def step(self, state, gate, param):
        return torch.sin(5 * state.S + gate.x)

    def readout(self, state, gate, param):
        return state.S.mean(-2)


def spoil_gradients(monkeypatch):
    """Have kernels of matrix cells give gradients of gates that are a tenth too large."""
    backward = matrix.MatrixSchedule.backward

    def scaled(*args):
        grads = backward(*args)
        return grads._replace(gates=1.1 * grads.gates)

    monkeypatch.setattr(matrix.MatrixSchedule, "backward", scaled)


def test_a_right_module_passes():
    model = nn.Sequential(
        nn.Linear(3, 4), pararnn.ParaLSTM(4, 6, num_layers=2, solver="newton", backend="torch")
    )
    report = pararnn.verify(model, torch.randn(2, 80, 3))
    assert report
    assert report.passed
    text = str(report)
    assert text.startswith("pararnn.verify: PASS")
    for part in (
        "1.layers.0",
        "1.layers.1",
        "LSTMCell",
        "defect",
        "grad a_f",
        "grad bias",
        "sweeps",
    ):
        assert part in text
    assert "newton on torch" in text
    checks = sum(len(part.checks) for _, _, part in report.layers)
    assert report.short.startswith(f"PASS: {checks} checks; nearest to its limit is ")
    assert " of 1.layers." in report.short
    assert all(p.grad is None for p in model.parameters())


@needs_compiler
def test_auto_reports_what_ran():
    layers = {
        "sequential on fused": pararnn.ParaGRU(3, 4),
        "sequential on torch": pararnn.ParaGRU(3, 4, backend="torch"),
        "newton on torch": pararnn.ParaGRU(3, 4, solver="newton", backend="torch"),
    }
    for ran, layer in layers.items():
        assert ran in str(pararnn.verify(layer, torch.randn(1, 10, 3)))


def test_states_and_fields_are_passed_on():
    layer = pararnn.ParaRNN(pararnn.LRCCell, 3, 4, num_layers=2)
    fields = {"dt": torch.rand(2, 70)}
    reset = torch.rand(2, 70) < 0.1
    report = pararnn.verify(
        layer, torch.randn(2, 70, 3), torch.randn(2, 2, 4), fields=fields, reset=reset
    )
    assert report
    assert "grad dt" in str(report)


class _Decoder(nn.Module):
    """Layers that run one step, and one that is asked for the output's dtype."""

    def __init__(self):
        super().__init__()
        self.one, self.stack = pararnn.RecurrentLayer(pararnn.GRUCell, 3, 4), pararnn.ParaGRU(4, 4)

    def forward(self, x):
        _, state = self.one(x[:, :-1], keep_dtype=True, backend="torch")
        with pararnn.using(backend="torch"):
            return self.stack.step(self.one.step(x[:, -1], state)[0])


def test_steps_and_the_dtype_of_final_states_are_passed_on():
    report = pararnn.verify(_Decoder(), torch.randn(2, 5, 3))
    assert report
    assert [name for name, *_ in report.layers] == ["one", "one", "stack.layers.0"]


def test_nothing_to_verify():
    with pytest.raises(ValueError, match="ran no pararnn layer"):
        pararnn.verify(nn.Linear(3, 3), torch.randn(2, 3))


def test_a_solver_that_stops_early_is_caught(monkeypatch):
    case = make_case(pararnn.GRUCell, torch.float32, 200)
    assert check_solve(case.cell, case.gates, solver="newton", backend="torch").passed
    monkeypatch.setattr(newton_module, "DEFECT_ULPS", 1e5)
    monkeypatch.setattr(newton_module, "FORWARD_TOLERANCE", {torch.float32: 1e3})
    result = check_solve(case.cell, case.gates, solver="newton", backend="torch")
    failures = [check.name for check in result.checks if not check.passed]
    assert "defect in epsilons" in failures
    assert "h" in failures


def test_a_wrong_gradient_is_caught(monkeypatch):
    from pararnn.engines import newton_torch

    case = make_case(pararnn.GRUCell, torch.float32, 100)
    right = newton_torch.adjoint
    monkeypatch.setattr(newton_torch, "adjoint", lambda *a: right(*a) * (1 + 1e-3))
    result = check_solve(case.cell, case.gates, solver="newton", backend="torch")
    failures = [check.name for check in result.checks if not check.passed]
    assert failures == ["grad gates", "grad a_z", "grad a_r", "grad a_c"]


@needs_compiler
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_checked_in_modes_without_them(mode, monkeypatch):
    """Where nothing has a graph, all gradients are zero: ours and the reference's."""
    torch.manual_seed(0)
    with mode():
        x, start = torch.randn(2, 20, 4), torch.randn(1, 2, 2, 2, 2)
        for layer in (pararnn.ParaGRU(4, 4), pararnn.ParaRNN(Expands, 4, 4, num_heads=2)):
            initial = None if isinstance(layer, pararnn.ParaGRU) else start
            assert pararnn.verify(layer, x, initial).passed
    spoil_gradients(monkeypatch)
    with mode():
        report = pararnn.verify(layer, x, start)
    assert [c.name for c in report.layers[0][2].checks if not c.passed] == ["grad gates"]


def test_every_kind_of_sequence_is_checked():
    torch.manual_seed(0)
    both = pararnn.ParaLSTM(4, 6, num_layers=2, bidirectional=True, num_heads=2)
    x = torch.randn(3, 50, 4)
    sequence = pack_sequence([torch.randn(n, 4) for n in (3, 9, 5)], enforce_sorted=False)
    for inputs, options in (
        (x, {"lengths": [50, 3, 20], "padding": "left"}),
        (sequence, {}),
        (x[0], {"cu_seqlens": torch.tensor([0, 4, 9, 9, 30])}),
        (x, {"reset": torch.rand(3, 50) < 0.1, "all_states": True, "mode": "PARALLEL"}),
    ):
        report = pararnn.verify(both, inputs, **options)
        assert report.passed
        assert len(report.layers) == 4


@pytest.mark.parametrize("wrong", [False, True])
def test_final_states_of_chaos_are_those_of_the_states(wrong, monkeypatch):
    case = make_case(pararnn.GRUCell, torch.bfloat16, 300, channels=32)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * 8)

    def solve(*call):
        solution = run(*call)
        return solution._replace(final=tuple(f.flip(1) if wrong else f for f in solution.final))

    monkeypatch.setattr(oracle_module, "run", solve)
    result = check_solve(case.cell, case.gates, solver="sequential")
    limits = {check.name: check for check in result.checks}
    assert "channels not judged: rounding alone moves them" in limits["h"].note
    assert limits["final h"].passed != wrong


def test_the_real_call_is_replayed(monkeypatch):
    """With `output_only` and without initial states, as the layer calls; at the scale of a mean."""
    calls, scales = [], []
    of = oracle_module.Oracle.of_call

    def solve(program, args, *pair):
        calls.append((args.initial, args.options.output_only))
        return run(program, args, *pair)

    def oracle(*args, **options):
        scales.append(options["loss_scale"])
        return of(*args, **options)

    monkeypatch.setattr(oracle_module, "run", solve)
    monkeypatch.setattr(oracle_module.Oracle, "of_call", oracle)
    layer, x = pararnn.ParaLSTM(3, 4), torch.randn(2, 10, 3)
    assert pararnn.verify(layer, x)
    assert pararnn.verify(layer, x, all_states=True)
    assert calls == [((), True), ((), False)]
    assert scales == [1 / 80, 1 / 80]


class Oscillator(pararnn.Cell):
    """Diverges for w > 4."""

    states = ("u", "v")
    gates = ("x",)
    params = {"w": pararnn.Param(std=0.0, mean=1.0)}

    def step(self, state, gate, param):
        v = state.v - param.w * state.u + gate.x
        return state.u + v, v


@pytest.mark.parametrize("wrong", [False, True])
def test_a_recurrence_that_diverges_is_no_failure_of_the_solve(wrong, monkeypatch):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Oscillator, 3, 6)
    with torch.no_grad():
        layer.cell.w[2:4] = 9.0

    def solve(*call):
        solution = run(*call)
        return solution._replace(states=tuple(s * 1.001 for s in solution.states))

    if wrong:
        monkeypatch.setattr(oracle_module, "run", solve)
    report = pararnn.verify(layer, torch.randn(2, 300, 3))
    assert report.passed != wrong
    text = str(report)
    assert "non-finite in 4 channels from step 47, as in the loop" in text
    assert "nan" not in text
    assert "inf" not in text.replace("infin", "").replace("non-finite", "")


@needs_compiler
@pytest.mark.parametrize("wrong", [False, True])
def test_matrix_cells_that_expand_are_judged_by_loops_that_round_otherwise(wrong, monkeypatch):
    """The loop in float64 is the truth itself, and has no error."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Expands, 4, 6, num_heads=2, K=4, dtype=torch.float64)
    x = torch.randn(2, 24, 4, dtype=torch.float64)
    if wrong:
        spoil_gradients(monkeypatch)
    report = pararnn.verify(layer, x)
    assert report.passed != wrong, report


class Spreads(pararnn.Cell):
    """A matrix cell of which a number moves all values: its gradient is a sum that may cancel."""

    states = {"h": "V"}
    gates = {"x": ""}

    def step(self, state, gate, param):
        return 0.5 * state.h + gate.x[..., None]


def test_incoming_gradients_of_matrix_cells_are_in_the_outputs_dtype():
    """The loop obeys the contract that it is the reference of."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Spreads, 4, 256, num_heads=4, dtype=torch.bfloat16)
    x = torch.randn(1000, 2, 4, dtype=torch.bfloat16)
    report = pararnn.verify(layer, x, solver="sequential", backend="torch")
    assert report.passed, report
    assert "(B, T, D) = (1000, 2, 256)" in str(report)
