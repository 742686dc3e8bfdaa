"""Plain loops of the cells of world models, after DreamerV3's code: whole layers by block."""

import math

import torch
from plain_loop import run_plainly

import pararnn.zoo as zoo

AXES = {"G": 3, "K": 5, "E": 6, "U": 7, "C": 4, "N": 3}
EPS, UNIMIX, BIAS = 0.1, 0.2, 0.5
"""Config in which a mistake would show, where the default hides it."""


def make_cell(name, dtype=torch.float64, **axes):
    """A cell of these axes, by default small odd ones."""
    cls, axes = zoo.WORLD_CELLS[name], AXES | axes
    sizes = {axis: axes[axis] for axis in cls.head_axes.arguments}
    numbers = sum(math.prod(axes[axis] for axis in names) for names in cls.head_axes.outputs)
    config = {"eps": EPS, "update_bias": BIAS} | ({"unimix": UNIMIX} if name == "rssm" else {})
    return cls(numbers, dtype=dtype, **sizes, **config)


def _sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def _layer(x, weight):
    """SiLU of x, a vector, over its root mean square."""
    x = weight * x / torch.sqrt(torch.dot(x, x) / len(x) + EPS)
    return x * _sigmoid(x)


def _core(h, inputs, x, p):
    """The block GRU of h (G, K): inputs are hidden layers with the matrices of their blocks."""
    dense = _layer(p["W_h"].flatten(0, 1).T @ h.flatten() + p["b_h"], p["w_h"])
    inputs = [(dense, p["B_h"]), *inputs]
    hidden = []
    for g in range(len(h)):
        row = torch.cat([h[g], *(vector for vector, _ in inputs)])
        matrix = torch.cat([p["B"][g], *(blocks[g] for _, blocks in inputs)])
        hidden.append(matrix.T @ row + x[g])
    hidden = _layer(torch.cat(hidden), p["w"].flatten()).reshape(len(h), -1)
    new = []
    for g in range(len(h)):
        r, c, u = (p[f"R_{name}"][g] @ hidden[g] + p[f"b_{name}"][g] for name in ("r", "c", "u"))
        u = _sigmoid(u + BIAS)
        new.append(u * torch.tanh(_sigmoid(r) * c) + (1 - u) * h[g])
    return torch.stack(new)


def _dreamer_gru(s, g, p):
    new = _core(s["h"], [], g["x"], p)
    return {"h": new}, new.flatten()


class _OneHot(torch.autograd.Function):
    """The likeliest class under noise, with the gradient of the probabilities."""

    @staticmethod
    def forward(ctx, probabilities, noise):
        best = (torch.log(probabilities) + noise).argmax(-1)
        return torch.nn.functional.one_hot(best, probabilities.shape[-1]).to(probabilities.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _rssm(s, g, p):
    sample = _layer(p["W_z"].flatten(0, 1).T @ s["z"].flatten() + p["b_z"], p["w_z"])
    h = _core(s["h"], [(sample, p["B_z"])], g["x"], p)
    hidden = _layer(p["W_o"].flatten(0, 1).T @ h.flatten() + g["t"], p["w_o"])
    logits = (p["L"].flatten(0, 1) @ hidden).reshape(g["noise"].shape) + p["b_l"]
    powers = torch.exp(logits)
    probabilities = (1 - UNIMIX) * powers / powers.sum(-1, keepdim=True) + UNIMIX / logits.shape[1]
    z = _OneHot.apply(probabilities, g["noise"])
    outputs = h, z, torch.log(probabilities)
    return {"h": h, "z": z}, torch.cat([x.flatten() for x in outputs])


LOOPS = {"dreamer-gru": _dreamer_gru, "rssm": _rssm}
"""A step of each cell: (states, gates, parameters) by name -> new states, and the outputs, next to
each other."""


def loop(name, cell, gates, initial, params, reset=None):
    """Outputs and final states by the plain loop."""
    params = dict(zip(type(cell).params, params, strict=True))
    return run_plainly(LOOPS[name], cell, gates, initial, params, reset=reset)
