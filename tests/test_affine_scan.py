"""The parallel affine scan equals the loop for every structure and length."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from pararnn.program.structure import BlockDiagonal, Dense, Diagonal, make_structure
from pararnn.solvers.affine_scan import affine_scan


def _random(structure, batch, length, channels, dtype=torch.float64):
    size = structure.num_states * channels
    dense = torch.randn(batch, max(length - 1, 0), size, size, dtype=dtype)
    if structure.couples_channels:
        jacobian = dense / size**0.5
    elif isinstance(structure, Diagonal):
        jacobian = dense.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    else:
        n = structure.num_states
        jacobian = torch.randn(batch, max(length - 1, 0), n, n, channels, dtype=dtype) / n**0.5
    return jacobian, torch.randn(batch, length, structure.num_states, channels, dtype=dtype)


def _loop(structure, jacobian, rhs):
    out = [rhs[:, :1]] if rhs.shape[1] else []
    for step in range(1, rhs.shape[1]):
        carry = structure.apply(jacobian[:, step - 1 : step], out[-1])
        out.append(rhs[:, step : step + 1] + carry)
    return torch.cat(out, 1) if out else rhs


@settings(max_examples=60)
@given(
    kind=st.sampled_from(
        [("diagonal", 1), ("block_diagonal", 2), ("block_diagonal", 5), ("dense", 2)]
    ),
    batch=st.integers(0, 3),
    length=st.integers(0, 70),
    channels=st.integers(1, 4),
)
def test_scan_equals_loop(kind, batch, length, channels):
    structure = make_structure(*kind)
    jacobian, rhs = _random(structure, batch, length, channels)
    scan = affine_scan(structure, jacobian, rhs)
    loop = _loop(structure, jacobian, rhs)
    assert scan.shape == rhs.shape
    assert torch.allclose(scan, loop, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 1000, 1023, 1025])
def test_scan_solves_the_recurrence(length):
    structure = Diagonal(1)
    jacobian, rhs = _random(structure, 2, length, 3)
    jacobian = jacobian.tanh()
    x = affine_scan(structure, jacobian, rhs)
    assert torch.equal(x[:, 0], rhs[:, 0])
    assert torch.allclose(x[:, 1:], jacobian * x[:, :-1] + rhs[:, 1:], atol=1e-12)


def test_first_step_ignores_what_comes_before():
    # The scan has no Jacobian for step 0, and none of the later ones may touch it.
    structure = BlockDiagonal(2)
    jacobian, rhs = _random(structure, 1, 9, 2)
    jacobian[:, 4] = 0
    other_rhs = rhs.clone()
    other_rhs[:, :5] += 1
    same, other = affine_scan(structure, jacobian, rhs), affine_scan(structure, jacobian, other_rhs)
    assert torch.equal(same[:, 5:], other[:, 5:])
    assert not torch.equal(same[:, :5], other[:, :5])


def test_depth_is_logarithmic():
    calls = []

    class Counting(Dense):
        def compose(self, later, earlier):
            calls.append(later.shape[1])
            return super().compose(later, earlier)

    structure = Counting(1)
    jacobian, rhs = _random(structure, 1, 1024, 2)
    affine_scan(structure, jacobian / 4, rhs)
    assert len(calls) == 9  # the last pair is applied, not composed
    assert sum(calls) < 1024
