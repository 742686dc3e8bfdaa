"""Products of vectors with matrices of two axes: kernels of a CPU share them among rows."""

import pytest
import torch
from call_results import with_gradients
from table import needs_compiler

import pararnn
from pararnn import Param
from pararnn.program.program import program_of
from pararnn.program.rectangles import with_rectangles
from pararnn.program.statements import Product
from pararnn.zoo import ProjectedLSTMCell

FUSED, LOOP = ({"solver": "sequential", "backend": backend} for backend in ("fused", "torch"))


class Deep(pararnn.Cell):
    """An MLP inside the recurrence, down to K, up to a wide axis and back; a vector of parameters
    times a matrix, one matrix twice, and a square one."""

    states = {"h": "V", "s": "K"}
    gates = {"x": "W", "u": "V"}
    params = {
        "A": Param("H,K,V"),
        "B": Param("H,K,W"),
        "C": Param("H,V,W"),
        "S": Param("H,V,V"),
        "w": Param("H,K"),
    }

    def step(self, state, gate, param):
        def times(x, matrix):
            return (x[..., None, :] @ matrix).squeeze(-2)

        low = torch.tanh(times(state.h, param.A.mT) + state.s)
        wide = torch.relu(times(low, param.B) + gate.x)
        new = times(wide, param.C.mT) + times(param.w, param.A) + gate.u
        return torch.tanh(new + times(state.h, param.S)), 0.5 * low + times(new, param.A.mT)


class Tensors(pararnn.Cell):
    """Products of matrices with parameters of two axes (by row), three and four, whose other axes
    are both factors', summed, or the result's; a pointwise one, and one of five axes, which are
    none of these; reshapes that join axes; a sum over joined ones."""

    states = {"S": ("G", "V"), "h": "W"}
    gates = {"x": ("G", "K"), "y": "W", "z": "L"}
    params = {
        "A": Param("H,V,K"),
        "B": Param("H,G,V,K"),
        "C": Param("H,G,V,W"),
        "D": Param("H,G,V,K,W"),
        "E": Param("H,V,W"),
        "F": Param("H,G,V,K,W,L"),
        "P": Param("H,V,K,W"),
    }

    def step(self, state, gate, param):
        flat = state.S.flatten(-2)
        weights = torch.softmax(flat, -1)
        dense = torch.einsum("...i,...iw->...w", flat - weights, param.C.flatten(-3, -2))
        new = torch.tanh(torch.einsum("...gv,...vk->...gk", state.S, param.A) + gate.x)
        new = new + torch.einsum("...gv,...gvk->...gk", state.S, param.B)
        back = torch.einsum("...gk,...gvkw->...vw", new, param.D)
        h = torch.tanh(gate.y + dense + (back * param.E).sum(-2) + 0.1 * state.h)
        five = torch.einsum("...l,...gvkwl->...gvkw", h.mean(-1)[..., None] + gate.z, param.F)
        wide = torch.einsum("...v,...vkw->...kw", state.S.mean(-2), param.P)
        h = h + torch.tanh(five).mean((-4, -3, -2)) + torch.tanh(wide).sum(-2)
        rows = (back * param.E).sum(-1)[..., None, :]
        mean = new.flatten(-2).mean(-1)[..., None, None]
        wide = torch.einsum("...w,...gvkw->...gvk", h, param.D)
        spread = (wide * gate.x[..., None, :]).mean(-1)
        S = torch.einsum("...gk,...gvk->...gv", new, param.B) + rows
        return torch.tanh(S + mean + spread), h

    def readout(self, state, gate, param):
        return state.S.sum(-2)


CELLS = {
    "tensors": (Tensors, {"G": 3, "K": 4, "W": 6, "L": 2}),
    "tensors that fill vectors": (Tensors, {"G": 2, "K": 16, "W": 8, "L": 2}),
    "deep": (Deep, {"K": 3, "W": 19}),
    "deep, K = V": (Deep, {"K": 5, "W": 8}),
    "projected": (ProjectedLSTMCell, {"K": 21}),
}


def _case(name, dtype, rows, steps=20, heads=2):
    torch.manual_seed(0)
    cls, axes = CELLS[name]
    cell = cls(5 * heads, num_heads=heads, dtype=dtype, **axes)
    gates = torch.randn(rows, steps, heads, cell.head_sizes.width, dtype=dtype)
    initial = [torch.randn(rows, *size, dtype=dtype) for size in cell.state_sizes]
    leaves = [gates, *initial]
    return cell, [leaf.requires_grad_() for leaf in leaves]


def _run(cell, leaves, pair, **options):
    gates, *initial = leaves
    output, final = pararnn.solve(cell, gates, tuple(initial), **pair, **options)
    return with_gradients((output, final), [*leaves, *cell.parameters()])


@needs_compiler
@pytest.mark.parametrize("name", CELLS)
def test_kernels_are_the_loop(name):
    """Rows that fill no block, one, and several; float32 too; resets and from the last step."""
    for rows, dtype, limit in (
        (1, torch.float64, 1e-11),
        (18, torch.float64, 1e-11),
        (3, torch.float32, 1e-4),
    ):
        cell, leaves = _case(name, dtype, rows)
        reset = torch.rand(rows, 20) < 0.2
        for options in ({}, {"reset": reset, "reverse": True}):
            runs = [_run(cell, leaves, pair, **options) for pair in (FUSED, LOOP)]
            for own, truth in zip(*runs, strict=True):
                assert own.shape == truth.shape
                assert (own - truth).abs().max() <= limit * truth.abs().max()


def test_statements_say_which_products_there_are():
    """Each product once, with its side; an outer product for each."""
    cell = Deep(10, num_heads=2, K=3, W=19)
    statements = program_of(cell).statements[torch.float32]
    forward = with_rectangles(statements.only(["new_state"]))
    products = [v.definition for v in forward.values if isinstance(v.definition, Product)]
    by_param = sorted((p.param, p.transposes, p.axis, p.to) for p in products)
    assert by_param == [
        (0, False, "K", "V"),
        (0, True, "V", "K"),
        (0, True, "V", "K"),
        (1, False, "K", "W"),
        (2, True, "W", "V"),
        (3, False, "V", ""),
    ]
    backward = with_rectangles(statements.only([f"grad_{k}" for k in ("state", "gate", "param")]))
    assert sorted((o.param, o.axis, o.to) for o in backward.outers) == [
        *[(0, "K", "V")] * 3,
        (1, "K", "W"),
        (2, "V", "W"),
        (3, "V", ""),
    ]
    assert [t.number for t, _ in backward.writes if t.kind == "grad_param"] == [4]
    before = [v.definition for v in statements.values if isinstance(v.definition, Product)]
    assert {product.to for product in before} == {""}


def test_products_of_tensors_are_matrices_for_each_index_of_the_others():
    """Each with the sum's axis and the result's, and what its gradients are."""
    statements = program_of(Tensors(10, num_heads=2, G=3, K=4, W=6, L=2)).statements[torch.float32]
    forward = with_rectangles(statements.only(["new_state"]))
    products = [v.definition for v in forward.values if isinstance(v.definition, Product)]
    assert sorted((p.param, p.axis, p.to, p.axes) for p in products) == [
        (0, "V", "K", ()),
        (1, "K", "V", ("G", "V", "K")),
        (1, "V", "K", ("G", "V", "K")),
        (2, "V", "W", ("G", "V", "W")),
        (3, "K", "W", ("G", "V", "K", "W")),
        (3, "W", "K", ("G", "V", "K", "W")),
        (6, "V", "W", ("V", "K", "W")),
    ]
    backward = with_rectangles(statements.only(["grad_param"]))
    assert sorted({(o.param, o.axes) for o in backward.outers}) == [
        (1, ("G", "V", "K")),
        (2, ("G", "V", "W")),
        (3, ("G", "V", "K", "W")),
        (6, ("V", "K", "W")),
    ]


def test_axes_in_both_orders_are_products():
    class Both(pararnn.Cell):
        states = {"h": "V", "c": "K"}
        gates = {"x": "K"}
        params = {"A": Param("H,K,V"), "B": Param("H,V,K")}

        def step(self, state, gate, param):
            c = torch.tanh(gate.x + (param.A @ state.h[..., None]).squeeze(-1))
            return (param.B @ c[..., None]).squeeze(-1), c

    statements = program_of(Both(4, K=3)).statements[torch.float32]
    passes = with_rectangles(statements.only(["new_state", "grad_state", "grad_param"]))
    products = [v.definition for v in passes.values if isinstance(v.definition, Product)]
    assert {(p.param, p.axis, p.to) for p in products} == {
        (0, "V", "K"), (0, "K", "V"), (1, "K", "V"), (1, "V", "K"),
    }  # fmt: skip
    assert {outer.param for outer in passes.outers} == {0, 1}
    assert not passes.renames
