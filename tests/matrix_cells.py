"""Plain loops of the matrix cells of the zoo: one head of one row, one step after the other."""

import math
from dataclasses import dataclass

import torch
from plain_loop import run_plainly

import pararnn.zoo as zoo
from pararnn.cells import Cell


def _m2rnn(s, g, p):
    f = 1 / (1 + torch.exp(-g["f"]))
    new = torch.tanh(torch.einsum("ij,jl->il", s["H"], p["W"]) + torch.outer(g["k"], g["v"]))
    h = f * s["H"] + (1 - f) * new
    return {"H": h}, torch.mv(h.T, g["q"])


def _unit(x):
    return x / torch.sqrt(torch.dot(x, x) + 1e-6)


def _gated_delta(s, g, p):
    a, b = 1 / (1 + torch.exp(-g["a"])), 1 / (1 + torch.exp(-g["b"]))
    k, eye = _unit(g["k"]), torch.eye(len(g["k"]), dtype=g["k"].dtype)
    new = a * (eye - b * torch.outer(k, k)) @ s["S"] + b * torch.outer(k, g["v"])
    return {"S": new}, torch.mv(new.T, _unit(g["q"]))


def _rwkv7(s, g, p):
    """In the paper's own order, values by keys, with its transition matrix."""
    c = _unit(g["c"])
    w = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-g["w"])))
    a = 1 / (1 + torch.exp(-g["a"]))
    transition = torch.diag(w) - torch.outer(c, a * c)
    values_by_keys = s["S"].T @ transition + torch.outer(g["v"], g["k"])
    return {"S": values_by_keys.T}, torch.mv(values_by_keys, g["r"])


def _mlstm(s, g, p):
    """The paper's unstabilised equations, in memories that the stabiliser scales."""
    k = g["k"] / math.sqrt(len(g["k"]))
    scale = torch.exp(s["m"])
    f = 1 / (1 + torch.exp(-g["f"]))
    c = f * scale * s["C"] + torch.exp(g["i"]) * torch.outer(k, g["v"])
    n = f * scale * s["n"] + torch.exp(g["i"]) * k
    y = torch.mv(c.T, g["q"]) / torch.clamp(torch.dot(n, g["q"]).abs(), min=1)
    m = torch.maximum(torch.log(f) + s["m"], g["i"])
    new = {"C": c * torch.exp(-m), "n": n * torch.exp(-m), "m": m}
    return new, y / (1 + torch.exp(-g["o"]))


def _hopfield(s, g, p):
    def match(logits):
        weights = torch.exp(logits - logits.max())
        return weights / weights.sum()

    rate = match(torch.mv(s["M"], g["x"]) + p["P"]) / (1 + torch.exp(-g["b"]))
    rows = [row + r * (g["x"] - row) for row, r in zip(s["M"], rate, strict=True)]
    new = torch.stack(rows)
    return {"M": new}, torch.mv(new.T, match(torch.mv(new, g["q"])))


def _titans(s, g, p):
    """As gradient descent: momentum minus the rate times the gradient."""
    a, e, t = (1 / (1 + torch.exp(-g[name])) for name in ("a", "e", "t"))
    k = _unit(g["k"])
    error = g["v"] - torch.mv(s["M"].T, k)
    gradient = -torch.outer(k, error)
    momentum = e * s["S"] - t * gradient
    memory = s["M"] - a * s["M"] + momentum
    return {"M": memory, "S": momentum}, torch.mv(memory.T, _unit(g["q"]))


def _atlas(s, g, p):
    a, e, t = (1 / (1 + torch.exp(-g[name])) for name in ("a", "e", "t"))
    k = _unit(g["k"])
    momentum = e * s["S"] + t * torch.outer(k, g["v"] - torch.mv(s["M"].T, k))
    memory = a * s["M"] + _muon(momentum, "atlas")
    return {"M": memory, "S": momentum}, torch.mv(memory.T, _unit(g["q"]))


def _muon(momentum, name):
    """The iteration by values: of the transpose it is the transpose."""
    config = CONFIG[name]
    step = (momentum / torch.sqrt((momentum * momentum).sum() + 1e-6)).T
    first, second, third = config["coefficients"]
    for _ in range(config["iterations"]):
        square = step @ step.T
        step = first * step + second * square @ step + third * square @ square @ step
    return step.T


def _atlas_window(s, g, p):
    """Token by token, each by its gradient."""
    a, e, t = (1 / (1 + torch.exp(-g[name])) for name in ("a", "e", "t"))
    keys = [*s["keys"][1:], _unit(g["k"])]
    values = [*s["values"][1:], g["v"]]
    momentum = e * s["S"]
    for rate, k, v in zip(t, keys, values, strict=True):
        momentum = momentum - rate * torch.outer(k, torch.mv(s["M"].T, k) - v)
    memory = a * s["M"] + _muon(momentum, "atlas-window")
    new = {"M": memory, "S": momentum, "keys": torch.stack(keys), "values": torch.stack(values)}
    return new, torch.mv(memory.T, _unit(g["q"]))


def _householder(k, b):
    """I - b k k^T."""
    return torch.eye(len(k), dtype=k.dtype) - b * torch.outer(k, k)


def _kda(s, g, p):
    b, k = 1 / (1 + torch.exp(-g["b"])), _unit(g["k"])
    transition = _householder(k, b) @ torch.diag(1 / (1 + torch.exp(-g["a"])))
    new = transition @ s["S"] + b * torch.outer(k, g["v"])
    return {"S": new}, torch.mv(new.T, _unit(g["q"]))


def _gated_delta_product(s, g, p):
    """By the product of the factors, and what each of them writes."""
    a, b, b2 = (1 / (1 + torch.exp(-g[name])) for name in ("a", "b", "b2"))
    k, k2 = _unit(g["k"]), _unit(g["k2"])
    first, second = _householder(k, 2 * b), _householder(k2, 2 * b2)
    write = second @ (2 * b * torch.outer(k, g["v"])) + 2 * b2 * torch.outer(k2, g["v2"])
    new = a * second @ first @ s["S"] + write
    return {"S": new}, torch.mv(new.T, _unit(g["q"]))


def _comba(s, g, p):
    """In the paper's own order, values by keys."""
    a, b = 1 / (1 + torch.exp(-g["a"])), 1 / (1 + torch.exp(-g["b"]))
    k, feedback = _unit(g["k"]), b / (1 + torch.exp(-p["c"]))
    transition = a * torch.eye(len(k), dtype=k.dtype) - feedback * torch.outer(k, k)
    values_by_keys = s["S"].T @ transition + b * torch.outer(g["v"], k)
    return {"S": values_by_keys.T}, torch.mv(values_by_keys, _unit(g["q"]) - p["d"] * k)


def _mamba2(s, g, p):
    t = torch.log(1 + torch.exp(g["dt"]))
    new = torch.exp(-torch.exp(p["A"]) * t) * s["h"] + t * torch.outer(g["B"], g["x"])
    return {"h": new}, torch.mv(new.T, g["C"]) + p["D"] * g["x"]


def _projected_lstm(s, g, p):
    at = {name: g[name] + torch.mv(p[f"R_{name}"], s["h"]) for name in ("i", "f", "g", "o")}
    i, f, o = (1 / (1 + torch.exp(-at[name])) for name in ("i", "f", "o"))
    c = f * s["c"] + i * torch.tanh(at["g"])
    h = torch.mv(p["W"].T, o * torch.tanh(c))
    return {"h": h, "c": c}, h


def _mamba3(s, g, p):
    """In complex numbers, and the paper's three coefficients."""
    t, share = torch.log(1 + torch.exp(g["dt"])), 1 / (1 + torch.exp(-g["l"]))
    alpha = torch.exp(-t * torch.log(1 + torch.exp(g["A"])))
    turn = torch.exp(1j * t * g["w"])
    beta, gamma = (1 - share) * t * alpha, share * t
    before, now = (
        torch.outer(torch.complex(of["B_re"], of["B_im"]), of["x"].to(torch.complex128))
        for of in (s, g)
    )
    h = alpha * turn[:, None] * torch.complex(s["h_re"], s["h_im"])
    h = h + beta * turn[:, None] * before + gamma * now
    y = (torch.complex(g["C_re"], -g["C_im"]) @ h).real + p["D"] * g["x"]
    return {"h_re": h.real, "h_im": h.imag, **{name: g[name] for name in ("B_re", "B_im", "x")}}, y


def _mamba3_mimo(s, g, p):
    """In complex numbers: the paper's matrices B (K, R), X (V, R) and C (K, R)."""
    t, share = torch.log(1 + torch.exp(g["dt"])), 1 / (1 + torch.exp(-g["l"]))
    alpha = torch.exp(-t * torch.log(1 + torch.exp(g["A"])))
    turn = torch.exp(1j * t * g["w"])[:, None]
    beta, gamma = (1 - share) * t * alpha, share * t

    def inputs(of):
        x = torch.stack([row * of["x"] for row in p["W_x"]]).to(torch.complex128)
        return torch.complex(of["B_re"], of["B_im"]).T @ x

    h = alpha * turn * torch.complex(s["h_re"], s["h_im"])
    h = h + beta * turn * inputs(s) + gamma * inputs(g)
    y = 0
    for r in range(len(p["W_x"])):
        read = (h.T @ torch.complex(g["C_re"], -g["C_im"])[r]).real + p["D"] * p["W_x"][r] * g["x"]
        z = p["W_z"][r] * g["z"]
        y = y + p["W_o"][r] * read * z / (1 + torch.exp(-z))
    return {"h_re": h.real, "h_im": h.imag, **{name: g[name] for name in ("B_re", "B_im", "x")}}, y


CONFIG = {
    "ttt-linear": {"rate": 0.5, "eps": 0.5},
    "mamba3-mimo": {"R": 2},
    "atlas": {"iterations": 2, "coefficients": (2.0, -1.5, 0.5)},
    "atlas-window": {"iterations": 2, "coefficients": (2.0, -1.5, 0.5), "C": 3},
}
"""A norm of three values is steep: an eps of their size makes tests of digits possible. So do two
iterations, which enlarge rounding less than five."""


def _ttt_linear(s, g, p):
    """By autograd: the gradient of half the squared error, of a norm that is written out."""
    config = CONFIG["ttt-linear"]

    def norm(z):
        centred = z - z.sum() / len(z)
        size = torch.sqrt(centred.dot(centred) / len(z) + config["eps"])
        return p["w"] * centred / size + p["b"]

    def loss(memory):
        error = norm(torch.mv(memory.T, g["k"])) - g["v"]
        return error.dot(error) / 2

    with torch.enable_grad():
        memory = p["W_0"] + s["W"] + torch.zeros_like(s["W"], requires_grad=True)
        (slope,) = torch.autograd.grad(loss(memory), memory, create_graph=True)
    rate = config["rate"] / (1 + torch.exp(-g["e"])) / len(g["k"])
    new = s["W"] - rate * slope
    return {"W": new}, norm(torch.mv((p["W_0"] + new).T, g["q"])) + g["s"]


LOOPS = {
    "m2rnn": _m2rnn,
    "gated-delta": _gated_delta,
    "rwkv7": _rwkv7,
    "mlstm": _mlstm,
    "hopfield": _hopfield,
    "titans": _titans,
    "atlas": _atlas,
    "atlas-window": _atlas_window,
    "kda": _kda,
    "gated-delta-product": _gated_delta_product,
    "comba": _comba,
    "mamba2": _mamba2,
    "mamba3": _mamba3,
    "mamba3-mimo": _mamba3_mimo,
    "projected-lstm": _projected_lstm,
    "ttt-linear": _ttt_linear,
}
"""A step of each cell: (states, gates, parameters) of one head by name -> new states and output."""


BY_BLOCKS = [name for name in LOOPS if not name.startswith("atlas")]
"""Cells that a block for each row can run on a GPU."""


@dataclass
class Call:
    """A call of `solve` on a cell, with leaves that require gradients."""

    cell: Cell
    gates: torch.Tensor
    initial: tuple[torch.Tensor, ...]

    def leaves(self):
        """Gates, initial states and parameters."""
        return [self.gates, *self.initial, *self.cell.parameters()]


def make_call(name, rows, steps, heads=2, keys=4, values=3, dtype=torch.float64, seed=0, gain=1.0):
    """A cell, and random gates and states, which a loop and a solver share."""
    torch.manual_seed(seed)
    sizes = {"num_heads": heads, "K": keys}
    cell = zoo.MATRIX_CELLS[name](heads * values, dtype=dtype, **sizes, **CONFIG.get(name, {}))
    sizes = cell.head_sizes
    gates = gain * torch.randn(rows, steps, heads, sizes.width, dtype=torch.float64)
    initial = [0.5 * torch.randn(rows, *size, dtype=torch.float64) for size in sizes.state_sizes]
    leaf = lambda x: x.to(dtype).requires_grad_()  # noqa: E731
    return Call(cell, leaf(gates), tuple(map(leaf, initial)))


def loop(name, call, reverse=False, reset=None, starts=None):
    """A call's outputs and final states by the plain loop."""
    params, options = dict(call.cell.named_parameters()), {"reverse": reverse, "reset": reset}
    arguments = (call.cell, call.gates, call.initial, params)
    return run_plainly(LOOPS[name], *arguments, **options, starts=starts)
