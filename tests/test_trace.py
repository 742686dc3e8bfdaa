"""Traces with symbolic sizes in two dtypes: one is made, the other converted where it may be."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pararnn.base.errors import CellError
from pararnn.program import trace
from pararnn.program.trace import erase_dead, trace_rows, trace_rows_alike


def _softmax(x, R):
    return torch.softmax(x @ R, -1).sum() * x.new_ones(()) + x.mean(-1, keepdim=True)


def _precision(x, R):
    return x @ R + torch.finfo(x.dtype).eps


def _rounded(x, R):
    return torch.nn.functional.rms_norm(x @ R, x.shape[-1:], eps=1e-5) * 1e-5


def _twice(x, R):
    return torch.nn.functional.rms_norm(x @ R, x.shape[-1:], eps=1e-5) * 9.999999747378752e-06


def _constant(x, R):
    return x @ R + torch.tensor(0.1, dtype=x.dtype)


CASES = {
    "softmax": (_softmax, 1),
    "a number that is rounded": (_rounded, 1),
    "a number that is rounded and one that is not": (_twice, 2),
    "another number": (_precision, 1),
    "a tensor": (_constant, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_in_another_dtype_is_the_one_that_would_be_made(case, monkeypatch):
    function, traces = CASES[case]
    made = []

    def count(*args, **options):
        made.append(args)
        return trace_rows(*args, **options)

    monkeypatch.setattr(trace, "trace_rows", count)
    sizes = (6, 8), (8, 8)
    inputs = [[torch.rand(size, dtype=d) for size in sizes] for d in (torch.float32, torch.float64)]
    graphs = trace_rows_alike(function, inputs, "a step")
    assert len(made) == traces
    for graph, tensors in zip(graphs, inputs, strict=True):
        own = trace_rows(function, tensors, "a step")
        assert (graph.text, graph.defaults) == (own.text, own.defaults)
        notes = [[(n.target, n.meta) for n in [*g.ops.nodes][:-1]] for g in (graph, own)]
        assert notes[0] == notes[1]
        (result,), (wanted,) = graph(*tensors), own(*tensors)
        assert result.dtype == wanted.dtype == tensors[0].dtype
        assert torch.equal(result, wanted)


def _with_zeros(x, R):
    return x @ R, x @ R + torch.zeros(x.shape, dtype=x.dtype, device="cpu")


def test_zeros_of_autograd_follow_its_inputs_and_those_of_a_step_are_refused():
    inputs = torch.rand(6, 8), torch.rand(8, 8)
    for results in (None, 2):
        with pytest.raises(CellError, match="a fixed device"):
            trace_rows(_with_zeros, inputs, "a step", results)
    for results in (0, 1):
        assert "new_zeros" in trace_rows(_with_zeros, inputs, "a step", results).text


def _writes(x):
    kept, dead, out = x + 1, x + 2, x + 3
    kept[0].mul_(2)  # by a view
    torch.mul(x, 4, out=out)
    dead[0].mul_(kept[0])
    torch.add(kept, out, out=dead)
    return kept, out


def test_writes_into_results_stay_and_others_are_erased():
    x = torch.rand(3, 2)
    graph = make_fx(_writes)(x).graph
    erase_dead(graph)
    ops = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [op for op in ops if op.endswith((".Tensor_Scalar", "mul_.Tensor", ".out"))] == [
        "aten.mul_.Tensor",
        "aten.mul.out",
    ]
    assert ops.count("aten.add.Tensor") == 2
    got = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    for result, expected in zip(got, _writes(x), strict=True):
        assert torch.equal(result, expected)
