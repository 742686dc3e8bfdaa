"""Cells that read a memory, and plain loops of them: one head of one row, step after step."""

from dataclasses import dataclass

import torch
from call_results import as_tuple
from plain_loop import run_plainly

import pararnn
import pararnn.zoo as zoo
from pararnn import Param


def _row(x):
    return x[..., None, :]


class Adapted(pararnn.Cell):
    """A recurrence whose matrix is one of all rows and one of low rank of the row (R of a call)."""

    states = {"h": "V"}
    gates = {"x": "V"}
    params = {"W": Param("H,V,V")}
    memory = {"A": ("R", "V"), "B": ("R", "V")}

    def step(self, state, gate, param, memory):
        of_row = (_row((_row(state.h) @ memory.A.mT).squeeze(-2)) @ memory.B).squeeze(-2)
        return torch.tanh(gate.x + (_row(state.h) @ param.W).squeeze(-2) + 0.3 * of_row)


class Weights(pararnn.Cell):
    """A recurrence by matrices of the row, as a hypernetwork makes them: a vector and a matrix are
    multiplied by them, also transposed, and twice by one. Where vectors of kernels are filled up
    with zeros, the logarithm is infinite."""

    states = {"h": "V", "S": ("K", "V")}
    gates = {"x": "V", "k": "K"}
    params = {"W": Param("H,V,V")}
    memory = {"A": ("V", "V"), "b": "V"}

    def step(self, state, gate, param, memory):
        first = torch.tanh(gate.x + (_row(state.h) @ memory.A).squeeze(-2) + memory.b)
        logs = 0.1 * first * torch.log(gate.x * gate.x)
        both = (_row(logs) @ memory.A.mT).squeeze(-2) + (_row(state.h) @ param.W).squeeze(-2)
        S = torch.tanh(state.S @ memory.A + gate.k[..., :, None] * _row(first))
        return torch.tanh(both + S.mean(-2)), S


class Several(pararnn.Cell):
    """Two axes of a call, one of them last; a vector and a number; a matrix state; a maximum, a
    softmax whose mask is of bools, and a sum of both axes."""

    states = {"H": ("K", "V"), "u": "K"}
    gates = {"x": "V", "k": "K"}
    params = {"d": Param("H,K", std=0.5)}
    memory = {"a": ("K", "S"), "b": ("T", "V"), "mask": "T", "speaker": "V", "heat": ""}

    def step(self, state, gate, param, memory):
        scores = (state.u[..., :, None] * memory.a).sum(-2)
        best = torch.sigmoid(scores.amax(-1))[..., None]
        energies = (memory.b * (gate.x + memory.speaker)[..., None, :]).sum(-1)
        energies = energies * torch.sigmoid(memory.heat)[..., None]
        weights = torch.softmax(torch.where(memory.mask > 0, energies, -torch.inf), -1)
        found = (_row(weights) @ memory.b).squeeze(-2)
        both = (torch.tanh(scores)[..., :, None] * weights[..., None, :]).sum((-2, -1))
        new = torch.tanh(state.H * param.d[..., :, None] + gate.k[..., :, None] * _row(found))
        return new, torch.tanh(best * state.u + gate.k + both[..., None] + new.mean(-1))

    def readout(self, state, gate, param, memory):
        return (_row(state.u) @ state.H).squeeze(-2) + memory.speaker


class Covered(pararnn.Cell):
    """Attends less to what it has attended to: a state has the axis S of a call."""

    states = {"h": "V", "seen": "S"}
    gates = {"x": "V"}
    params = {"c": Param("H")}
    memory = {"values": ("S", "V"), "mask": "S"}

    def step(self, state, gate, param, memory):
        query = torch.tanh(gate.x + state.h)
        energies = (memory.values * query[..., None, :]).sum(-1)
        energies = energies - param.c[..., None] * state.seen + memory.mask
        weights = torch.softmax(energies, -1)
        return (weights[..., None, :] @ memory.values).squeeze(-2), state.seen + weights


class TwoEncoders(pararnn.Cell):
    """Attends to the outputs of two encoders, of which one has what it has seen as a state."""

    states = {"h": "V", "seen": "R"}
    gates = {"x": "V"}
    params = {"W": Param("H,E,V")}
    memory = {"keys": ("S", "E"), "notes": ("R", "E")}
    config = {"E": None}

    def step(self, state, gate, param, memory):
        query = _row(state.h) @ param.W.mT
        first = torch.softmax((memory.keys * query).sum(-1), -1)
        second = torch.softmax((memory.notes * query).sum(-1) - 0.5 * state.seen, -1)
        found = _row(first) @ memory.keys + _row(second) @ memory.notes
        return torch.tanh(gate.x + (found @ param.W).squeeze(-2)), state.seen + second


class Spread(pararnn.Cell):
    """A distribution over the S places of a row, moved by its matrix of transitions, and features
    of all places by the same matrix: a square memory of an axis of a call, also transposed."""

    states = {"p": "S", "H": ("V", "S")}
    gates = {"x": "V"}
    params = {"w": Param("H,V", std=0.5)}
    memory = {"A": ("S", "S"), "b": ("V", "S")}

    def step(self, state, gate, param, memory):
        p = torch.softmax((_row(state.p) @ memory.A).squeeze(-2), -1)
        H = state.H @ memory.A.mT + memory.b * gate.x[..., :, None] * _row(p)
        return p, torch.tanh(param.w[..., :, None] * H)

    def readout(self, state, gate, param, memory):
        return (state.H * _row(state.p)).sum(-1)


def _attention_lstm(s, g, p, m):
    return _attend(s, g, p, m)[:2]


def _attend(s, g, p, m, features=0.0):
    """The new states, the output, and the weights of the memory."""
    at = {
        n: g[n] + torch.mv(p[f"R_{n}"].T, s["h"]) + torch.mv(p[f"C_{n}"].T, s["a"]) for n in "ifgo"
    }
    i, f, o = (1 / (1 + torch.exp(-at[n])) for n in "ifo")
    c = f * s["c"] + i * torch.tanh(at["g"])
    h = o * torch.tanh(c)
    energies = torch.stack(
        [torch.dot(p["w"], torch.tanh(key + torch.mv(p["Q"], h))) for key in m["keys"] + features]
    )
    powers = torch.exp(energies + m["mask"])
    weights = powers / powers.sum()
    a = sum(x * value for x, value in zip(weights, m["values"], strict=True))
    return {"h": h, "c": c, "a": a}, h + torch.mv(p["P"].T, a), weights


def _location_attention_lstm(s, g, p, m):
    """By the convolution of PyTorch, which has no flip."""
    filters = p["F"].T[:, None]  # (C, 1, J), J odd
    padding = filters.shape[2] // 2
    located = torch.nn.functional.conv1d(s["past"][None], filters, padding=padding)
    new, output, weights = _attend(s, g, p, m, located.T @ p["U"])
    return {**new, "past": s["past"] + weights}, output


def _adapted(s, g, p, m):
    matrix = p["W"] + 0.3 * sum(torch.outer(a, b) for a, b in zip(m["A"], m["B"], strict=True))
    h = torch.tanh(g["x"] + torch.mv(matrix.T, s["h"]))
    return {"h": h}, h


def _weights(s, g, p, m):
    first = torch.tanh(g["x"] + torch.mv(m["A"].T, s["h"]) + m["b"])
    S = torch.tanh(s["S"] @ m["A"] + torch.outer(g["k"], first))
    logs = 0.1 * first * torch.log(g["x"] ** 2)
    h = torch.tanh(torch.mv(m["A"], logs) + torch.mv(p["W"].T, s["h"]) + S.sum(0) / len(S))
    return {"h": h, "S": S}, h


def _several(s, g, p, m):
    scores = torch.mv(m["a"].T, s["u"])
    real = m["mask"] != 0
    energies = torch.mv(m["b"], g["x"] + m["speaker"])[real] / (1 + torch.exp(-m["heat"]))
    weights = torch.exp(energies) / torch.exp(energies).sum()
    found = torch.mv(m["b"][real].T, weights)
    new = torch.tanh(p["d"][:, None] * s["H"] + torch.outer(g["k"], found))
    both = torch.outer(torch.tanh(scores), weights).sum()
    best = 1 / (1 + torch.exp(-scores.max()))
    u = torch.tanh(best * s["u"] + g["k"] + both + new.sum(1) / new.shape[1])
    return {"H": new, "u": u}, torch.mv(new.T, u) + m["speaker"]


def _covered(s, g, p, m):
    query = torch.tanh(g["x"] + s["h"])
    powers = torch.exp(torch.mv(m["values"], query) - p["c"] * s["seen"] + m["mask"])
    weights = powers / powers.sum()
    h = torch.mv(m["values"].T, weights)
    return {"h": h, "seen": s["seen"] + weights}, h


def _two_encoders(s, g, p, m):
    query, found, seen = torch.mv(p["W"], s["h"]), 0.0, s["seen"]
    for name, less in (("keys", 0.0), ("notes", 0.5 * seen)):
        powers = torch.exp(torch.mv(m[name], query) - less)
        weights = powers / powers.sum()
        found = found + torch.mv(m[name].T, weights)
    h = torch.tanh(g["x"] + torch.mv(p["W"].T, found))
    return {"h": h, "seen": seen + weights}, h


def _spread(s, g, p, m):
    powers = torch.exp(torch.mv(m["A"].T, s["p"]))
    places = powers / powers.sum()
    features = torch.stack([torch.mv(m["A"], row) for row in s["H"]])
    H = torch.tanh(p["w"][:, None] * (features + m["b"] * torch.outer(g["x"], places)))
    return {"p": places, "H": H}, torch.mv(H, places)


LOOPS = {
    "attention-lstm": (zoo.AttentionLSTMCell, _attention_lstm),
    "location-attention-lstm": (zoo.LocationAttentionLSTMCell, _location_attention_lstm),
    "adapted": (Adapted, _adapted),
    "covered": (Covered, _covered),
    "several": (Several, _several),
    "spread": (Spread, _spread),
    "two-encoders": (TwoEncoders, _two_encoders),
    "weights": (Weights, _weights),
}
"""Classes, and a step: (states, gates, parameters, memories) of one head -> states and output."""


AXES = {"K": 4, "E": 5, "J": 3, "C": 2}
"""Lengths of axes that are arguments of a cell."""


@dataclass
class Call:
    """A call of `solve` on a cell with memories, with leaves that require gradients."""

    name: str
    cell: pararnn.Cell
    gates: torch.Tensor
    initial: tuple[torch.Tensor, ...]
    memory: dict[str, torch.Tensor]

    def leaves(self):
        """Gates, initial states, parameters and memories."""
        memories = [m for m in self.memory.values() if m.requires_grad]
        return [self.gates, *self.initial, *self.cell.parameters(), *memories]

    def solve(self, **options):
        """Outputs and final states, in one list."""
        arguments = {"memory": self.memory} | options
        output, final = pararnn.solve(self.cell, self.gates, self.initial, **arguments)
        return [output, *as_tuple(final)]


def make_call(
    name, rows=2, steps=5, lengths=(7, 4), *, heads=2, values=3, dtype=torch.float64, seed=0,
    sequences=None, by_head=False,
):  # fmt: skip
    """A cell, and random gates, states and memories; lengths: of the axes that a call decides. Of
    masks, the first entry is real, and about half of the others."""
    torch.manual_seed(seed)
    cls, count = LOOPS[name][0], rows if sequences is None else sequences
    axes = {axis: length for axis, length in AXES.items() if axis in cls.config}
    cell = cls(heads * values, num_heads=heads, dtype=dtype, **axes)
    of_calls = dict(zip(cls.head_axes.of_calls, lengths, strict=False))
    sizes = cell.head_sizes.of_call(of_calls)
    gates = torch.randn(rows, steps, heads, sizes.width, dtype=torch.float64)
    initial = [0.5 * torch.randn(count, *size, dtype=torch.float64) for size in sizes.state_sizes]
    leaf = lambda x: x.to(dtype).requires_grad_()  # noqa: E731
    memory = {}
    for key, size in zip(cls.memory, sizes.memory_sizes, strict=True):
        shape = (count, heads, *size) if by_head else (count, *size)
        if key == "mask":
            real = torch.rand(shape) < 0.5
            real[..., 0] = True
            of_floats = issubclass(cls, (zoo.AttentionLSTMCell, Covered))
            zeros = torch.zeros(shape, dtype=dtype)
            memory[key] = zeros.masked_fill(~real, -torch.inf) if of_floats else real
        else:
            # States that a matrix enlarges at every step would enlarge what is rounded as much.
            is_square = len(size) > len({*cls.memory[key]})
            scale = size[-1] ** -0.5 if is_square and size[-1] else 1
            memory[key] = leaf(0.5 * scale * torch.randn(shape, dtype=torch.float64))
    return Call(name, cell, leaf(gates), tuple(map(leaf, initial)), memory)


def loop(call, **options):
    """Outputs and final states by the plain loop, in one list."""
    params = dict(call.cell.named_parameters())
    arguments = (call.cell, call.gates, call.initial, params, call.memory)
    output, final = run_plainly(LOOPS[call.name][1], *arguments, **options)
    return [output, *final]
