"""Windows along an axis: their numbers, derivatives, copies by vmap, and kernels."""

import pytest
import torch
from table import needs_compiler
from test_axes_twice import FUSED, TORCH, leaves_of, results_of
from test_matrix import _close

import pararnn
from pararnn import Param
from pararnn.program.program import program_of


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_numbers_and_derivatives(size):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    result, before = pararnn.windows(x, size), (size - 1) // 2
    assert result.shape == (2, 3, 4, size)
    for s in range(4):
        for j in range(size):
            inside = 0 <= s + j - before < 4
            expected = x[..., s + j - before] if inside else torch.zeros(2, 3)
            assert torch.equal(result[..., s, j], expected.to(x.dtype))
    assert torch.autograd.gradcheck(lambda x: pararnn.windows(x, size), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: pararnn.windows(x, size), x)
    copies = torch.func.vmap(lambda x: pararnn.windows(x, size), 1, 1)(x)
    assert torch.equal(copies, result)
    grads = torch.func.vmap(torch.func.grad(lambda x: pararnn.windows(x, size).sin().sum()))(x)
    (expected,) = torch.autograd.grad(result.sin().sum(), x)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 0), (0,), (0, 4)])
def test_an_axis_without_entries_has_no_windows(shape, size):
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    assert pararnn.windows(x, size).shape == (*shape, size)
    assert torch.autograd.gradcheck(lambda x: pararnn.windows(x, size), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: pararnn.windows(x, size), x)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_are_those_of_a_convolution(size):
    x, weight = torch.randn(2, 1, 9), torch.randn(3, 1, size)
    padded = torch.nn.functional.pad(x, ((size - 1) // 2, size // 2))
    expected = torch.nn.functional.conv1d(padded, weight)
    ours = pararnn.windows(x[:, 0], size) @ weight[:, 0].T
    torch.testing.assert_close(ours.mT, expected)


@pytest.mark.parametrize(("x", "size"), [(torch.ones(3), 0), (torch.tensor(1.0), 3)])
def test_wrong_arguments_say_what_to_do(x, size):
    with pytest.raises(ValueError, match="a tensor with an axis and a size of at least 1, got"):
        pararnn.windows(x, size)


class Convolves(pararnn.Cell):
    """Windows along both axes of a matrix, of a vector and of windows, before and after products,
    with more taps than the axis has entries."""

    states, gates = {"H": ("K", "V"), "k": "K"}, {"x": ("K", "V"), "y": "K"}
    params = {"F": Param("H,J"), "G": Param("H,T,C"), "W": Param("H,C,V")}
    config = {"J": 2, "T": 9, "C": 3}

    def step(self, state, gate, param):
        along_values = (pararnn.windows(state.H, self.J) * param.F[..., None, None, :]).sum(-1)
        along_keys = pararnn.windows(torch.tanh(state.H + gate.x).mT, self.T)
        along_keys = torch.einsum("...vkt,...tc->...vkc", along_keys, param.G)
        filters = pararnn.windows(state.k, self.T) @ param.G @ param.W
        twice = pararnn.windows(pararnn.windows(gate.y * state.k, self.J), self.J).amax(-1)
        new = along_values + along_keys.sum(-1).mT + filters
        return torch.tanh(new), torch.sigmoid(gate.y) * state.k + 0.1 * twice.sum(-1)

    def readout(self, state, gate, param):
        return (pararnn.windows(state.H, self.J).sum(-1) * state.k[..., None]).sum(-2)


class Register(pararnn.Cell):
    """Rows that move on by one, entries of axes by index, of a vector and to a number, a tap of
    windows, an entry of a parameter, and masks by index."""

    states, gates = {"X": ("C", "K"), "h": "V"}, {"k": "K", "x": "V", "y": ("C", "K")}
    params = {"F": Param("H,C,V"), "W": Param("H,K,K"), "G": Param("H,J")}
    config = {"C": 4, "J": 3}

    def step(self, state, gate, param):
        moved = torch.nn.functional.pad(state.X.mT, (-1, 1)).mT
        X = torch.select_scatter(moved, gate.k, -2, -1) * torch.sigmoid(gate.y)
        X = X + 0.1 * torch.nn.functional.pad(gate.y, (0, 0, 2, -2)) @ param.W
        product = (state.X[..., -1, :] * state.X[..., 0, :]).sum(-1, keepdim=True)
        tap = pararnn.windows(state.h, self.J)[..., 2] * param.G[..., 0][..., None]
        new = gate.x + 0.5 * tap + product * param.F[..., 1, :] * state.X[..., 1, 0][..., None]
        return torch.tanh(X), torch.tanh(new)

    def readout(self, state, gate, param):
        return state.h * (state.X[..., :, -1].sum(-1) + gate.y[..., 0, 1])[..., None]


CASES = [(Convolves, 9, 17), (Convolves, 4, 3), (Register, 3, 5), (Register, 17, 9)]


@needs_compiler
@pytest.mark.parametrize(("cls", "keys", "values"), CASES)
@pytest.mark.one_in(2)
def test_kernels_are_the_loop(cls, keys, values):
    torch.manual_seed(0)
    cell = cls(2 * values, num_heads=2, K=keys, dtype=torch.float64)
    assert program_of(cell).why_no_family is None
    gates, initial = leaves_of(cell, 18, 19)
    _close(*(results_of(cell, gates, initial, pair) for pair in (FUSED, TORCH)))


def _wrap(self, state, gate, param):
    return torch.nn.functional.pad(state.h, (1, 0))[..., :-1], state.k


def _fill(self, state, gate, param):
    return torch.nn.functional.pad(state.h, (1, -1), value=1.0), state.k


@pytest.mark.parametrize("step", [_wrap, _fill])
def test_other_pads_run_in_pytorch(step):
    body = {"states": {"h": "V", "k": "K"}, "gates": {"x": "V", "y": "K"}, "step": step}
    with pytest.warns(pararnn.CellCostWarning, match=r"constant_pad_nd|slice"):
        program = program_of(type("Pads", (pararnn.Cell,), body)(6, num_heads=2, K=4))
    assert program.family is None


class Filters(pararnn.Cell):
    """A convolution along an axis of fixed length, and no copy."""

    states = {"h": "V"}
    gates = {"x": "V"}
    params = {"F": Param("H,J")}
    config = {"J": 3}

    def step(self, state, gate, param):
        near = pararnn.windows(state.h, self.J) * param.F[..., None, :]
        return torch.tanh(gate.x + near.sum(-1))


def test_what_cannot_run_them_says_so():
    program = program_of(Convolves(6, num_heads=2, K=4))
    assert "windows" in program.affine_form()
