"""Shapes of steps of matrix cells: each pair gives what the loop gives, or says why it cannot."""

import emulated
import pytest
import torch
from call_results import with_gradients
from table import ALL_PAIRS, FUSED, NEWTON_FUSED, SCAN, needs_compiler
from test_matrix import _close
from torch.autograd.function import once_differentiable

import pararnn
from pararnn.base.errors import EngineError
from pararnn.codegen.source import source_file
from pararnn.engines.fused.segments import programs_of_passes
from pararnn.program.program import program_of

F32 = torch.float32
NEWTON = ("newton", "torch")
LOOP = ("sequential", "torch")


def outer(gate):
    return gate.k[..., :, None] * gate.v[..., None, :]


class Cell(pararnn.Cell):
    """A matrix, vectors and a number, which read gates alone unless a subclass adds more."""

    states = {"S": ("K", "V"), "n": "K", "w": "V", "m": ""}
    gates = {"k": "K", "v": "V", "a": ""}

    def step(self, state, gate, param):
        return (
            torch.tanh(0.3 * state.S + outer(gate) + self.wide(state)),
            torch.tanh(0.3 * state.n + gate.k + self.vector(state.n, state)),
            torch.tanh(0.3 * state.w + gate.v + self.vector(state.w, state)),
            torch.tanh(0.3 * state.m + gate.a),
        )

    def wide(self, state):
        return 0.0

    def vector(self, own, state):
        return 0.0

    def readout(self, state, gate, param):
        return state.S.mean(-2) + state.w


class AllIntoWide(Cell):
    """Vectors and a number in the matrix, and the number in the vectors."""

    def wide(self, state):
        outer = state.n[..., :, None] * state.w[..., None, :]
        return outer + state.n[..., :, None] + state.m[..., None, None]

    def vector(self, own, state):
        return state.m[..., None].expand_as(own)


class KeysIntoWide(Cell):
    def wide(self, state):
        return state.n[..., :, None]


class ValuesIntoWide(Cell):
    def wide(self, state):
        return state.w[..., None, :].expand_as(state.S)


class NumberIntoWide(Cell):
    def wide(self, state):
        return torch.maximum(state.m[..., None, None], 0.1 * state.S)


class NumberIntoVectors(Cell):
    def vector(self, own, state):
        return torch.where(own > 0, state.m[..., None], own)


class Constants(Cell):
    """Constants that have the shape of a matrix, and sums over axes that only they have."""

    def vector(self, own, state):
        if own is state.w:
            return 0.0
        ones, narrow = torch.ones_like(state.S), state.n[..., :, None]
        one_more = torch.zeros_like(state.n)[..., :, None] + narrow
        as_matrices = (
            ones * narrow,
            torch.where(ones > 0.5, narrow, state.S),
            torch.zeros_like(state.S) + narrow,
        )
        sums = [
            factor * x.sum(-1) for factor, x in zip((0.02, 0.01, 0.03), as_matrices, strict=True)
        ]
        return sum(sums) + 0.1 * one_more.sum(-1) + 0.02 * ones.sum(-1)


class Casts(Cell):
    """A comparison as a number, and a state that is a gate."""

    states = {"S": ("K", "V"), "n": "K"}

    def step(self, state, gate, param):
        positive = (gate.k > 0).to(gate.k.dtype)[..., :, None]
        return torch.tanh(0.3 * state.S + positive * state.n[..., :, None]), gate.k

    def readout(self, state, gate, param):
        return state.S.mean(-2)


CELLS = [AllIntoWide, KeysIntoWide, ValuesIntoWide, NumberIntoWide, NumberIntoVectors, Constants]
CELLS += [Casts]


class ScaledByLength(Cell):
    """A factor that is 1 for K = V alone, and one by a length."""

    def wide(self, state):
        ratio = state.S.shape[-2] / state.S.shape[-1]
        return (self.K / 30) * state.S + ratio * state.n[..., None]


def call_of(cls, keys=3):
    torch.manual_seed(0)
    cell = cls(10, num_heads=2, K=keys)
    return cell, 0.7 * torch.randn(2, 70, 2, cell.head_sizes.width)


def results_of(cell, gates, pair):
    leaf = gates.clone().requires_grad_()
    with pararnn.using(segments=4):
        output, final = pararnn.solve(cell, leaf, solver=pair[0], backend=pair[1])
    return with_gradients((output, final), [leaf])


@needs_compiler
@pytest.mark.parametrize(
    ("cls", "keys"),
    [(AllIntoWide, 3), (AllIntoWide, 5), (Constants, 3), (Casts, 3), (ScaledByLength, 5)],
)
def test_all_pairs_run_such_steps(cls, keys):
    """With K = V = 5 too, where what differs by its axes has one size."""
    cell, gates = call_of(cls, keys)
    reference = results_of(cell, gates, LOOP)
    for pair in ALL_PAIRS[1:]:
        if cls is Constants and pair[0] == "newton":  # a constant condition chooses entries
            with pytest.raises(pararnn.EngineError, match=r"sums entries|too large"):
                results_of(cell, gates, pair)
            continue
        _close(results_of(cell, gates, pair), reference, F32)


@pytest.mark.parametrize("cls", [cls for cls in CELLS if cls is not Constants])
def test_segments_have_kernels_for_each_shape(cls):
    """Without a compiler: what their derivatives are made of can be generated."""
    cell, gates = call_of(cls)
    program = program_of(cell)
    _close(results_of(cell, gates, NEWTON), results_of(cell, gates, LOOP), F32)
    assert "cannot" not in (pararnn.explain(cell, gates.shape).others.get(NEWTON_FUSED) or "")
    for own in programs_of_passes(program, F32):
        assert "backward_step" in source_file(own, F32, "cpp", "sequential")


@pytest.mark.parametrize("cls", [*CELLS, ScaledByLength])
@pytest.mark.parametrize("keys", [3, 5])
def test_equal_lengths_of_axes_keep_kernels(cls, keys):
    cell, _ = call_of(cls, keys)
    assert program_of(cell).why_no_family is None


def test_an_axis_of_length_1_is_named():
    with pytest.warns(pararnn.CellCostWarning, match="axis K has length 1: leave it out"):
        program_of(AllIntoWide(10, num_heads=2, K=1))


class Once(torch.autograd.Function):
    """tanh, whose gradient autograd takes for a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - torch.tanh(x) ** 2)


class Never(torch.autograd.Function):
    """A gradient whose own gradient raises."""

    @staticmethod
    def forward(ctx, grad):
        return 2 * grad

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no gradient of it")


class Raises(Once):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Never.apply(grad) * (1 - torch.tanh(x) ** 2)


class OnceCell(Cell):
    def wide(self, state):
        return Once.apply(state.S)


class OnceWhereNegative(Cell):
    def wide(self, state):
        return torch.where(state.S < 0, Once.apply(state.S), state.S)


class RaisesCell(Cell):
    def wide(self, state):
        return Raises.apply(state.S)


@needs_compiler
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OnceCell, "autograd cannot differentiate again"),
        (OnceWhereNegative, "autograd cannot differentiate again"),
        (RaisesCell, "no gradient of the gradient.*no gradient of it"),
    ],
)
def test_derivatives_that_autograd_cannot_give_are_refused(cls, message):
    """They would be zero, and gradients wrong. The loop needs none, and `auto` takes it."""
    cell, gates = call_of(cls)
    explanation = pararnn.explain(cell, gates.shape)
    assert (explanation.solver, explanation.backend) == FUSED
    for pair in (NEWTON, SCAN, NEWTON_FUSED):
        with pytest.raises(EngineError, match=message):
            pararnn.solve(cell, gates, solver=pair[0], backend=pair[1])
        assert explanation.others[pair] is not None
    assert pararnn.solve(cell, gates)[0].isfinite().all()


def test_explain_plans_what_it_does_not_build(monkeypatch):
    """On a GPU, of which the emulator stands for one: states fit its registers, and their
    derivatives do not, which only code that is generated tells."""
    emulated.install(emulated.gpu(), monkeypatch)
    cell = NumberIntoWide(128, num_heads=1, K=128)
    explanation = pararnn.explain(cell, (1, 70))
    assert (explanation.solver, explanation.backend) == FUSED
    assert "registers" in explanation.others[NEWTON_FUSED]
    with pytest.raises(EngineError, match="registers"):
        pararnn.solve(
            cell, torch.zeros(1, 70, 1, cell.head_sizes.width), solver="newton", backend="fused"
        )
