"""Matrix cells by generated kernels on a GPU: against plain loops, and the numerics contract."""

import copy

import pytest
import test_matrix
import torch
from call_results import as_tuple
from captures import capture
from matrix_cells import LOOPS, Call, loop, make_call
from table import ALL_PAIRS
from test_matrix import TOLERANCES, _close
from test_matrix_kernels import Mixed, Rows
from test_matrix_segments import Entrywise, first_step_defect
from test_matrix_steps import AllIntoWide, Casts, Constants, results_of

import pararnn
from pararnn.base.numerics import DEFECT_ULPS
from pararnn.zoo import MATRIX_CELLS, M2RNNCell, MLSTMCell

FUSED = {"solver": "sequential", "backend": "fused"}
TORCH = {"solver": "sequential", "backend": "torch"}
NORMALISED = ("atlas", "atlas-window")
"""Cells that divide by the norm of a momentum, which may be near zero: rounding decides there."""
SPREADS = 16
"""Times what gates rounded otherwise change in the loop."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = ((4, 3), (64, 16), (32, 32), (33, 17))


def _there(call, device):
    leaf = lambda x: x.detach().to(device).requires_grad_()  # noqa: E731
    cell = copy.deepcopy(call.cell).to(device)
    return Call(cell, leaf(call.gates), tuple(map(leaf, call.initial)))


def _results(call, output, final):
    """Return outputs, final states and gradients for cotangents that both runs share.

    They are rounded to the call's dtype: a sum that cancels shows the rounding of what arrives.
    """
    values = [output, *as_tuple(final)]
    torch.manual_seed(1)
    arriving = [torch.randn(v.shape, dtype=torch.float64).to(call.gates.dtype) for v in values]
    arriving = [a.to(v) for a, v in zip(arriving, values, strict=True)]
    grads = torch.autograd.grad(values, call.leaves(), arriving, allow_unused=True)
    pairs = zip(grads, call.leaves(), strict=True)
    return [*values, *(torch.zeros_like(x) if g is None else g for g, x in pairs)]


def _rounded_otherwise(call):
    """Return a call whose gates differ by about one rounding."""
    torch.manual_seed(2)
    step = torch.finfo(call.gates.dtype).eps * torch.randn_like(call.gates)
    return Call(call.cell, (call.gates.detach() * (1 + step)).requires_grad_(), call.initial)


def _compare(name, call, dtype, device, reset=None, reverse=False):
    there = _there(call, device)
    own_reset = None if reset is None else reset.to(device)
    output, final = pararnn.solve(
        there.cell, there.gates, there.initial, reset=own_reset, reverse=reverse, **FUSED
    )
    ours = [x.detach().cpu() for x in _results(there, output, final)]
    wanted = _results(call, *loop(name, call, reverse, reset))
    if name not in NORMALISED:
        _close(ours, wanted, dtype)
        return
    moved = _rounded_otherwise(call)
    moved = _results(moved, *loop(name, moved, reverse, reset))
    for a, e, m in zip(ours, wanted, moved, strict=True):
        limit = max(TOLERANCES[dtype] * float(e.abs().max()), SPREADS * float((m - e).abs().max()))
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_kernels_are_the_loop(name, dtype, device):
    """Over chunks of steps and a part of one, with resets, and from the last step on."""
    for keys, values in SIZES[:2] if dtype == torch.float64 else SIZES:
        call = make_call(name, 3, 70, keys=keys, values=values, dtype=dtype)
        with torch.no_grad():
            call.gates.mul_(0.5)
        _compare(name, call, dtype, device, torch.rand(3, 70) < 0.05, reverse=keys == 4)
        _compare(name, make_call(name, 2, 33, keys=keys, values=values, dtype=dtype), dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("keys", "values"), [(64, 16), (32, 32), (64, 64)])
@pytest.mark.parametrize("name", LOOPS)
def test_a_layer_obeys_the_contract(name, keys, values, dtype, device):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(
        MATRIX_CELLS[name], 32, 2 * values, num_heads=2, K=keys, device=device, dtype=dtype
    )
    x = torch.randn(3, 60, 32, device=device, dtype=dtype)
    report = pararnn.verify(layer, x, lengths=[60, 0, 33])
    assert report.passed, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cls", "values", "lengths"),
    [(Mixed, 5, {"K": 4}), (Mixed, 16, {"K": 16}), (Rows, 5, {"K": 9, "U": 4})],
)
def test_steps_of_many_operations(cls, values, lengths, dtype, device):
    test_matrix.check_kernels(cls, values, lengths, dtype, device=device)


def test_rows_that_are_packed(device):
    layer = pararnn.ParaRNN(M2RNNCell, 8, 32, num_heads=2, K=16, device=device)
    test_matrix.check_packed_rows(layer, [0, 3, 3, 70, 85], dtype=torch.float32)


def test_graphs_replay_and_bits_repeat(device):
    call = _there(make_call("m2rnn", 4, 100, keys=64, values=16, dtype=torch.bfloat16), device)

    def run():
        output, final = pararnn.solve(call.cell, call.gates, call.initial, **FUSED)
        loss = output.float().sum() + final.sum()
        return [output, *torch.autograd.grad(loss, call.leaves())]

    graph, replay = capture(run)
    reference = run()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, replay, reference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [Entrywise, MLSTMCell])
@pytest.mark.parametrize("reverse", [False, True])
def test_segments_of_time_are_the_loop(cls, reverse, dtype, device):
    """Four segments, and steps that are left; with resets where time runs backwards."""
    torch.manual_seed(0)
    cell = cls(32, num_heads=2, K=32, dtype=dtype, device=device)
    sizes, results = cell.head_sizes, []
    gates = torch.randn(3, 300, 2, sizes.width, dtype=dtype, device=device, requires_grad=True)
    initial = tuple(
        torch.randn(3, *size, dtype=dtype, device=device, requires_grad=True)
        for size in sizes.state_sizes
    )
    reset = torch.rand(3, 300, device=device) < 0.02 if reverse else None
    call = Call(cell, gates, initial)
    for solver in ("newton", "sequential"):
        with pararnn.using(segments=5):
            own = pararnn.solve(
                cell, gates, initial, reset=reset, reverse=reverse, solver=solver, backend="fused"
            )
        results.append(_results(call, *own))
    _close(*results, dtype)


@pytest.mark.parametrize("slope", [1.0, 30.0])
def test_the_first_step_of_a_segment_obeys_the_contract(slope, device):
    assert first_step_defect(slope, 1 << 14, count=16, device=device) <= DEFECT_ULPS


@pytest.mark.parametrize("cls", [AllIntoWide, Constants, Casts])
def test_steps_that_add_narrow_states_to_wide_ones(cls, device):
    """By all pairs; and by the one that `auto` takes for a long row, which is in segments."""
    torch.manual_seed(0)
    cell = cls(32, num_heads=2, K=16, device=device)
    gates = 0.7 * torch.randn(2, 70, 2, cell.head_sizes.width, device=device)
    reference = results_of(cell, gates, ("sequential", "torch"))
    for pair in ALL_PAIRS[1:]:
        if cls is Constants and pair[0] == "newton":
            with pytest.raises(pararnn.EngineError, match=r"sums entries|too large"):
                results_of(cell, gates, pair)
            continue
        _close(results_of(cell, gates, pair), reference, torch.float32)
    if cls is Constants:
        return
    long = 0.7 * torch.randn(1, 1 << 14, 2, cell.head_sizes.width, device=device)
    explanation = pararnn.explain(cell, long.shape, device=device)
    assert (explanation.solver, explanation.backend) == ("newton", "fused"), explanation
    ours, loop = (pararnn.solve(cell, long, **pair) for pair in ({}, FUSED))
    _close([ours[0], *ours[1]], [loop[0], *loop[1]], torch.float32)


def test_a_captured_call_runs_step_by_step(device):
    """The host cannot see whether segments agree."""
    cell = Entrywise(32, num_heads=2, K=16, device=device)
    gates = torch.randn(1, 128, 2, cell.head_sizes.width, device=device)
    reference = pararnn.solve(cell, gates, **FUSED)[0]
    with torch.no_grad(), pararnn.using(segments=4, solver="newton", backend="fused"):
        pararnn.solve(cell, gates)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = pararnn.solve(cell, gates)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, reference)


def test_auto_takes_the_kernels_and_explains(device):
    layer = pararnn.ParaRNN(M2RNNCell, 8, 8, num_heads=2, K=4, device=device)
    assert "(sequential, fused) runs" in str(pararnn.explain(layer, (2, 5, 8)))
    layer(torch.randn(2, 5, 8, device=device))
    assert layer.layers[0].choice.pair == ("sequential", "fused")


def test_states_that_do_not_fit_run_in_pytorch(device):
    layer = pararnn.ParaRNN(M2RNNCell, 8, 512, num_heads=1, K=512, device=device)
    with pytest.warns(pararnn.BackendWarning, match="registers"):
        layer(torch.randn(1, 2, 8, device=device))
    assert layer.layers[0].choice.pair == ("sequential", "torch")
