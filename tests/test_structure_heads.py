"""A structure, a shape of parameters and columns that the library has never heard of: heads.

States hang together within heads of K channels, in blocks of N K x N K. All of it is types of this
file; nothing of the library knows them.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from table import check_contract

import pararnn
from pararnn.cells.shapes import ParamShape
from pararnn.program.coupling import Coupling
from pararnn.program.structure import STRUCTURES
from pararnn.solvers.sequential import unroll

HEAD = 4
"""K."""


def _heads(x):
    return x.unflatten(-1, (-1, HEAD))


class HeadColumns(Coupling):
    """A column is a head of a batch row: flags (B, H)."""

    def reach(self, channels):
        return HEAD

    def any(self, mask):
        return _heads(mask).any(-1).any(2).any(1)

    def largest(self, values):
        return _heads(values).amax((1, 2, 4))

    def spread(self, columns, like):
        channels = columns.repeat_interleave(HEAD, -1)
        return channels[:, None, None].expand_as(like)

    def take(self, whole, columns):
        batch, head = columns.nonzero(as_tuple=True)
        if whole.shape[-1] == 1:
            whole = whole.expand(*whole.shape[:-1], HEAD * columns.shape[1])
        elif whole.shape == columns.shape:  # an entry a column
            return whole[batch, head].unsqueeze(0)
        return _heads(whole)[batch, ..., head, :].movedim(0, -2).flatten(-2).unsqueeze(0)

    def put(self, whole, columns, part):
        out = whole.clone()
        batch, head = columns.nonzero(as_tuple=True)
        if whole.shape == columns.shape:
            out[batch, head] = part.squeeze(0)
        else:
            _heads(out)[batch, ..., head, :] = _heads(part.squeeze(0)).movedim(-2, 0)
        return out

    def take_params(self, params, columns):
        head = columns.nonzero(as_tuple=True)[1]
        return tuple(p[head] if p.ndim == 3 else _heads(p)[head].flatten() for p in params)


@dataclass(frozen=True)
class HeadBlocks(pararnn.Structure):
    """J is (B, T, H, N K, N K)."""

    name: ClassVar[str] = "head_blocks"

    def _split(self, rows):
        """(..., N D) as (..., H, N K)."""
        return _heads(rows.unflatten(-1, (self.num_states, -1))).movedim(-2, -3).flatten(-2)

    def _join(self, blocks):
        """(..., H, N K) as (..., N, D)."""
        return blocks.unflatten(-1, (self.num_states, HEAD)).movedim(-3, -2).flatten(-2)

    def apply(self, jacobian, vector):
        return self._join((jacobian @ self._split(vector.flatten(-2)).unsqueeze(-1)).squeeze(-1))

    def compose(self, later, earlier):
        return later @ earlier

    def transpose(self, jacobian):
        return jacobian.mT

    def to_dense(self, jacobian):
        n = (self.num_states, HEAD)
        blocks = jacobian.unflatten(-1, n).unflatten(-3, n).movedim(-5, -1)
        whole = torch.diag_embed(blocks, dim1=-5, dim2=-2)  # N, H, K by N, H, K
        return whole.flatten(-3).flatten(-4, -2)

    def from_dense(self, matrix):
        n = (self.num_states, matrix.shape[-1] // (self.num_states * HEAD), HEAD)
        blocks = matrix.unflatten(-1, n).unflatten(-4, n).diagonal(dim1=-5, dim2=-2)
        return blocks.movedim(-1, -5).flatten(-2).flatten(-3, -2)


class PulledHeadBlocks(HeadBlocks):
    """The same by N K rows in place of N D: those of all heads at once."""

    name: ClassVar[str] = "pulled_head_blocks"

    @property
    def coupling(self):
        return HeadColumns()

    def cut(self, jacobian, fresh):
        blocks = fresh if fresh.shape[-1] == 1 else fresh[..., ::HEAD]
        return jacobian.masked_fill(blocks[..., None, None], 0)

    def cotangents(self, like):
        unit = torch.eye(self.num_states * HEAD, dtype=like.dtype, device=like.device)
        heads = like.shape[-1] // HEAD
        return unit.unflatten(-1, (self.num_states, HEAD)).repeat(1, 1, heads)

    def from_pulled(self, pulled):
        return self._split(pulled).movedim(-2, -3)


KINDS = (HeadBlocks, PulledHeadBlocks)


@pytest.fixture(autouse=True)
def _register():
    for kind in KINDS:
        pararnn.register_structure(kind, kind.name)
    yield
    for kind in KINDS:
        del STRUCTURES[kind.name]


class HeadRNN(pararnn.Cell):
    """Two states, mixed by a matrix a head."""

    states = ("h", "c")
    gates = ("x", "z")
    params = {
        "A": pararnn.Param(ParamShape("H,K,K", lambda d, h: (d // HEAD, HEAD, HEAD)), std=0.3),
        "w": pararnn.Param(),
        "g": pararnn.Param("H", mean=0.5),
    }
    structure = "head_blocks"

    def step(self, state, gate, param):
        product = (_heads(state.h).unsqueeze(-2) @ param.A).squeeze(-2).flatten(-2)
        h = torch.tanh(gate.x + product + param.w * state.c)
        z = torch.sigmoid(gate.z + param.g * state.h)
        return h, z * state.c + (1 - z) * h


class PulledHeadRNN(HeadRNN):
    structure = "pulled_head_blocks"


class DenseHeadRNN(HeadRNN):
    structure = "dense"


CELLS = (HeadRNN, PulledHeadRNN)


def _draw(cls, seed=0, **options):
    torch.manual_seed(seed)
    return cls(12, num_heads=3, **options)


@pytest.mark.thorough
def test_matrices_that_fit_no_number_of_heads_are_refused():
    cell = _draw(HeadRNN)
    cell.A = torch.nn.Parameter(torch.randn(3, HEAD, HEAD + 1))
    message = r"A of HeadRNN must be 'H,K,K' for D = 12, got \(3, 4, 5\)"
    with pytest.raises(ValueError, match=message):
        pararnn.solve(cell, torch.randn(2, 5, 2, 12))


@pytest.mark.parametrize("kind", KINDS)
def test_operations_agree_with_matrices(kind):
    structure = kind(2)
    a, b = torch.randn(2, 2, 5, 3, 8, 8).unbind()
    v = torch.randn(2, 5, 2, 12)
    dense_a, dense_b = structure.to_dense(a), structure.to_dense(b)
    product = (dense_a @ v.flatten(2).unsqueeze(-1)).reshape(v.shape)
    torch.testing.assert_close(structure.apply(a, v), product)
    torch.testing.assert_close(structure.to_dense(structure.compose(a, b)), dense_a @ dense_b)
    assert torch.equal(structure.to_dense(structure.transpose(a)), dense_a.mT)
    assert torch.equal(structure.from_dense(dense_a), a)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.thorough
def test_solves_and_gradients_hold_the_contract(cls, reset):
    cell = _draw(cls, dtype=torch.float64)
    gates = torch.randn(2, 40, 2, 12, dtype=torch.float64)
    options = {"reset": torch.rand(2, 40) < 0.1} if reset else {}
    for solver in ("sequential", "newton"):
        result = check_contract(cell, gates, solver=solver, backend="torch", **options)
        assert not result.mended


@pytest.mark.thorough
def test_it_agrees_with_the_dense_structure():
    gates = torch.randn(2, 40, 2, 12, dtype=torch.float64, requires_grad=True)
    results = []
    for cls in (*CELLS, DenseHeadRNN):
        cell = _draw(cls, dtype=torch.float64)
        states = torch.stack(pararnn.solve(cell, gates, solver="newton")[0])
        grads = torch.autograd.grad(states.sin().sum(), [gates, *cell.parameters()])
        results.append((states, *grads))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_a_layer_has_it():
    layer = pararnn.ParaRNN(HeadRNN, 6, 12, num_heads=3, solver="newton")
    x = torch.randn(2, 30, 6)
    assert layer(x)[0].shape == (2, 30, 12)
    assert pararnn.verify(layer, x).passed


def test_heads_are_pulled_back_at_once():
    like = torch.zeros(7, 12)
    assert len(HeadBlocks(2).cotangents(like)) == 24
    assert len(PulledHeadBlocks(2).cotangents(like)) == 8


@pytest.mark.thorough
def test_a_step_that_mixes_heads_is_refused():
    class Mixed(PulledHeadRNN):
        def step(self, state, gate, param):
            h, c = super().step(state, gate, param)
            return h + 0.1 * state.c.flip(-1), c

    with pytest.raises(pararnn.StructureError, match="does not have it"):
        pararnn.program_of(_draw(Mixed))


@pytest.mark.thorough
def test_a_head_is_finished_alone(monkeypatch):
    """One head of three expands and Newton gives it up: the other heads' states stay."""
    sizes = []

    def record(system):
        sizes.append(tuple(system.initial.shape))
        return unroll(system)

    monkeypatch.setattr("pararnn.solvers.newton.unroll", record)
    cell = _draw(PulledHeadRNN)
    cell.A.data[1] = 40 * torch.randn(HEAD, HEAD)
    gates = torch.randn(2, 300, 2, 12)
    with pytest.warns(pararnn.ConvergenceWarning):
        result = check_contract(cell, gates, solver="newton")
    assert result.mended == 2
    assert sizes == [(1, 2, 2 * HEAD)]
