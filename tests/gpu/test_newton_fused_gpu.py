"""(newton, fused) on a GPU: time in segments, and still the loop's result, whatever the weights."""

import math
from functools import partial

import pytest
import torch
from oracle import failures, run
from table import DTYPES, ELEMENTWISE, VARIANTS, check_case, dtype_name, make_case, with_latches

import pararnn
from pararnn.engines.fused import elementwise_cuda

HOW = {"solver": "newton", "backend": "fused"}
LONGEST = 65536


_check = partial(check_case, **HOW)


def _cut(segments, burn_in=16):
    return pararnn.using(segments=segments, burn_in=burn_in)


@pytest.fixture(params=["cluster", "grid"])
def meeting(request, monkeypatch):
    """Segments meet in a cluster's shared memory, or in global memory."""
    if request.param == "grid":
        monkeypatch.setattr(elementwise_cuda, "CLUSTERS", (99, 0))
    pararnn.clear_caches()
    yield request.param
    pararnn.clear_caches()


@pytest.mark.parametrize("segments", [2, 7, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_agrees_with_the_cpu_in_float64(name, dtype, segments):
    for variant in VARIANTS:
        with _cut(segments, burn_in=32 * (segments % 2)):
            case = make_case(pararnn.CELLS[name], dtype, 1000, variant)
            assert not failures(case, **HOW), variant


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_long_sequences_with_ragged_resets(name, dtype):
    case = make_case(pararnn.CELLS[name], dtype, LONGEST - 3, "resets", batch=2, channels=4)
    case.options["reset"] = torch.rand(2, LONGEST - 3) < torch.tensor([[1e-2], [2e-4]])
    assert not failures(case, **HOW)
    del case.options["reset"]
    assert not failures(case, **HOW)


@pytest.mark.parametrize("segments", [2, 16, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_any_number_of_segments(segments, dtype):
    for channels in (1, 33, 64, 130):
        with _cut(segments):
            case = make_case(pararnn.LSTMCell, dtype, 16411, "resets", channels=channels)
            assert not failures(case, **HOW)


@pytest.mark.parametrize("scale", [0.3, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", ["gru", "lstm", "slstm", "elman", "lem"])
def test_large_recurrent_weights(name, dtype, scale):
    case = make_case(pararnn.CELLS[name], dtype, 600, channels=16, device="cuda")
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
        case.gates.mul_(3)
    with _cut(8):
        result = _check(case)
    assert result.sweeps <= 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_slow_gates(dtype, meeting):
    for bias in (-2.0, -4.0, -6.0):
        case = make_case(pararnn.GRUCell, dtype, 4000, channels=64)
        case.gates[:, :, 0] += bias
        for segments in (4, 32):
            with _cut(segments):
                assert not failures(case, **HOW), (bias, segments)


def test_latches_are_mended_and_counted(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 2000, "initial", channels=640)
    case = with_latches(case, 0.05)
    with _cut(8):
        assert not failures(case, **HOW)
        cell, gates = case.cell.cuda(), case.gates.cuda()
        layer = pararnn.ParaGRU(640, 640, device="cuda", **HOW)
        layer.layers[0].cell.load_state_dict(cell.state_dict())
        layer(gates[:, :, 0])
        assert layer.last_solve.sweeps.item() >= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_few_channels_are_mended(name, dtype):
    """Two channels of a tile remember, or expand, and are mended with lanes over time."""
    for variant in ("plain", "initial"):
        case = make_case(pararnn.CELLS[name], dtype, 1500, variant, channels=40, device="cuda")
        with torch.no_grad():
            for parameter in case.cell.recurrent_parameters():
                parameter[..., [3, 30]] *= 4
            case.gates[:, :, 0, [7]] -= 10
        for segments in (2, 8):
            with _cut(segments, burn_in=150):
                _check(case)


def test_non_finite_inputs(meeting):
    for value in (math.nan, math.inf, -math.inf):
        case = make_case(pararnn.LSTMCell, torch.float32, 300, "resets", channels=5, device="cuda")
        case.gates[0, 140, 0, 2] = value
        case.gates[1, 250, 1, 3] = value
        runs = {}
        for solver in ("newton", "sequential"):
            gates = case.gates.clone().requires_grad_()
            with _cut(6):
                options = {"solver": solver, "backend": "fused"}
                (h, c), _ = pararnn.solve(case.cell, gates, case.initial, **case.options, **options)
            (grad,) = torch.autograd.grad(h.sum() + c.sum(), gates)
            runs[solver] = (h, c, grad)
        for mine, loop in zip(*runs.values(), strict=True):
            assert torch.equal(mine.isnan(), loop.isnan())
            assert torch.equal(mine.isinf(), loop.isinf())


def test_the_same_bits_every_time_even_under_load(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 700, "resets", channels=130)
    case = with_latches(case, 0.05)
    with _cut(7):
        first = run(case, "cuda", torch.float32, **HOW)
        again = run(case, "cuda", torch.float32, **HOW)
        assert all(torch.equal(first[name], again[name]) for name in first)
        cell, gates = case.cell.cuda(), case.gates.cuda().requires_grad_()

        def solve():
            states, _ = pararnn.solve(cell, gates, **HOW)
            return states, torch.autograd.grad(states.sum(), gates)[0]

        reference = solve()
        side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        wrong = torch.zeros((), device="cuda", dtype=torch.bool)
        for repeat in range(5000):
            if repeat % 10 == 0:
                with torch.cuda.stream(side):
                    noise = (noise @ noise).clamp(-1, 1)
            for a, b in zip(solve(), reference, strict=True):
                wrong |= (a != b).any()
        assert not wrong.item()


def test_replays_of_a_graph(meeting):
    case = make_case(pararnn.LSTMCell, torch.bfloat16, 900, channels=64, device="cuda")
    with _cut(9):
        pararnn.solve(case.cell, case.gates, **HOW)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            (h, _), _ = pararnn.solve(case.cell, case.gates, **HOW)
        for _ in range(20):
            case.gates.normal_()
            graph.replay()
            with torch.no_grad():
                (reference, _), _ = pararnn.solve(case.cell, case.gates, **HOW)
            assert torch.equal(h, reference)


def test_millions_of_steps():
    steps = 2**22
    torch.manual_seed(0)
    cell = pararnn.GRUCell(8, device="cuda")
    gates = torch.randn(1, steps, 3, 8, device="cuda")
    results = {}
    for solver in ("newton", "sequential"):
        leaf = gates.clone().requires_grad_()
        states, final = pararnn.solve(cell, leaf, solver=solver, backend="fused")
        (grad,) = torch.autograd.grad(states.square().mean() + final.sum(), leaf)
        results[solver] = (states.detach(), final.detach(), grad)
    for mine, loop in zip(*results.values(), strict=True):
        assert (mine - loop).abs().max() <= 2e-5 * loop.abs().max()
