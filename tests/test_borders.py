"""What is not finite stays in its sequence, channel and state, in both passes of every pair.

The truth is the loop over each piece between borders on its own: there is nothing to cross.
"""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from call_results import as_tuple
from mixing_cells import Coupled
from table import FAST_PAIRS, PLAIN, pairs_of
from torch import Tensor

import pararnn
from pararnn import Param

NAN, INF = math.nan, math.inf
CUTS, STEPS, RESET, CHANNELS = (0, 14, 28, 42), 45, 35, 3
CHANNEL = 1
"""The poisoned one."""


class Overwritten(pararnn.Cell):
    """A large input replaces the state, whatever that was."""

    states, gates, params = ("h",), ("x",), {"a": Param("D", std=0.1)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        other = torch.tanh((0.9 + param.a) * state.h + gate.x)
        return torch.where(gate.x > 1.5, gate.x, other)


class Apart(pararnn.Cell):
    """Two states that know nothing of each other."""

    states, gates = ("h", "k"), ("x", "y")
    params = {"a": Param("D", std=0.1), "b": Param("D", std=0.1)}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        return torch.tanh(param.a * state.h + gate.x), torch.tanh(param.b * state.k + gate.y)


class Rate(pararnn.Cell):
    """Divides by a field, which zeros at padding do not suit."""

    states, gates, fields, params = ("h",), ("x",), ("dt",), {"a": Param("D", std=0.1)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.tanh(param.a * state.h / gate.dt + gate.x)


class Matrix(pararnn.Cell):
    """Mixes channels."""

    states, gates, params = ("h",), ("x",), {"w": Param("D,D", std=0.2)}
    structure = "dense"

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.tanh(state.h @ param.w.mT + gate.x)


CELLS = {
    "gru": pararnn.GRUCell,
    "lstm": pararnn.LSTMCell,
    "overwritten": Overwritten,
    "apart": Apart,
    "rate": Rate,
    "dense-gru": Matrix,
    "Coupled": Coupled,
}

POISONS = {  # name -> (tensor, index of its step or sequence, value)
    "nothing": [],
    "NaN in a sequence": [("gates", 30, NAN)],
    "infinity in a sequence": [("gates", 20, INF)],
    "NaN at a first step": [("gates", 14, NAN)],
    "NaN at a last step": [("gates", 27, NAN)],
    "NaN at a reset": [("gates", RESET, NAN)],
    "NaN before a step that overwrites": [("gates", 18, NAN), ("gates", 22, 2.0)],
    "NaN at padding": [("gates", 43, NAN)],
    "infinity at padding": [("gates", 42, INF), ("gates", 44, -INF)],
    "NaN in an initial state": [("initial", 1, NAN)],
    "infinity in an initial state": [("initial", 0, INF)],
    "NaN arrives": [("grad states", 20, NAN)],
    "infinity arrives": [("grad states", 3, INF)],
    "NaN arrives at padding": [("grad states", 43, NAN)],
    "NaN arrives at a final state": [("grad final", 1, NAN)],
    "NaN in a field": [("dt", 30, NAN)],
    "infinity in a field": [("dt", 20, INF)],
    "zero in a field at padding": [("dt", 42, 0.0), ("dt", 44, NAN)],
}


ROWS = [
    pytest.param(name, poison, id=f"{name}-{poison}")
    for name, cell in CELLS.items()
    for poison, parts in POISONS.items()
    if all(what != "dt" or "dt" in cell.fields for what, _, _ in parts)
]


class Case(NamedTuple):
    """A pack with padding; `initial` and `final` hold a tensor (3, D) a state."""

    cell: pararnn.Cell
    gates: Tensor
    fields: dict[str, Tensor]
    initial: tuple[Tensor, ...]
    grad_states: tuple[Tensor, ...]
    grad_final: tuple[Tensor, ...]


def _case(name: str, poison: str) -> Case:
    torch.manual_seed(0)
    cell = CELLS[name](CHANNELS, dtype=torch.float64)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, CHANNELS, dtype=torch.float64)

    def by_state(*size: int) -> tuple[Tensor, ...]:
        return tuple(draw(*size) for _ in cell.states)

    gates = draw(1, STEPS, len(cell.gates)).clamp(max=1)
    fields = {field: draw(1, STEPS).exp() for field in cell.fields}
    case = Case(cell, gates, fields, by_state(3), by_state(1, STEPS), by_state(3))
    tensors = {
        "gates": gates[0, :, 0],
        "initial": case.initial[0],
        "grad states": case.grad_states[0][0],
        "grad final": case.grad_final[0],
        **{name: field[0] for name, field in fields.items()},
    }
    for what, at, value in POISONS[poison]:
        tensors[what][at, CHANNEL] = value
    return case


def _solve(case: Case, pair: tuple[str, str], **options: Any) -> dict[str, Tensor]:
    """States, final states and all gradients by name."""
    cell = case.cell
    gates = case.gates.clone().requires_grad_()
    fields = {name: field.clone().requires_grad_() for name, field in case.fields.items()}
    initial = tuple(h.clone().requires_grad_() for h in case.initial)
    with pararnn.using(*pair, segments=4, burn_in=2):
        states, final = pararnn.solve(cell, gates, initial, fields=fields, **options)
    states, final = map(as_tuple, (states, final))
    leaves = {"gates": gates, **fields, **dict(cell.named_parameters())}
    leaves |= {f"initial {name}": h for name, h in zip(cell.states, initial, strict=True)}
    cotangents = (*case.grad_states, *case.grad_final)
    grads = torch.autograd.grad((*states, *final), list(leaves.values()), cotangents)
    by_name = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    for name, all_states, last in zip(cell.states, states, final, strict=True):
        by_name |= {name: all_states.detach(), f"final {name}": last.detach()}
    return by_name


class Piece(NamedTuple):
    """Steps of a sequence between borders; whether the sequence begins and ends with them."""

    sequence: slice
    steps: slice
    first: bool
    last: bool


def _pieces(reverse: bool) -> list[Piece]:
    pieces = []
    cut = RESET + 1 if reverse else RESET
    for s, (begin, end) in enumerate(itertools.pairwise(CUTS)):
        bounds = [begin, *([cut] if begin < cut < end else []), end]
        for a, b in itertools.pairwise(bounds):
            edges = (b == end, a == begin) if reverse else (a == begin, b == end)
            pieces.append(Piece(slice(s, s + 1), slice(a, b), *edges))
    return pieces


def _cut_out(case: Case, piece: Piece) -> Case:
    nothing = case.gates.new_zeros(1, CHANNELS)
    return Case(
        case.cell,
        case.gates[:, piece.steps],
        {name: field[:, piece.steps] for name, field in case.fields.items()},
        tuple(h[piece.sequence] if piece.first else nothing for h in case.initial),
        tuple(g[:, piece.steps] for g in case.grad_states),
        tuple(g[piece.sequence] if piece.last else nothing for g in case.grad_final),
    )


def _truth(case: Case, reverse: bool) -> dict[str, Tensor]:
    """The loop over every piece on its own, put together."""
    cell, whole = case.cell, {}
    over_time = {"grad gates", *(f"grad {name}" for name in cell.fields), *cell.states}
    for piece in _pieces(reverse):
        for name, value in _solve(_cut_out(case, piece), PLAIN, reverse=reverse).items():
            if name in over_time:
                full = value.new_zeros(1, STEPS, *value.shape[2:])
                whole.setdefault(name, full)[:, piece.steps] = value
            elif name.startswith(("final", "grad initial")):
                full = value.new_zeros(len(CUTS) - 1, *value.shape[1:])
                if piece.last if name.startswith("final") else piece.first:
                    whole.setdefault(name, full)[piece.sequence] = value
            else:
                whole[name] = whole.get(name, 0) + value
    return whole


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(("name", "poison"), ROWS)
@pytest.mark.one_in(73)
def test_nothing_crosses_a_border(name, poison, reverse):
    case = _case(name, poison)
    truth = _truth(case, reverse)
    options = {"cu_seqlens": torch.tensor(CUTS), "reverse": reverse}
    options["reset"] = torch.arange(STEPS).unsqueeze(0) == RESET
    for pair in FAST_PAIRS if name == "Coupled" else pairs_of(name):
        for what, got in _solve(case, pair, **options).items():
            reference, where = truth[what], (pair, what)
            assert torch.equal(got.isfinite(), reference.isfinite()), where
            if not what.startswith("grad"):
                assert torch.equal(got.isnan(), reference.isnan()), where
            finite = reference.isfinite()
            torch.testing.assert_close(got[finite], reference[finite], rtol=1e-10, atol=1e-12)


class Rooted(pararnn.Cell):
    """Has no derivative at the zero state."""

    states, gates, params = ("h",), ("x",), {"a": Param("D", mean=0.9, std=0.1)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return torch.sqrt((param.a * state.h).abs()) + torch.sigmoid(gate.x)


class Unit(pararnn.Cell):
    """A state on a sphere, which zero is not on."""

    states, gates, params = ("h",), ("x",), {"w": Param("D,D"), "b": Param("D", mean=1.0)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        unit = state.h / state.h.square().sum(-1, keepdim=True).sqrt()
        return torch.tanh(param.b * (unit @ param.w) + gate.x)


class UnitMatrix(pararnn.Cell):
    """The same with a matrix state."""

    states, gates, params = {"H": ("K", "V")}, {"k": "K", "v": "V"}, {"b": Param("H,K", mean=1.0)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        unit = state.H / state.H.square().sum((-2, -1), keepdim=True).sqrt()
        return unit * param.b[..., None] + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return state.H.sum(-2)


class RootedMatrix(UnitMatrix):
    """One with independent entries."""

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        root = torch.sqrt((param.b[..., None] * state.H).abs())
        return root + (gate.k[..., :, None] * gate.v[..., None, :]).sigmoid()


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.filterwarnings("ignore::pararnn.ConvergenceWarning")  # of a guess from zero
@pytest.mark.parametrize("cls", [Rooted, Unit, UnitMatrix, RootedMatrix])
def test_padding_starts_from_a_state_that_steps_know(cls):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(cls, 3, 4, dtype=torch.float64)
    x = torch.randn(1, 12, 3, dtype=torch.float64)
    h_0 = torch.rand(1, 2, *layer.layers[0].cell.state_sizes[0], dtype=torch.float64) + 0.1
    ran = 0
    for solver, backend in itertools.product(["sequential", "newton"], ["torch", "scan", "fused"]):
        grads = []
        for steps in (9, 12):  # without and with padding
            options = {"cu_seqlens": [0, 4, 9], "solver": solver, "backend": backend}
            try:
                output, _ = layer(x[:, :steps], h_0, **options)
            except pararnn.EngineError:
                break
            grads.append(torch.autograd.grad(output.square().sum(), [*layer.parameters()]))
        else:
            torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)
            ran += 1
        if grads:
            output, _ = layer(x, h_0, **options | {"cu_seqlens": [0, 0, 0]})
            nothing = torch.autograd.grad(output.sum(), [*layer.parameters()], allow_unused=True)
            assert not any(grad.any() for grad in nothing if grad is not None)
    assert ran > 1
    for options in ({"lengths": [4, 9]}, {"lengths": [4, 9], "padding": "left"}):
        report = pararnn.verify(layer, x.expand(2, -1, -1)[:, :9], h_0, **options)
        assert report.passed, report
