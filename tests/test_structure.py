"""Structures agree with the dense matrices that they stand for; users can register their own."""

import pytest
import torch
from table import check_contract

import pararnn
from pararnn.program.structure import STRUCTURES, make_structure


@pytest.mark.parametrize(
    ("name", "states", "size"),
    [
        ("diagonal", 1, (1, 4)),
        ("block_diagonal", 2, (2, 2, 4)),
        ("block_diagonal", 3, (3, 3, 4)),
        ("dense", 2, (8, 8)),
    ],
)
def test_operations_agree_with_matrices(name, states, size):
    structure = make_structure(name, states)
    a, b = torch.randn(2, 3, *size), torch.randn(2, 3, *size)
    v = torch.randn(2, 3, states, 4)
    dense_a, dense_b = structure.to_dense(a), structure.to_dense(b)
    product = (dense_a @ v.flatten(2).unsqueeze(-1)).reshape(v.shape)
    assert torch.allclose(structure.apply(a, v), product, atol=1e-5)
    assert torch.allclose(structure.to_dense(structure.compose(a, b)), dense_a @ dense_b, atol=1e-5)
    assert torch.equal(structure.to_dense(structure.transpose(a)), dense_a.mT)
    assert torch.equal(structure.from_dense(dense_a), a)
    assert not structure.to_dense(torch.zeros_like(a)).any()


def test_unknown_and_taken_names():
    with pytest.raises(pararnn.StructureError, match="unknown structure 'band'"):
        make_structure("band", 1)
    with pytest.raises(pararnn.StructureError, match="takes one state"):
        make_structure("diagonal", 2)
    for name in ("dense", "sequential"):
        with pytest.raises(pararnn.StructureError, match="is taken"):
            pararnn.register_structure(lambda n: None, name)


class Circulant(pararnn.Structure):
    """One state; J is the circulant matrix of its first column, held as (B, T, D)."""

    name = "circulant"

    def apply(self, jacobian, vector):
        return self._product(jacobian, vector.squeeze(-2)).unsqueeze(-2)

    def compose(self, later, earlier):
        return self._product(later, earlier)

    def transpose(self, jacobian):
        return torch.cat([jacobian[..., :1], jacobian[..., 1:].flip(-1)], -1)

    def to_dense(self, jacobian):
        size = jacobian.shape[-1]
        index = (torch.arange(size)[:, None] - torch.arange(size)[None, :]) % size
        return jacobian[..., index]

    def from_dense(self, matrix):
        return matrix[..., 0]

    @staticmethod
    def _product(a, b):
        return torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b), n=a.shape[-1])


@pytest.fixture
def _circulant():
    pararnn.register_structure(Circulant, "circulant")
    yield
    del STRUCTURES["circulant"]


class Wave(pararnn.Cell):
    """A linear travelling wave: each channel hands a part of its state to the next."""

    states = ("h",)
    gates = ("x",)
    params = {"speed": pararnn.Param("", std=0.0, mean=0.4)}
    structure = "circulant"

    def step(self, state, gate, param):
        neighbours = torch.cat([state.h[..., -1:], state.h[..., :-1]], -1)
        speed = param.speed[..., :1]
        return (1 - speed) * 0.9 * state.h + speed * neighbours + gate.x


@pytest.mark.usefixtures("_circulant")
def test_a_registered_structure_solves_by_newton():
    gates = torch.randn(2, 40, 1, 6, dtype=torch.float64)
    assert check_contract(Wave(6), gates, solver="newton").sweeps == 1


@pytest.mark.usefixtures("_circulant")
def test_a_registered_structure_is_checked():
    class Bent(Wave):
        def step(self, state, gate, param):
            return torch.tanh(super().step(state, gate, param))

    with pytest.raises(pararnn.StructureError, match="does not have it"):
        pararnn.program_of(Bent(6))


@pytest.mark.usefixtures("_circulant")
@pytest.mark.thorough
def test_a_registered_structure_with_a_jacobian_by_hand():
    class ByHand(Wave):
        def jacobian(self, state, gate, param):
            speed = param.speed[..., :1]
            zeros = state.h[..., 2:] * 0
            column = [(1 - speed) * 0.9 + 0 * state.h[..., :1], speed + 0 * state.h[..., :1]]
            return torch.cat([*column, zeros], -1)

    check_contract(ByHand(6), torch.randn(2, 40, 1, 6, dtype=torch.float64), solver="newton")

    class Wrong(ByHand):
        def jacobian(self, state, gate, param):
            return super().jacobian(state, gate, param) * 1.01

    with pytest.raises(pararnn.StructureError, match="jacobian is wrong"):
        pararnn.program_of(Wrong(6))


class OwnDiagonal(pararnn.Structure):
    """One state, channels on their own, with nothing of the library's diagonal."""

    name = "own_diagonal"
    couples_channels = False

    def apply(self, jacobian, vector):
        return jacobian * vector

    def compose(self, later, earlier):
        return later * earlier

    def transpose(self, jacobian):
        return jacobian

    def to_dense(self, jacobian):
        return torch.diag_embed(jacobian.squeeze(-2))

    def from_dense(self, matrix):
        return matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)


def test_a_registered_structure_of_channels_on_their_own():
    class Own(pararnn.Cell):
        states = ("h",)
        gates = ("x",)
        params = {"a": pararnn.Param(std=0.0, mean=0.9)}
        structure = "own_diagonal"

        def step(self, state, gate, param):
            return torch.tanh(gate.x + param.a * state.h)

    pararnn.register_structure(OwnDiagonal, "own_diagonal")
    try:
        check_contract(Own(4), torch.randn(2, 100, 1, 4), solver="newton", backend="torch")
    finally:
        del STRUCTURES["own_diagonal"]


class Clamped(pararnn.Cell):
    """Its Jacobian by hand forgets the clamp, which no random point reaches."""

    states = ("h",)
    gates = ("x",)
    params = {"a": pararnn.Param(std=0.0, mean=0.9)}

    def step(self, state, gate, param):
        h = param.a * state.h + gate.x
        return torch.minimum(h, 0 * h + 6)

    def jacobian(self, state, gate, param):
        return param.a + 0 * state.h


class DenseClamped(Clamped):
    structure = "dense"

    def jacobian(self, state, gate, param):
        return torch.diag_embed(super().jacobian(state, gate, param))


class Drifting(pararnn.Cell):
    """Its Jacobian by hand says that states beyond 2 are forgotten, so any are near enough."""

    states = ("h",)
    gates = ("x",)

    def step(self, state, gate, param):
        return state.h + 0.01 * gate.x + 5e-7 * torch.sin(state.h)

    def jacobian(self, state, gate, param):
        return torch.where(state.h > 2, 0 * state.h, 1 + 5e-7 * torch.cos(state.h))


@pytest.mark.parametrize(
    ("cls", "backend"),
    [
        (Clamped, "torch"),
        (Clamped, "scan"),
        (Clamped, "fused"),
        (DenseClamped, "torch"),
        (Drifting, "torch"),
        (Drifting, "scan"),
    ],
)
@pytest.mark.one_in(5)
def test_a_wrong_jacobian_by_hand_changes_no_result(cls, backend):
    torch.manual_seed(0)
    slow = cls is Drifting
    gates = 0.2 * torch.rand(1, 2000, 1, 4) if slow else 3 * torch.randn(2, 200, 1, 4)
    start = torch.full((len(gates), 4), 1.9)
    result = check_contract(cls(4), gates, start, solver="newton", backend=backend)
    assert not result.mended or backend == "fused"


@pytest.mark.usefixtures("_circulant")
def test_derived_jacobians_of_a_structure_are_made_in_parts(monkeypatch):
    gates = torch.randn(2, 40, 1, 6, dtype=torch.float64)
    whole = pararnn.solve(Wave(6, dtype=torch.float64), gates, solver="newton")[0]
    monkeypatch.setattr("pararnn.program.derive.DENSE_NUMBERS", 7 * 36)
    cell = Wave(6, dtype=torch.float64)
    check_contract(cell, gates, solver="newton")
    torch.testing.assert_close(pararnn.solve(cell, gates, solver="newton")[0], whole)
