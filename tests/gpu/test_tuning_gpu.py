"""Splits by context, autotune and adapt, on a GPU."""

import pytest
import torch
from relative import relative_error

import pararnn
from pararnn.engines import tuned
from pararnn.engines.fused.elementwise_cuda import ElementwiseCuda
from pararnn.engines.rule import MIN_SEGMENTS
from pararnn.tune.adapt import SWEEP_COST

HOW = {"solver": "newton", "backend": "fused"}
LOOP = {"solver": "sequential", "backend": "fused"}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def _results(cell, gates, **options):
    leaf = gates.detach().requires_grad_()
    states, final = pararnn.solve(cell, leaf, **options)
    grads = torch.autograd.grad(states.square().mean() + final.sum(), [leaf, *cell.parameters()])
    return (states.detach(), final.detach(), *grads)


@pytest.fixture
def splits(monkeypatch):
    """Return the splits of Newton's passes."""
    splits_of_launches, real = [], ElementwiseCuda.launch

    def record(schedule, *inputs, **options):
        launch, tensors = real(schedule, *inputs, **options)
        if schedule.solver == "newton":
            splits_of_launches.append(launch.split)
        return launch, tensors

    monkeypatch.setattr(ElementwiseCuda, "launch", record)
    return splits_of_launches


@pytest.mark.parametrize("segments", [2, 3, 16, 100, 512])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_split_gives_the_loops_result(dtype, segments, splits):
    torch.manual_seed(0)
    cell = pararnn.GRUCell(96, device="cuda")
    gates = torch.randn(1, 8192, 3, 96, device="cuda").to(dtype)
    loop = _results(cell, gates, **LOOP)
    for burn_in in (0, 16, 100):
        with pararnn.using(segments=segments, burn_in=burn_in):
            cut = _results(cell, gates, **HOW)
        for mine, other in zip(cut, loop, strict=True):
            assert relative_error(mine, other) < 2 * TOLERANCE[dtype]
    assert all(0.8 * segments < split.segments <= segments for split in splits)


def test_more_segments_than_fit_are_reduced(splits):
    cell = pararnn.GRUCell(256, device="cuda")
    gates = torch.randn(16, 65536, 3, 256, device="cuda")
    with pararnn.using(segments=10**6, burn_in=10**6):
        explained_split = pararnn.explain(cell, gates.shape, **HOW).split
        splits.clear()
        cut = _results(cell, gates, **HOW)
    assert 1 < explained_split.segments < 10**4
    assert explained_split == splits[0]
    for mine, other in zip(cut, _results(cell, gates, **LOOP), strict=True):
        assert relative_error(mine, other) < 4e-5


def test_a_backward_pass_outside_of_the_context_keeps_the_split(splits):
    cell = pararnn.GRUCell(64, device="cuda")
    gates = torch.randn(1, 4096, 3, 64, device="cuda", requires_grad=True)
    with pararnn.using(segments=5, burn_in=20):
        states, _ = pararnn.solve(cell, gates, **HOW)
        (inside,) = torch.autograd.grad(states.sum(), gates, retain_graph=True)
    (outside,) = torch.autograd.grad(states.sum(), gates)
    assert torch.equal(inside, outside)
    assert {split.segments for split in splits} == {5}


def test_compiled_code_follows_the_context(splits):
    layer = pararnn.ParaGRU(16, 64, device="cuda", **HOW)
    program = torch.compile(layer, fullgraph=True)
    x = torch.randn(1, 4096, 16, device="cuda", requires_grad=True)
    for segments in (4, 9, 4):
        splits.clear()
        with pararnn.using(segments=segments):
            output, _ = program(x)
        output.sum().backward()
        assert {split.segments for split in splits} == {segments}


def test_graphs_keep_the_split(splits):
    cell = pararnn.GRUCell(64, device="cuda")
    gates = torch.randn(1, 4096, 3, 64, device="cuda")
    with torch.no_grad(), pararnn.using(segments=12):
        reference, _ = pararnn.solve(cell, gates, **HOW)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states, _ = pararnn.solve(cell, gates, **HOW)
    graph.replay()
    assert torch.equal(states, reference)
    assert {split.segments for split in splits} == {12}


@pytest.fixture
def no_records(monkeypatch, tmp_path, no_caches):
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path)


@pytest.mark.parametrize("backward", [True, False])
def test_autotune(no_records, backward, splits):
    layer = pararnn.ParaGRU(64, 256, device="cuda")
    shape = (4, 4096, 64)
    rule = pararnn.explain(layer, shape)
    tuning = pararnn.autotune(layer, shape, backward=backward)
    pairs = {(row.solver, row.backend) for row in tuning.measured}
    assert pairs == {("sequential", "fused"), ("newton", "fused")}  # the others are hopeless
    assert sum(row.backend == "fused" and row.solver == "newton" for row in tuning.measured) >= 4
    assert (tuning.by_rule.solver, tuning.by_rule.backend) == (rule.solver, rule.backend)
    assert tuning.measured[0].ms <= 1.05 * min(row.ms for row in tuning.measured)
    explanation = pararnn.explain(layer, shape)
    assert (explanation.solver, explanation.backend) == (tuning.solver, tuning.backend)
    assert explanation.why.startswith("autotune measured")
    splits.clear()
    x = torch.randn(shape, device="cuda")
    output, _ = layer(x)
    output.sum().backward()
    split = tuning.measured[0].split
    if split.segments is not None:
        assert explanation.split == splits[0]
    pararnn.clear_caches()
    assert not pararnn.autotune(layer, shape, backward=backward).anew
    assert pararnn.explain(layer, shape) == explanation
    assert pararnn.verify(layer, x)


SEGMENTS = MIN_SEGMENTS["cuda"]


def _slow(segments=SEGMENTS):
    """A layer and inputs that `auto` cuts into few segments, with channels slow to forget."""
    torch.manual_seed(0)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    rows = 4 * cores // (16 * segments)  # 16 tiles a row
    layer = pararnn.ParaGRU(64, 1024, device="cuda")
    with torch.no_grad():
        layer.layers[0].bias[0] = -6.0
        for param in layer.layers[0].cell.parameters():
            param.normal_()
    x, h_0 = torch.randn(rows, 2048, 64, device="cuda"), torch.randn(1, rows, 1024, device="cuda")
    assert pararnn.explain(layer, x.shape).split.segments == segments
    return layer, x, h_0


def test_slow_layers_adapt_without_waiting(messages):
    layer, x, h_0 = _slow()
    reference, _ = layer(x, h_0)
    assert SWEEP_COST * layer.last_solve.sweeps.item() >= SEGMENTS
    reference.sum().backward()
    adaptation = pararnn.adapt(layer, patience=3)
    for _ in range(10):
        torch.cuda.set_sync_debug_mode("error")
        try:
            output, _ = layer(x, h_0)
            output.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if adaptation.switched:
            break
        torch.cuda.synchronize()  # so that the counts are there
    assert adaptation.switched == {"layers.0": [tuple(x.shape[:2])]}
    assert "by the loop from now on" in messages.getvalue()
    output, _ = layer(x, h_0)
    assert layer.last_solve.sweeps.item() == 0
    assert relative_error(output, reference) < 4e-5
    layer(x, h_0, solver="newton")
    assert layer.last_solve.sweeps.item() >= 2
    adaptation.reset()
    layer(x, h_0)
    assert layer.last_solve.sweeps.item() >= 2


def test_layers_that_forget_stay():
    layer, x, _ = _slow()
    with torch.no_grad(), pararnn.adapt(layer, patience=1) as adaptation:
        layer.layers[0].bias.zero_()
        for param in layer.layers[0].cell.parameters():
            param.mul_(0.03)
        for _ in range(5):
            layer(x)
            torch.cuda.synchronize()
        assert adaptation.switched == {}
        assert layer.last_solve.sweeps.item() == 1


def test_captured_graphs_are_left_alone():
    layer, x, h_0 = _slow()
    with torch.no_grad():
        layer(x, h_0)
        adaptation = pararnn.adapt(layer, patience=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, _ = layer(x, h_0)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert adaptation.switched == {}
        for _ in range(2):
            layer(x, h_0)
            torch.cuda.synchronize()
        assert adaptation.switched
        again = pararnn.ParaGRU(64, 1024, device="cuda", solver="newton", backend="fused")
        again.load_state_dict(layer.state_dict())
        graph.replay()
        assert torch.equal(output, again(x, h_0)[0])
