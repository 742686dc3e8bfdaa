"""Recording of ops: without slow imports, and with the graphs of PyTorch's own rules."""

import pytest
import torch
from fresh import run_fresh
from test_ops import BINARY, UNARY

import pararnn
from pararnn.cells.base import Step
from pararnn.program import rules
from pararnn.program.derive import derive, gradients
from pararnn.program.record import BranchError, record, replay, without_writes
from pararnn.program.structure import Diagonal

RUN = """
import sys, pararnn
every = int(sys.argv[1])
cells = {n: c for n, c in pararnn.CELLS.items() if not n.startswith("layer-norm")}  # by make_fx
for cls in [*cells.values()][::every]:
    pararnn.program_of(cls(4))
for cls in [*pararnn.zoo.MATRIX_CELLS.values()][::every]:
    pararnn.program_of(cls(8, num_heads=2, K=4))
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older PyTorch imports SymPy by itself")
@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="PyTorch for CUDA needs its stand-in for a GPU, which imports both",
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.thorough), 7])
def test_cells_of_the_library_are_traced_without_slow_imports(every):
    process = run_fresh(RUN, str(every))
    assert process.stdout.strip() == "[]", process.stdout + process.stderr


def _texts(function, numbers):
    def step(self, state, gate, param):
        return function(*(state.h + gate.x, state.h * gate.x)[:numbers])

    body = {"states": ("h",), "gates": ("x",), "step": step}
    cls = type("Own", (pararnn.Cell,), body)
    with torch.no_grad():
        graphs = derive(Step(cls, {}), Diagonal(1), [torch.float32])[torch.float32]
    return [graph.text for graph in (graphs.step, graphs.jacobian, graphs.vjp)]


def test_rules_without_wrappers_give_the_same_graphs(monkeypatch):
    cases = [(f, 1) for f in UNARY.values()] + [(f, 2) for f in BINARY.values()]
    cases = cases[::4]
    texts = [_texts(*case) for case in cases]
    monkeypatch.setattr(rules, "unwrap", lambda rule: rule)
    rules.rule_of.cache_clear()
    try:
        assert [_texts(*case) for case in cases] == texts
    finally:
        rules.rule_of.cache_clear()


def _gradient(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return gradients([torch.maximum(leaf, -leaf * leaf)], [leaf], [x])


def _writes_through_a_view(x):
    y = torch.zeros_like(x)
    y[1:].add_(x[1:])
    return (y,)


@pytest.mark.parametrize(
    ("function", "all_removed"), [(_gradient, True), (_writes_through_a_view, False)]
)
def test_writes_into_new_tensors_are_removed_and_others_are_left(function, all_removed):
    x = torch.randn(4)
    with torch.no_grad():
        graph = record(function, [x])
    writes = any("_." in str(node.target) for node in graph.nodes)
    assert writes or (function is _gradient and torch.__version__ >= "2.14")  # which has none
    assert without_writes(graph) is all_removed
    for value in (x, -x):
        torch.testing.assert_close(replay(graph, value), function(value))


def test_numbers_that_no_input_decides_may_be_read():
    graph = record(lambda x: (x * torch.tensor(0.5).add_(1).item(),), [torch.ones(3)])
    assert replay(graph, torch.ones(3))[0].tolist() == [1.5] * 3
    with pytest.raises(BranchError, match="_local_scalar_dense"):
        record(lambda x: (x * x.sum().item(),), [torch.ones(3)])
