"""Segments of time of matrix cells whose entries do not meet, against loops."""

import warnings

import emulated
import pytest
import torch
from call_results import as_tuple, with_gradients
from matrix_cells import Call, make_call
from table import needs_compiler
from test_matrix import _close, _compare

import pararnn
from pararnn import Param
from pararnn.base.errors import EngineError
from pararnn.base.numerics import DEFECT_ULPS
from pararnn.engines import shooting
from pararnn.engines.fused import segments
from pararnn.program.entries import Entries, entries_of, why_entries_couple
from pararnn.solve import one_gate, prepare, run
from pararnn.solvers import entry_newton
from pararnn.solvers.entry_maps import compose, pull_back
from pararnn.zoo import M2RNNCell, MLSTMCell

SEGMENTS = {"solver": "newton", "backend": "fused"}
LOOP = {"solver": "sequential", "backend": "fused"}
AT_ONCE = {"solver": "newton", "backend": "torch"}
BY_SCANS = {"solver": "newton", "backend": "scan"}
STEPS = {"solver": "sequential", "backend": "torch"}


class Entrywise(pararnn.Cell):
    """A gated memory, each entry of which is nonlinear in itself."""

    states = {"H": ("K", "V")}
    gates = {"k": "K", "q": "K", "v": "V", "f": ""}
    params = {"a": Param("H,K,V")}

    def step(self, state, gate, param):
        new = torch.tanh(param.a * state.H + gate.k[..., :, None] * gate.v[..., None, :])
        f = torch.sigmoid(gate.f)[..., None, None]
        return f * state.H + (1 - f) * new

    def readout(self, state, gate, param):
        return (gate.q[..., None, :] @ state.H).squeeze(-2)


class Pair(pararnn.Cell):
    """Two states, each of which reads the other."""

    states = {"a": ("K", "V"), "b": ("K", "V")}
    gates = {"k": "K", "v": "V"}

    def step(self, state, gate, param):
        x = gate.k[..., :, None] * gate.v[..., None, :]
        return torch.tanh(state.b + x), 0.5 * state.a + x

    def readout(self, state, gate, param):
        return state.a.sum(-2)


def _call(steps, dtype=torch.float32, f=0.0, rows=2):
    """A call; f: added to the gate that keeps."""
    torch.manual_seed(0)
    cell = Entrywise(6, num_heads=2, K=4, dtype=dtype)
    gates = torch.randn(rows, steps, 2, cell.head_sizes.width, dtype=dtype)
    gates[..., -1] += f
    initial = torch.randn(rows, 2, 4, 3, dtype=dtype)
    return Call(cell, gates.requires_grad_(), (initial.requires_grad_(),))


def _results(call, pair, count, **options):
    with pararnn.using(segments=count):
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **options, **pair)
    return with_gradients((output, final), call.leaves())


def _both(call, count, dtype, **options):
    pairs = ((SEGMENTS, count), (LOOP, None))
    _close(*[_results(call, *pair, **options) for pair in pairs], dtype)


def _sweeps(call, count):
    """Sweeps, and rows that the loop ran."""
    with pararnn.using(segments=count):
        args = prepare(call.cell, one_gate(call.cell, call.gates.detach()), call.initial)
        return run(pararnn.program_of(call.cell), args, "newton", "fused").info[0].tolist()


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.one_in(4)
def test_states_that_depend_on_others_of_fewer_axes(reverse, resets):
    """Four segments of 32 steps, and 5 that are left."""
    call = make_call("mlstm", 2, 133)
    reset = torch.rand(2, 133) < 0.02 if resets else None
    with pararnn.using(segments=5):
        _compare("mlstm", call, reset=reset, reverse=reverse, **SEGMENTS)


@needs_compiler
@pytest.mark.parametrize("f", [0.0, 8.0])
def test_entries_that_forget_or_do_not(f):
    call = _call(320, f=f)
    _both(call, 5, torch.float32)
    sweeps, loops = _sweeps(call, 5)
    assert 1 <= sweeps <= 3
    assert loops == 0


@needs_compiler
def test_segments_that_never_agree_run_by_the_loop(monkeypatch):
    """Also for NaN, which is where the loop has it."""
    call = _call(160, f=8.0)
    with monkeypatch.context() as patch:
        patch.setattr(shooting, "MAX_SWEEPS", 1)
        assert _sweeps(call, 5) == [1, 2]
        _both(call, 5, torch.float32)
    with torch.no_grad():
        call = _call(160)
        call.gates[1, 70, 0, 3] = torch.nan
    ours, reference = (_results(call, pair, 5)[0] for pair in (SEGMENTS, LOOP))
    torch.testing.assert_close(ours, reference, equal_nan=True)


class Square(pararnn.Cell):
    """Entries that overflow once they exceed 1, and of which a guess of zero stays there."""

    states = {"S": ("K", "V")}
    gates = {"x": ("K", "V")}

    def step(self, state, gate, param):
        return state.S * state.S + gate.x

    def readout(self, state, gate, param):
        return state.S.sum(-2)


@needs_compiler
def test_an_infinite_end_is_no_finite_begin():
    """The third of four segments overflows, and derivatives of its guess say nothing of that."""
    cell = Square(8, num_heads=2, K=3)
    gates = torch.zeros(1, 256, 2, cell.head_sizes.width)
    gates[:, 124] = 1.05
    outputs = []
    for pair in (SEGMENTS, LOOP):
        with pararnn.using(segments=4):
            outputs.append(pararnn.solve(cell, gates, **pair)[0])
    assert outputs[1][:, 192:].isinf().all()
    assert torch.equal(*outputs)


class Fire(pararnn.Cell):
    """Slow entries that a threshold of their own adds 1 to."""

    states = {"S": ("K", "V")}
    gates = {"x": ("K", "V"), "t": ("K", "V"), "f": ""}

    def step(self, state, gate, param):
        f = torch.sigmoid(gate.f)[..., None, None]
        jump = torch.where(gate.t < state.S, torch.ones_like(state.S), 0.0)
        return f * state.S + (1 - f) * torch.tanh(state.S + gate.x) + jump

    def readout(self, state, gate, param):
        return state.S.sum(-2)


@needs_compiler
@pytest.mark.parametrize("f", [2.0, 4.0])
def test_segments_of_steps_that_jump_meet_to_the_bit(f):
    """Thresholds at segments' borders are the states there: one unit more, and a step jumps."""
    torch.manual_seed(0)
    cell, steps, count = Fire(16, num_heads=2, K=8), 2048, 4
    gates = 0.3 * torch.randn(2, steps, 2, cell.head_sizes.width)
    gates[..., -1] += f
    thresholds = gates[..., 64:128]
    thresholds.fill_(10)
    for border in range(steps // count, steps, steps // count):
        _, end = pararnn.solve(cell, gates[:, :border], **LOOP)
        thresholds[:, border] = end.flatten(2)
    with pararnn.using(segments=count):
        ours, reference = (pararnn.solve(cell, gates, **pair) for pair in (SEGMENTS, LOOP))
    assert all(map(torch.equal, ours, reference))


class Slow(pararnn.Cell):
    """Entries that remember; one step in each segment may be steep where its state is `t`."""

    states = {"h": "V"}
    gates = {"x": "V", "t": "V", "f": "", "slope": ""}

    def step(self, state, gate, param):
        f = torch.sigmoid(gate.f)[..., None]
        kept = f * state.h + (1 - f) * torch.tanh(state.h + gate.x)
        return gate.slope[..., None] * (kept - gate.t) + gate.t


def first_step_defect(slope, steps=4096, count=8, values=512, device="cpu"):
    """The largest defect of the first step of a segment, in roundings of the largest state so far.

    The states are the outputs, so that it can be seen.
    """
    torch.manual_seed(0)
    cell = Slow(values, num_heads=1, device=device)
    gates = 0.01 * torch.randn(2, steps, 1, cell.head_sizes.width, device=device)
    gates[..., values : 2 * values] = 0.0
    gates[..., -2], gates[..., -1] = 8.0, 1.0
    size = steps // count
    for border in range(size, steps, size):
        _, end = pararnn.solve(cell, gates[:, :border], **LOOP)
        gates[:, border, :, values : 2 * values] = end
        gates[:, border, :, -1] = slope
    with pararnn.using(segments=count):
        output, _ = pararnn.solve(cell, gates, **SEGMENTS)
    so_far, worst = output.abs().cummax(1).values, 0.0
    for border in range(size, steps, size):
        first = slice(border, border + 1)
        step, _ = pararnn.solve(cell, gates[:, first], output[:, border - 1], **LOOP)
        defect = (step - output[:, first]).abs() / so_far[:, first]
        worst = max(worst, float(defect.max()) / torch.finfo(torch.float32).eps)
    return worst


@needs_compiler
@pytest.mark.parametrize("slope", [1e-3, 1.0, 30.0])
def test_the_first_step_of_a_segment_obeys_the_contract(slope):
    assert first_step_defect(slope) <= DEFECT_ULPS


class Spike(Slow):
    """Entries that remember, and to which any step may add."""

    gates = {"x": "V", "add": "V", "f": ""}

    def step(self, state, gate, param):
        f = torch.sigmoid(gate.f)[..., None]
        return f * state.h + (1 - f) * torch.tanh(state.h + gate.x) + gate.add


@needs_compiler
def test_a_late_value_excuses_no_earlier_step():
    torch.manual_seed(0)
    cell, values = Spike(64, num_heads=1), 64
    gates = 0.5 * torch.randn(2, 512, 1, cell.head_sizes.width)
    gates[..., values : 2 * values], gates[..., -1] = 0.0, 4.0
    gates[:, -1, :, values : 2 * values] = 1e6
    with pararnn.using(segments=8):
        ours, reference = (pararnn.solve(cell, gates, **pair)[0] for pair in (SEGMENTS, LOOP))
    assert reference[:, -1].min() > 1e5
    early = reference[:, :-1]
    assert (ours[:, :-1] - early).abs().max() <= 2e-5 * early.abs().max()


def test_small_gaps_may_not_add_up():
    """Each is at rounding level; where entries remember, their sum is more than the tolerance."""
    call = _call(16 * 64)
    args = prepare(call.cell, one_gate(call.cell, call.gates.detach()), call.initial)
    program = pararnn.program_of(call.cell)
    size = torch.ones(2, 64, 2, 4, 3)
    ends = size + shooting.GAP_ULPS * torch.finfo(torch.float32).eps
    own = segments.MatrixSegments(program, args, None, None)
    borders = own.borders((size,), (ends,), (size[:, 1:],))
    (gaps,) = shooting.open_gaps(own, borders, {(0, 0): size})
    assert (gaps > 0).all()


@needs_compiler
def test_first_steps_run_by_cuda_kernels(monkeypatch):
    """On a CPU, by the emulator."""
    emulated.install(emulated.gpu(), monkeypatch)
    calls, first_steps = [], segments.MatrixSegments.first_steps
    monkeypatch.setattr(
        segments.MatrixSegments, "first_steps", lambda *args: calls.append(1) or first_steps(*args)
    )
    assert first_step_defect(30.0, steps=256, count=4, values=8) <= DEFECT_ULPS
    assert calls


class Chaos(pararnn.Cell):
    """Entries whose derivatives over a segment overflow, while states are at most 1."""

    states = {"S": ("K", "V")}
    gates = {"x": ("K", "V")}

    def step(self, state, gate, param):
        return torch.sin(10.0 * state.S + gate.x)

    def readout(self, state, gate, param):
        return state.S.mean(-2)


@needs_compiler
def test_gradients_of_early_steps_where_later_derivatives_overflow():
    """Zero times an infinite derivative is no gradient."""
    torch.manual_seed(0)
    cell = Chaos(8, num_heads=2, K=3)
    gates = torch.randn(1, 1024, 2, cell.head_sizes.width, requires_grad=True)
    grads = []
    for pair in (SEGMENTS, LOOP):
        with pararnn.using(segments=8):
            output, _ = pararnn.solve(cell, gates, **pair)
        grads.append(torch.autograd.grad(1e-9 * output[:, :20].sum(), gates)[0])
    assert grads[1].isfinite().all()
    assert torch.equal(*grads)


@needs_compiler
def test_layers_with_biases_and_the_contract():
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Entrywise, 6, 6, num_heads=2, K=4, dtype=torch.float32)
    with torch.no_grad():
        layer.layers[0].bias.normal_()
    x = torch.randn(2, 96, 6)
    with pararnn.using(segments=3):
        assert pararnn.explain(layer, x.shape, **SEGMENTS).split == (3, 32, 0)
        report = pararnn.verify(layer, x, **SEGMENTS)
        assert report.passed, report
        layer(x, cu_seqlens=None, **SEGMENTS)
        assert layer.layers[0].last_solve.sweeps >= 1
        row = x[:1]
        ends = [0, 40, 96]
        _close(*[[layer(row, cu_seqlens=ends, **pair)[0]] for pair in (SEGMENTS, LOOP)],
               torch.float32)  # fmt: skip


@needs_compiler
def test_gradients_of_outputs_or_of_final_states_alone():
    call = _call(96)
    for part in (0, 1):
        grads = []
        for pair in (SEGMENTS, LOOP):
            with pararnn.using(segments=3):
                results = pararnn.solve(call.cell, call.gates, call.initial, **pair)
            loss = as_tuple(results[part])[0].square().sum()
            grads.append(torch.autograd.grad(loss, [call.gates, call.cell.a]))
        _close(*grads, torch.float32)


@needs_compiler
def test_cuda_kernels_in_segments(monkeypatch):
    """On a CPU, by the emulator."""
    emulated.install(emulated.gpu(), monkeypatch)
    _both(_call(70, torch.bfloat16, rows=1), 2, torch.bfloat16)


def test_entries_that_meet_are_refused():
    cell = M2RNNCell(6, num_heads=2, K=4)
    gates = torch.randn(1, 40, 2, cell.head_sizes.width)
    with pytest.raises(EngineError, match="sums entries of its state 'H'"):
        pararnn.solve(cell, gates, **SEGMENTS)
    assert "sums entries" in str(pararnn.explain(cell, gates.shape))


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("pair", [AT_ONCE, BY_SCANS], ids=["torch", "scan"])
@pytest.mark.one_in(3)
def test_newton_solves_all_steps_at_once(pair, reverse, resets):
    """Entries by themselves, and an mLSTM, whose matrix depends on a number."""
    reset = torch.rand(2, 40) < 0.1 if resets else None
    _compare("mlstm", make_call("mlstm", 2, 40), reset=reset, reverse=reverse, **pair)
    call = _call(40, torch.float64)
    own = [_results(call, each, None, reset=reset, reverse=reverse) for each in (pair, STEPS)]
    _close(*own, torch.float64)
    for steps in (0, 1):
        _compare("mlstm", make_call("mlstm", 2, steps), reverse=reverse, **pair)


def test_newton_in_pytorch_takes_packed_rows_and_obeys_the_contract():
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Entrywise, 6, 6, num_heads=2, K=4, **AT_ONCE)
    assert pararnn.verify(layer, torch.randn(2, 50, 6)).passed
    assert layer.layers[0].last_solve is not None
    x, ends, results = torch.randn(1, 50, 6), [0, 20, 20, 45], []
    h_0 = torch.randn(1, 3, 2, 4, 3)
    for pair in (AT_ONCE, STEPS):
        leaves = [x.clone().requires_grad_(), h_0.clone().requires_grad_()]
        output, final = layer(*leaves, cu_seqlens=ends, **pair)
        grads = torch.autograd.grad(output.square().sum() + final.sum(), leaves)
        results.append([output, final, *grads])
    _close(*results, torch.float32)


@pytest.mark.parametrize("pair", [AT_ONCE, BY_SCANS], ids=["torch", "scan"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_nan_stays_in_its_sequence_where_newton_solves_all_steps_at_once(pair, packed):
    """A derivative of 0 between sequences times a NaN is a NaN."""
    call = _call(40, torch.float64, rows=1)
    gates = call.gates.detach().clone()
    gates[0, 29, 0, 3] = torch.nan
    reset = torch.zeros(1, 40, dtype=torch.bool).index_fill(1, torch.tensor([10, 30]), True)
    borders = {"cu_seqlens": torch.tensor([0, 10, 30, 38])} if packed else {"reset": reset}
    gates.requires_grad_()
    output, _ = pararnn.solve(call.cell, gates, **borders, **pair)
    (grad,) = torch.autograd.grad(output.sum(), gates)
    assert grad[0, 10:30].isnan().any()
    assert grad[0, :10].isfinite().all()
    assert grad[0, 30:].isfinite().all()


@pytest.mark.parametrize("pair", [AT_ONCE, BY_SCANS], ids=["torch", "scan"])
def test_a_gradient_that_overflows_stays_in_its_state(pair):
    """A matrix that overflows has no derivative by the mLSTM's stabiliser, but a gradient by it."""
    torch.manual_seed(0)
    cell = pararnn.zoo.MLSTMCell(6, num_heads=2, K=4)
    gates = torch.randn(1, 40, 2, cell.head_sizes.width)
    _, keys, values, *_ = cell.head_sizes.split(gates)
    keys[0, 30], values[0, 30] = 1e20, 1e20
    gates.requires_grad_()
    grads = []
    for each in (pair, STEPS):
        output, _ = pararnn.solve(cell, gates, **each)
        (grad,) = torch.autograd.grad(output[:, :35].sum(), gates)
        grads.append(cell.head_sizes.split(grad))
    assert grads[1][2].isfinite().all()
    assert not grads[1][1].isfinite().all()
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, equal_nan=True)


@pytest.mark.parametrize("wrong", [torch.nan, None])
def test_newton_in_pytorch_ends_with_the_loop(wrong, monkeypatch):
    """Where it does not converge, with a warning; where the loop is not finite either, without."""
    call = _call(40 if wrong else 41)  # cells warn once for each length
    if wrong is None:
        monkeypatch.setattr(entry_newton, "MAX_SWEEPS", 1)
    else:
        with torch.no_grad():
            call.gates[1, 20, 0, 3] = wrong
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        ours, reference = (_results(call, pair, None)[0] for pair in (AT_ONCE, STEPS))
    assert any(w.category is pararnn.ConvergenceWarning for w in records) == (wrong is None)
    torch.testing.assert_close(ours, reference, equal_nan=True)


def test_pairs_that_refuse_matrix_cells():
    cell = M2RNNCell(6, num_heads=2, K=4)
    gates = torch.randn(1, 40, 2, cell.head_sizes.width)
    with pytest.raises(EngineError, match="too large for Newton"):
        pararnn.solve(cell, gates, **AT_ONCE)
    cell = Pair(6, num_heads=2, K=4)
    gates = torch.randn(1, 40, 2, cell.head_sizes.width)
    own = [pararnn.solve(cell, gates, **pair)[0] for pair in (AT_ONCE, STEPS)]
    _close(*own, torch.float32)
    with pytest.raises(EngineError, match="depend on each other"):
        pararnn.solve(cell, gates, **BY_SCANS)


def test_maps_compose():
    """A matrix, a vector and a number, each of which depends on those after it."""
    torch.manual_seed(0)
    axes = (("K", "V"), ("K",), ())
    sizes = ((4, 3), (4,), ())
    entries = Entries(axes, tuple((i, j) for i in range(3) for j in range(i, 3)))
    draw = lambda i: torch.randn(2, 7, 2, *sizes[i], dtype=torch.float64)  # noqa: E731
    jacobian, rhs = {pair: draw(pair[0]) for pair in entries.pairs}, [draw(i) for i in range(3)]

    def apply(s, x):
        spread = ((..., slice(None), None), (..., None, None), (..., None))
        matrix, vector, number = x
        at = {pair: own[:, s] for pair, own in jacobian.items()}
        return [
            at[0, 0] * matrix + at[0, 1] * vector[spread[0]] + at[0, 2] * number[spread[1]],
            at[1, 1] * vector + at[1, 2] * number[spread[2]],
            at[2, 2] * number,
        ]

    state = [torch.zeros_like(r[:, 0]) for r in rhs]
    own = compose(entries, jacobian, rhs)
    for s in range(7):
        state = [x + r[:, s] for x, r in zip(apply(s, state), rhs, strict=True)]
        _close([x[:, s] for x in own], state)
    total = [torch.zeros_like(r[:, 0]) for r in rhs]
    own = pull_back(entries, jacobian, rhs)
    for s in reversed(range(7)):
        leaves = [x.clone().requires_grad_() for x in total]
        pull = torch.autograd.grad(apply(s, leaves), leaves, total)
        total = [x + r[:, s] for x, r in zip(pull, rhs, strict=True)]
        _close([x[:, s] for x in own], total)


def test_kinds_of_cells_that_segments_serve():
    program = pararnn.program_of(MLSTMCell(6, num_heads=2, K=4))
    assert why_entries_couple(program) is None
    assert entries_of(program).pairs == ((0, 0), (0, 2), (1, 1), (1, 2), (2, 2))


class First(Entrywise):
    """A cell that one test alone uses."""


@needs_compiler
@pytest.mark.parametrize(
    "pair", [SEGMENTS, LOOP, AT_ONCE, BY_SCANS], ids=lambda p: "-".join(p.values())
)
def test_vmap_runs_copies(pair):
    """Also at the first use of segments, whose steps are traced on random numbers."""
    torch.manual_seed(0)
    cell = First(8, num_heads=2, K=3)
    gates = torch.randn(2, 3, 9, 2, 11)
    generator = torch.random.get_rng_state()
    many = torch.func.vmap(lambda g: pararnn.solve(cell, g, **pair)[0])(gates)
    assert torch.equal(torch.random.get_rng_state(), generator)
    torch.testing.assert_close(many[1], pararnn.solve(cell, gates[1], **pair)[0])
