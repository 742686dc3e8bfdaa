"""Tensors with one axis twice, such as X X^T and a covariance, or with axes in both orders."""

import pytest
import torch
from call_results import with_gradients
from table import needs_compiler
from test_matrix import _close

import pararnn
from pararnn import Param
from pararnn.engines.table import why_never
from pararnn.program.program import program_of
from pararnn.program.statements import alias_of, axis_of_alias, distinct

FUSED = {"solver": "sequential", "backend": "fused"}
TORCH = {"solver": "sequential", "backend": "torch"}


def _column(x):
    return x[..., :, None]


def _row(x):
    return x[..., None, :]


class Products(pararnn.Cell):
    """Products of states in every order and along both axes, a sum over each axis, norms over the
    second of two, and three of one axis in a product."""

    states = {"X": ("K", "V"), "Y": ("V", "K")}
    gates = {"x": ("K", "V"), "y": ("K", "V")}

    def step(self, state, gate, param):
        left, right = state.X @ state.X.mT, state.X.mT @ gate.x
        both = torch.softmax(right, -1) + torch.softmax(right, -2) @ right.mT
        X = torch.tanh(gate.x + 0.3 * left @ left.mT @ state.X + 0.2 * state.X @ both)
        Y = gate.y.mT - 0.1 * (right + right.mT) @ state.Y @ torch.sigmoid(left)
        return X, Y / (1 + (Y @ Y.mT).amax((-2, -1), keepdim=True).abs())

    def readout(self, state, gate, param):
        return (state.X @ state.Y).sum(-1).sum(-1, keepdim=True) * state.X.mean(-2)


class Covariance(pararnn.Cell):
    """A state with an axis twice, transposed or not, a vector's outer product, sums over its rows
    and columns next to each other, and products with parameters on both sides."""

    states = {"P": ("K", "K"), "h": "K"}
    gates = {"k": "K", "G": ("K", "K"), "q": "V"}
    params = {"W": Param("H,K,K"), "U": Param("H,K,V"), "d": Param("H,K")}

    def step(self, state, gate, param):
        k = _column(gate.k)
        P = param.d[..., None] * state.P + k * k.mT + 0.1 * torch.tanh(state.P.mT @ gate.G)
        P = P / (1 + P.square().sum((-2, -1), keepdim=True))
        P = P + 0.3 * torch.tanh(P @ param.W) + 0.2 * torch.tanh(param.W @ P.mT)
        P = P + 0.1 * _row(gate.k) * _column(P.sum(-2))
        h = (P @ _column(state.h)).squeeze(-1) + (_row(state.h) @ P).squeeze(-2) * P.amax(-1)
        return P, torch.tanh(h + P.mean(-2) + gate.k)

    def readout(self, state, gate, param):
        products = state.P @ state.P.mT @ param.U
        return (_row(state.h) @ products).squeeze(-2) * gate.q


class Orders(pararnn.Cell):
    """States, gates and parameters with two axes in both orders, products along either."""

    states = {"h": "V", "A": ("V", "K"), "B": ("K", "V")}
    gates = {"x": ("V", "K"), "y": ("K", "V")}
    params = {"U": Param("H,K,V"), "W": Param("H,V,K"), "R": Param("H,K,K"), "T": Param("H,V,G,K")}
    config = {"G": 2}

    def step(self, state, gate, param):
        c = torch.tanh((param.U @ _column(state.h)).squeeze(-1) + gate.y.sum(-1))
        h = torch.tanh((param.W @ _column(c)).squeeze(-1) + state.A.mean(-1))
        mixed = torch.einsum("...v,...vgk->...gk", h, param.T)
        A = torch.tanh(gate.x + state.B.mT @ param.R + _column(h) * _row(c + mixed.sum(-2)))
        B = 0.5 * state.B + A.mT * gate.y + param.U * (mixed.amax(-2)[..., None])
        return h, A, torch.tanh(B)

    def readout(self, state, gate, param):
        return (state.B * _column(state.A.sum(-2)) + (state.A * param.W).mT).sum(-2)


CELLS = {cls.__name__: cls for cls in (Products, Covariance, Orders)}


def results_of(cell, gates, initial, pair):
    """Outputs, final states and the gradients of all leaves."""
    output, final = pararnn.solve(cell, gates, initial, **pair)
    return with_gradients((output, final), [gates, *initial, *cell.parameters()])


def leaves_of(cell, rows, steps, dtype=torch.float64):
    """Random gates and initial states that require gradients."""
    sizes = cell.head_sizes
    gates = torch.randn(rows, steps, sizes.heads, sizes.width, dtype=torch.float64)
    states = [0.5 * torch.randn(rows, *size, dtype=torch.float64) for size in sizes.state_sizes]
    leaves = [x.to(dtype).requires_grad_() for x in (gates, *states)]
    return leaves[0], tuple(leaves[1:])


@needs_compiler
@pytest.mark.parametrize(("keys", "values"), [(4, 3), (2, 17), (9, 8)])
@pytest.mark.parametrize("cls", CELLS.values(), ids=CELLS)
@pytest.mark.one_in(4)
def test_kernels_are_the_loop(cls, keys, values):
    """Over more rows than a task runs, and steps past one checkpoint."""
    torch.manual_seed(0)
    cell = cls(2 * values, num_heads=2, K=keys, dtype=torch.float64)
    assert program_of(cell).why_no_family is None
    gates, initial = leaves_of(cell, 18, 19)
    _close(*(results_of(cell, gates, initial, pair) for pair in (FUSED, TORCH)))


@needs_compiler
def test_layers_take_them():
    """By `auto`, in float32, with resets and in both directions."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Covariance, 6, 6, num_heads=2, K=4, bidirectional=True)
    x, reset = torch.randn(2, 21, 6), torch.rand(2, 21) < 0.1
    y, _ = layer(x, reset=reset)
    reference, _ = layer(x, reset=reset, backend="torch")
    assert layer.layers[0].choice.pair == ("sequential", "torch")
    y, _ = layer(x, reset=reset)
    assert layer.layers[0].choice.pair == ("sequential", "fused")
    torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_vector_cells_take_them():
    """Channels that attend to each other."""

    class Attends(pararnn.Cell):
        states, gates, params = ("h",), ("x",), {"R": Param("H,K,K")}

        def step(self, state, gate, param):
            weights = torch.softmax(_column(state.h) * _row(gate.x), -1)
            return torch.tanh(gate.x + state.h @ param.R + (weights @ _column(state.h)).squeeze(-1))

    torch.manual_seed(0)
    cell = Attends(6, dtype=torch.float64)
    assert program_of(cell).family == "heads"
    gates = torch.randn(2, 20, 1, 6, dtype=torch.float64, requires_grad=True)
    initial = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for pair in (FUSED, TORCH):
        states, final = pararnn.solve(cell, gates, initial, **pair)
        loss = (states * gates.detach()[:, :, 0]).sum() + final.square().sum()
        results.append([states, final, *torch.autograd.grad(loss, [gates, initial, cell.R])])
    _close(*results)


@pytest.mark.parametrize("cls", CELLS.values(), ids=CELLS)
def test_what_cannot_run_them_says_so(cls):
    program = program_of(cls(6, num_heads=2, K=4))
    assert "one axis twice" in program.affine_form()
    for pair in (("newton", "fused"), ("newton", "torch"), ("chunks", "torch")):
        assert why_never(program, pair, torch.device("cpu")) is not None


def test_segments_do_not_take_them():
    """Not even where entries are independent."""

    class Outer(pararnn.Cell):
        states, gates = {"P": ("K", "K")}, {"k": "K", "q": "V"}

        def step(self, state, gate, param):
            return 0.9 * state.P + _column(gate.k) * _row(gate.k)

        def readout(self, state, gate, param):
            return state.P.sum((-2, -1))[..., None] * gate.q

    program = program_of(Outer(6, num_heads=2, K=4))
    assert program.family == "matrix"
    reason = why_never(program, ("newton", "fused"), torch.device("cpu"))
    assert "one axis twice" in reason


def test_a_length_of_calls_is_not_there_twice():
    class Similar(pararnn.Cell):
        states, gates, memory = {"h": "V"}, {"x": "V"}, {"a": ("S", "V")}

        def step(self, state, gate, param, memory):
            return torch.tanh(gate.x + (memory.a @ memory.a.mT).amax((-2, -1))[..., None] * state.h)

    with pytest.warns(pararnn.CellCostWarning, match="one axis twice, S, whose length calls dec"):
        program = program_of(Similar(6, num_heads=2))
    assert program.family is None


def test_aliases():
    assert distinct(("K", "V", "K", "2K")) == ("K", "V", "2K", "3K")
    assert [axis_of_alias(alias_of("K2", n)) for n in (1, 2, 12)] == ["K2"] * 3
