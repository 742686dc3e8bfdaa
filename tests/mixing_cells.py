"""Cells that mix channels inside heads, for tests: of the literature, and as users write them."""

import torch

from pararnn import Cell, Param


def matrices(*names):
    """A matrix of each head by these names."""
    return {name: Param("H,K,K") for name in names}


class HeadGRU(Cell):
    """A GRU with the reset before the product: a second product reads the first one's result."""

    states, gates = ("h",), ("z", "r", "n")
    params = matrices("R_z", "R_r", "R_n")

    def step(self, state, gate, param):
        z = torch.sigmoid(gate.z + state.h @ param.R_z)
        r = torch.sigmoid(gate.r + state.h @ param.R_r)
        n = torch.tanh(gate.n + (r * state.h) @ param.R_n)
        return (1 - z) * n + z * state.h


class HeadLSTM(Cell):
    states, gates = ("h", "c"), ("i", "f", "g", "o")
    params = matrices("R_i", "R_f", "R_g", "R_o")

    def step(self, state, gate, param):
        i = torch.sigmoid(gate.i + state.h @ param.R_i)
        f = torch.sigmoid(gate.f + state.h @ param.R_f)
        g = torch.tanh(gate.g + state.h @ param.R_g)
        o = torch.sigmoid(gate.o + state.h @ param.R_o)
        c = f * state.c + i * g
        return o * torch.tanh(c), c


class ResetAfter(Cell):
    """torch.nn.GRU's: the reset after the product, with a bias inside it."""

    states, gates = ("h",), ("r", "z", "n")
    params = {**matrices("R_r", "R_z", "R_n"), "b_n": Param("D")}

    def step(self, state, gate, param):
        r = torch.sigmoid(gate.r + state.h @ param.R_r)
        z = torch.sigmoid(gate.z + state.h @ param.R_z)
        n = torch.tanh(gate.n + r * (state.h @ param.R_n + param.b_n))
        return (1 - z) * n + z * state.h


class Elman(Cell):
    states, gates, params = ("h",), ("x",), matrices("R")

    def step(self, state, gate, param):
        return torch.tanh(gate.x + state.h @ param.R)


class HeadSLSTM(Cell):
    """xLSTM's sLSTM with head-wise matrices (Beck et al. 2024), forget gate a sigmoid."""

    states, gates = ("h", "c", "n", "m"), ("i", "f", "z", "o")
    params = matrices("R_i", "R_f", "R_z", "R_o")

    def step(self, state, gate, param):
        i = gate.i + state.h @ param.R_i
        f = torch.nn.functional.logsigmoid(gate.f + state.h @ param.R_f)
        z = torch.tanh(gate.z + state.h @ param.R_z)
        o = torch.sigmoid(gate.o + state.h @ param.R_o)
        m = torch.maximum(f + state.m, i)
        keep, write = torch.exp(f + state.m - m), torch.exp(i - m)
        c, n = keep * state.c + write * z, keep * state.n + write
        return o * c / torch.clamp(n, min=0.5), c, n, m


class Coupled(Cell):
    """Two states, of which each is driven by a product of the other; one of a field, too."""

    states, gates, fields = ("a", "b"), ("x", "y"), ("dt",)
    params = {**matrices("P", "Q"), "leak": Param("H", std=0.1)}

    def step(self, state, gate, param):
        a = torch.tanh(gate.x + state.b @ param.P - param.leak * state.a)
        b = torch.tanh(gate.y + (a * torch.relu(gate.dt)) @ param.Q.mT) + 0.5 * state.b
        return a, b


class Mixture(Cell):
    """A user's: three states, products of two of them and of their transposes, parameters of every
    kind, a constant, a field, functions that jump, and a state that no product reads."""

    states, gates, fields = ("h", "c", "trace"), ("i", "f"), ("gap",)
    params = {
        **matrices("R", "S"),
        "a": Param("D"),
        "b": Param("H", mean=0.5),
        "scale": Param("", mean=0.3, trainable=False),
    }
    config = {"decay": 0.5}

    def step(self, state, gate, param):
        drive = state.h @ param.R + state.c @ param.S.mT
        keep = torch.sigmoid(gate.f + drive * gate.gap)
        new = torch.relu(gate.i + param.a * state.h + (keep * state.c) @ param.R.mT)
        c = keep * state.c + (1 - keep) * torch.tanh(new)
        trace = self.decay * state.trace + param.scale * torch.where(c > 0.2, c, 0.1 * c)
        return torch.tanh(c + param.b * trace), c, trace


CELLS = [HeadGRU, HeadLSTM, ResetAfter, Elman, HeadSLSTM, Coupled, Mixture]


class Dense(HeadGRU):
    """One head, as a matrix of all channels."""

    params = {name: Param("D,D") for name in HeadGRU.params}
