"""Kernels of matrix cells: the numerics contract against plain loops, and what they take."""

import math

import emulated
import pytest
import test_matrix
import torch
from call_results import as_tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_cells import LOOPS, loop, make_call
from table import needs_compiler
from test_matrix import _close, _compare, _layer

import pararnn
import pararnn.zoo as zoo
from pararnn import Param
from pararnn.check import matrix as check_matrix
from pararnn.engines.fused import matrix
from pararnn.program.program import program_of
from pararnn.solve import one_gate, prepare

pytestmark = needs_compiler
NAMES = list(LOOPS)
FUSED = {"solver": "sequential", "backend": "fused"}
TORCH = {"solver": "sequential", "backend": "torch"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.one_in(13)
def test_kernels_are_the_loop(name, dtype):
    """Over two chunks of steps and a part of one, from the last step on, with resets."""
    call = make_call(name, 3, 70, dtype=dtype)
    _compare(name, call, dtype, torch.rand(3, 70) < 0.05, reverse=True, **FUSED)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(
    rows=st.integers(1, 3),
    steps=st.sampled_from([0, 1, 2, 15, 16, 33]),
    reverse=st.booleans(),
    resets=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.one_in(5)
def test_any_rows_and_steps(name, rows, steps, reverse, resets, seed):
    call = make_call(name, rows, steps, seed=seed)
    reset = torch.rand(rows, steps) < 0.3 if resets else None
    _compare(name, call, reset=reset, reverse=reverse, **FUSED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "keys", "values"), [(1, 33, 17), (3, 2, 16), (2, 8, 8)])
@pytest.mark.one_in(11)
def test_axes_fill_vectors_or_do_not(name, heads, keys, values):
    call = make_call(name, 2, 5, heads, keys, values, dtype=torch.float32)
    _compare(name, call, torch.float32, **FUSED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shift", [-8.0, 8.0])
@pytest.mark.one_in(11)
def test_gates_that_keep_all_or_nothing(name, shift):
    """Gates far from zero, in float32 against the float64 loop: nothing is lost or overflows."""
    call = make_call(name, 2, 40, dtype=torch.float32)
    with torch.no_grad():
        at = 0
        for key, size in zip(type(call.cell).gates, call.cell.head_sizes.gates, strict=True):
            count = int(torch.tensor(size).prod()) if size else 1
            if key in "fabw" and key != "b":
                call.gates[..., at : at + count] += shift
            at += count
    _compare(name, call, torch.float32, **FUSED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(5)
def test_the_unit_of_a_loss_changes_no_digit(name):
    call = make_call(name, 2, 40, dtype=torch.float32)
    grads = []
    for scale in (1.0, 2.0**-30):
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **FUSED)
        loss = output.sum() + sum(h.sum() for h in as_tuple(final))
        own = torch.autograd.grad(loss * scale, call.leaves())
        assert all(grad.is_contiguous() for grad in own)  # as compiled code expects them
        grads.append([g / scale for g in own])
    assert all(map(torch.equal, *grads))


def test_final_entries_are_judged_by_their_head():
    """One that is about to change its sign has no size of its own; a wrong one is still seen."""
    cell = zoo.M2RNNCell(6, num_heads=2, K=4)
    exact = {"final H": torch.ones(3, 2, 4, 3, dtype=torch.float64)}
    exact["final H"][1, 0, 2, 1] = 1e-9
    for error, passes in ((1e-6, True), (1e-3, False)):
        ours = {"final H": exact["final H"] + error}
        loops = [exact] * (1 + check_matrix.ROUNDINGS)
        near = {"final H": torch.inf}
        (check,) = check_matrix._compare(cell, ours, exact, loops, torch.float32, {}, near)
        assert check.passed is passes, check


@pytest.mark.parametrize("where", ["a later value", "another row", "before a reset", "before it"])
@pytest.mark.parametrize("result", ["outputs", "gradients"])
def test_no_other_value_excuses_an_error(result, where, monkeypatch):
    """Outputs are of size 1 but for peaks, and an error of 0.1 stands where none of them is so far;
    the last case is what the contract allows."""
    torch.manual_seed(0)
    cell = zoo.GatedDeltaCell(6, num_heads=2, K=4)
    gates = torch.randn(2, 40, 2, cell.head_sizes.width)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[:, 20] = where == "before a reset"
    peaks = {"a later value": [(0, 35)], "another row": [(1, 2), (0, 35)], "before it": [(0, 5)]}
    step = 10 if where != "before a reset" else 25
    peaks["before a reset"] = [(0, 15)]
    results = check_matrix._results

    def with_peaks(trial, pair):
        values, *others = results(trial, pair)
        name = "readout" if result == "outputs" else "grad gates"
        value = values[name] = values[name].clone()
        in_order = value if result == "outputs" else value.flip(1)
        for row, at in peaks[where]:
            in_order[row, at] = 1e6
        if pair == ("sequential", "fused"):
            in_order[0, step] += 0.1 * in_order[0, step].abs().max()
        value.copy_(in_order if result == "outputs" else in_order.flip(1))
        return values, *others

    monkeypatch.setattr(check_matrix, "_results", with_peaks)
    call = prepare(cell, one_gate(cell, gates), reset=reset)
    checks = check_matrix.check_matrix(cell, call, ("sequential", "fused"), 0, 1.0)
    assert checks.passed is (where == "before it"), checks


class Growing(pararnn.Cell):
    """A sum of outer products that grows by a gate."""

    states, config = {"S": ("K", "V")}, {"K": 3}
    gates = {"k": ("K",), "v": ("V",), "q": ("K",), "a": ()}

    def step(self, state, gate, param):
        growth = torch.exp(gate.a)[..., None, None]
        return growth * state.S + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state, gate, param):
        return (gate.q[..., None, :] @ state.S)[..., 0, :]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["readout", "grad gates", "final S"])
@pytest.mark.parametrize("row", [0, 1])
def test_either_may_overflow_near_the_largest_number(row, name, dtype, monkeypatch):
    """Rounding decides where; entries of another size, as those of row 0, may not."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    cell = Growing(4, num_heads=2, dtype=wide)
    gates = torch.randn(2, 55, 2, cell.head_sizes.width, dtype=torch.float64)
    gates[0, ..., -1] = -1
    largest = torch.finfo(wide if "final" in name else dtype).max
    gates[1, ..., -1] = math.log(largest / 50) / 54
    call = prepare(cell, one_gate(cell, gates.to(dtype)))
    results = check_matrix._results

    def with_infinity(trial, pair):
        values, *others = results(trial, pair)
        if pair == ("sequential", "fused"):
            value = values[name] = values[name].clone()
            value[row].view(-1)[check_matrix.finite(value[row]).abs().argmax()] = torch.inf
        return values, *others

    monkeypatch.setattr(check_matrix, "_results", with_infinity)
    checks = check_matrix.check_matrix(cell, call, ("sequential", "fused"), 0, 1.0)
    assert checks.passed is (row == 1), checks


@pytest.mark.parametrize("name", ["m2rnn", "mlstm"])
def test_some_gradients_are_wanted(name):
    call = test_matrix.check_some_gradients(name)
    with torch.no_grad():
        _close([pararnn.solve(call.cell, call.gates, **FUSED)[0]],
               [pararnn.solve(call.cell, call.gates, **TORCH)[0]])  # fmt: skip


@pytest.mark.parametrize("name", ["m2rnn", "mlstm"])
def test_layers_run_kernels_on_packed_rows(name):
    layer = _layer(name)
    test_matrix.check_packed_rows(layer, [0, 3, 3, 40, 45], recompute=(False, True))
    assert layer.layers[0].choice.pair == ("sequential", "torch")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["m2rnn", "mlstm"])
@pytest.mark.one_in(5)
def test_verify_checks_a_layer(name, dtype, monkeypatch):
    """By kernels, with lengths; and it sees gradients that are wrong."""
    layer = _layer(name, backend="auto").to(dtype)
    x = torch.randn(3, 40, 6, dtype=dtype)
    report = pararnn.verify(layer, x, lengths=[40, 0, 33])
    assert report.passed, report
    assert {"readout", "final " + next(iter(layer.cell.states)), "grad gates", "grad bias"} <= {
        check.name for check in report.layers[0][2].checks
    }
    backward = matrix.MatrixSchedule.backward

    def wrong(*args):
        grads = backward(*args)
        return grads._replace(gates=1.1 * grads.gates)

    monkeypatch.setattr(matrix.MatrixSchedule, "backward", wrong)
    assert not pararnn.verify(layer, x)


def test_threads_change_no_bit():
    call = make_call("m2rnn", 5, 300, dtype=torch.float32, keys=16, values=16)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        output, _ = pararnn.solve(call.cell, call.gates, **FUSED)
        results.append([output, *torch.autograd.grad(output.sum(), call.leaves()[::2])])
    assert all(map(torch.equal, *results))


def test_auto_takes_the_kernels_and_explains():
    layer = _layer(backend="auto")
    text = str(pararnn.explain(layer, (2, 5, 6)))
    assert "(sequential, fused) runs: a compiled loop beats every solver in PyTorch" in text
    layer(torch.randn(2, 5, 6, dtype=torch.float64))
    assert layer.layers[0].choice.pair == ("sequential", "fused")


def test_compilers_see_one_operator():
    layer, x = _layer(backend="auto"), torch.randn(2, 40, 6, dtype=torch.float64)
    by_compiler = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, by_compiler):
        layer.zero_grad()
        output, h_n = run(x)
        (output.square().sum() + h_n.sum()).backward()
        results.append([output, h_n, *(p.grad for p in layer.parameters())])
    _close(*results)


def test_transforms():
    call = make_call("m2rnn", 2, 3)
    gates = torch.randn(4, *call.gates.shape, dtype=torch.float64)
    many = torch.func.vmap(lambda g: pararnn.solve(call.cell, g, **FUSED)[0])(gates)
    torch.testing.assert_close(many[2], pararnn.solve(call.cell, gates[2], **FUSED)[0])
    seconds = []
    for pair in (FUSED, {"solver": "sequential", "backend": "torch"}):
        output, _ = pararnn.solve(call.cell, call.gates, **pair)
        (grad,) = torch.autograd.grad(output.sum(), call.gates, create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), call.gates)
    torch.testing.assert_close(*seconds)


class Mixed(pararnn.Cell):
    """Products along both axes, transposed and not, a parameter of matrix entries, a number of all
    heads, a vector state that is multiplied, masks, max, min and mean."""

    states = {"h": "V", "S": ("K", "V"), "c": ""}
    gates = {"x": "V", "k": "K", "G": ("K", "V"), "f": ""}
    params = {
        "W": Param("H,V,V"),
        "U": Param("H,K,K"),
        "A": Param("H,K,V", std=0.5),
        "b": Param("", std=0.5),
        "d": Param("H,K", std=0.5),
        "e": Param("H", std=0.5),
    }

    def step(self, state, gate, param):
        S = torch.tanh(state.S @ param.W + param.U @ state.S + param.A * gate.G)
        row = torch.where(gate.k > param.d, gate.k, 0.3 * gate.k * param.d)
        S = S + row[..., :, None] * state.h[..., None, :] / self.K
        h = torch.tanh(gate.x + (state.h[..., None, :] @ param.W.mT).squeeze(-2) + S.mean(-2))
        c = torch.sigmoid(gate.f + param.b) * state.c + param.e * S.amax((-2, -1))
        return h - S.amin(-2), S, c

    def readout(self, state, gate, param):
        weights = torch.softmax((state.S * gate.x[..., None, :]).sum(-1), -1)
        return state.c[..., None] + (weights[..., None, :] @ state.S).squeeze(-2)


class Rows(pararnn.Cell):
    """Values before keys in memory, and a third axis."""

    states = {"S": ("V", "K"), "P": ("U", "K")}
    gates = {"v": "V", "k": "K", "u": "U"}

    def step(self, state, gate, param):
        S = 0.9 * state.S + gate.v[..., :, None] * gate.k[..., None, :]
        return S, torch.tanh(state.P + gate.u[..., :, None] * (S.sum(-2) - gate.k)[..., None, :])

    def readout(self, state, gate, param):
        joint = state.S[..., :, None, :] * state.P[..., None, :, :]
        return (joint * gate.u[..., None, :, None]).sum((-2, -1))


class Twice(pararnn.Cell):
    """The same product twice, so both terms of the matrix's gradient are the same outer product."""

    states, gates, params = {"h": "V"}, {"x": "V"}, {"R": Param("H,V,V")}

    def step(self, state, gate, param):
        first, second = ((state.h[..., None, :] @ param.R).squeeze(-2) for _ in range(2))
        return torch.tanh(gate.x + first + second)


@pytest.mark.parametrize(
    ("cls", "lengths"),
    [(Mixed, {"K": 4}), (Mixed, {"K": 20}), (Rows, {"K": 9, "U": 4}), (Twice, {})],
)
@pytest.mark.one_in(3)
def test_steps_of_many_operations(cls, lengths):
    """Kernels against the loop in PyTorch, which the other module holds against plain loops."""
    assert program_of(cls(10, num_heads=2, **lengths)).why_no_family is None
    test_matrix.check_kernels(cls, 5, lengths)


def _cumulate(self, state, gate, param):
    return torch.cumsum(state.H, -1) + gate.k[..., :, None] * gate.v[..., None, :]


def _flatten(self, state, gate, param):
    return (state.H.flatten(-2) + state.H.mT.flatten(-2)).unflatten(-1, (self.K, -1))


def _square_sum(self, state, gate, param):
    left, right = state.H.flatten(-2)[..., None, :], state.H.mT.flatten(-2)[..., :, None]
    return torch.tanh(state.H + left @ right)


def _scale(self, state, gate, param):
    return state.H @ (2 * param.W)


def _diagonal(self, state, gate, param):
    return state.H + torch.diagonal(param.W, dim1=-2, dim2=-1)[..., None, :]


UNABLE = {
    "cumsum": _cumulate,
    "joins or splits": _flatten,
    "two orders": _square_sum,
    "mul": _scale,
    "diagonal": _diagonal,
}


@pytest.mark.parametrize("operation", UNABLE)
def test_what_cannot_be_generated_runs_in_pytorch(operation):
    """By name, in a request's error and in what explain says."""
    body = {"step": UNABLE[operation], "params": {"W": Param("H,V,V")}}
    cls = type("Unable", (zoo.M2RNNCell,), body)
    torch.manual_seed(0)
    with pytest.warns(pararnn.CellCostWarning, match="Unable runs in PyTorch"):
        layer = pararnn.ParaRNN(cls, 6, 6, num_heads=2, K=3)
    x = torch.randn(2, 3, 6)
    layer(x)
    assert layer.layers[0].choice.pair == ("sequential", "torch")
    assert operation in str(pararnn.explain(layer, x.shape))
    with pytest.raises(pararnn.EngineError, match=operation):
        layer(x, backend="fused")


def _other_wiring(self, state, gate, param):
    k = gate.q - gate.k if self.K > 8 else gate.k - gate.q
    return state.H + k[..., :, None] * gate.v[..., None, :]


def _other_axis(self, state, gate, param):
    sums = state.H.sum(-1 if self.K > 8 else -2, keepdim=True)
    return 0.1 * sums + gate.k[..., :, None] * gate.v[..., None, :]


def _other_maximum(self, state, gate, param):
    largest = state.H.amax((-1,) if self.K > 8 else (-2,), keepdim=True)
    return 0.1 * largest + gate.k[..., :, None] * gate.v[..., None, :]


def _other_softmax(self, state, gate, param):
    weights = torch.softmax(state.H, -1 if self.K > 8 else -2)
    return weights + gate.k[..., :, None] * gate.v[..., None, :]


def _other_branch(self, state, gate, param):
    new = gate.k[..., :, None] * gate.v[..., None, :]
    pair = (new, state.H) if self.K > 8 else (state.H, new)
    return torch.where(new > 0, *pair)


OTHERS = (_other_wiring, _other_axis, _other_maximum, _other_softmax, _other_branch)


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_a_step_that_branches_on_a_length_runs_as_it_is(step):
    cls = type("Branching", (zoo.M2RNNCell,), {"step": step})
    torch.manual_seed(0)
    cell = cls(2 * 16, num_heads=2, K=12)
    with pytest.warns(pararnn.CellCostWarning, match="cannot take it.*lengths"):
        program = program_of(cell)
    assert "lengths" in program.why_no_family
    gates = torch.randn(2, 5, 2, cell.head_sizes.width)
    output, _ = pararnn.solve(cell, gates)
    reference, _ = pararnn.solve(cell, gates, solver="sequential", backend="torch")
    assert torch.equal(output, reference)


def test_a_parameter_with_one_axis_twice_and_another_runs_in_pytorch():
    body = {
        "step": lambda self, state, gate, param: (
            torch.tanh((state.H[..., None, :] @ param.W.mT).squeeze(-2))
            + gate.k[..., :, None] * gate.v[..., None, :]
        ),
        "params": {"W": Param("H,K,V,V")},
    }
    cell = type("ThreeAxes", (zoo.M2RNNCell,), body)(6, num_heads=2, K=4)
    with pytest.warns(pararnn.CellCostWarning, match="one axis twice"):
        program = program_of(cell)
    assert "one axis twice" in program.why_no_family
    output, _ = pararnn.solve(cell, torch.randn(2, 3, 2, cell.head_sizes.width))
    assert output.isfinite().all()


def test_non_finite_numbers_stay_in_their_row_and_head():
    call = make_call("m2rnn", 3, 6, dtype=torch.float32)
    gates = call.gates.detach().clone()
    gates[1, 2, 0, 0] = torch.nan
    output, _ = pararnn.solve(call.cell, gates, call.initial, **FUSED)
    bad = output.isnan().any(-1)
    assert bad[1, 2:, 0].all()
    assert bad.sum() == 4
    _, final = loop("m2rnn", call)
    assert final[0].isfinite().all()


MUTANTS = {
    "no reset": ("if (p.is_reset(row, l)) return std::fill", "if (false) return std::fill"),
    "an adjoint through a reset": ("if (p.is_reset(row, l)) std::fill", "if (false) std::fill"),
    "a state before the wrong step": ("l % checkpoint == 0", "l % checkpoint == 1"),
    "a final gradient too few": ("p.sequence(row, l + 1) != number)", "false)"),
    "a sum of padded lanes": ("v + lanes <= size) return x;", "true) return x;"),
    "an outer product of rows": (
        "load_as(right + i * right_stride + v * lanes)",
        "load_as(right + v * lanes)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_a_wrong_kernel_is_seen(name, tmp_path):
    """The agreement that the tests above rest on fails for a kernel that is wrong."""
    # Values that fill no vector, and gates of which lanes beyond them are no zeros.
    cell = "hopfield" if "lanes" in name else "m2rnn"
    call = make_call(cell, 2, 40, dtype=torch.float32)
    wrong = emulated.wrong_headers(tmp_path, "cpp/matrix", *MUTANTS[name])
    with emulated.compiled_from(wrong), pytest.raises(AssertionError):
        _compare(cell, call, torch.float32, torch.rand(2, 40) < 0.1, **FUSED)
