"""What is asked of (newton, fused) on a GPU: the split, by context."""

import pytest
import torch

import pararnn
from pararnn.engines import fused_cuda
from pararnn.numerics import relative_error

HOW = {"solver": "newton", "backend": "fused"}
LOOP = {"solver": "sequential", "backend": "fused"}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def _results(cell, gates, **how):
    leaf = gates.detach().requires_grad_()
    states, final = pararnn.solve(cell, leaf, **how)
    grads = torch.autograd.grad(states.square().mean() + final.sum(), [leaf, *cell.parameters()])
    return (states.detach(), final.detach(), *grads)


@pytest.fixture
def splits(monkeypatch):
    """The splits that passes take."""
    seen, real = [], fused_cuda.split_of

    def record(*args):
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(fused_cuda, "split_of", record)
    return seen


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
        said = pararnn.explain(cell, gates.shape, **HOW).split
        splits.clear()
        cut = _results(cell, gates, **HOW)
    assert 1 < said.segments < 10**4
    assert said == splits[0]
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
    torch.compiler.reset()
    layer = pararnn.ParaGRU(16, 64, device="cuda", **HOW)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(1, 4096, 16, device="cuda", requires_grad=True)
    for segments in (4, 9, 4):
        splits.clear()
        with pararnn.using(segments=segments):
            output, _ = compiled(x)
        output.sum().backward()
        assert {split.segments for split in splits} == {segments}
    torch.compiler.reset()


def test_graphs_keep_the_split(splits):
    cell = pararnn.GRUCell(64, device="cuda")
    gates = torch.randn(1, 4096, 3, 64, device="cuda")
    with torch.no_grad(), pararnn.using(segments=12):
        expected, _ = pararnn.solve(cell, gates, **HOW)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states, _ = pararnn.solve(cell, gates, **HOW)
    graph.replay()
    assert torch.equal(states, expected)
    assert {split.segments for split in splits} == {12}
