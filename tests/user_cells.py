"""A cell as users write them, in a module of theirs."""

import torch

from pararnn import Cell, Param


class Memory(Cell):
    """Three states, a field, a constant, and parameters by channel and by head."""

    states = ("h", "c", "m")
    gates = ("i", "f", "o")
    fields = ("gap",)
    params = {"a_i": Param("D"), "a_f": Param("D"), "b": Param("H", mean=0.5)}
    config = {"decay": 0.5}

    def step(self, state, gate, param):
        keep = torch.sigmoid(gate.f + param.a_f * state.h)
        new = torch.tanh(gate.i + param.a_i * state.h)
        c = keep * state.c + (1 - keep) * new * self.gap(gate)
        m = self.decay * state.m + c
        return torch.sigmoid(gate.o) * torch.tanh(c + param.b * m), c, m

    @staticmethod
    def gap(gate):
        return gate.gap


class Timeless(Memory):
    """The same without the field."""

    fields = ()

    @staticmethod
    def gap(gate):
        return 1.0


class Cumulative(Cell):
    """A step that mixes channels by an op without a statement: no kernel takes it."""

    states, gates, structure = ("h",), ("x",), "dense"

    def step(self, state, gate, param):
        return torch.tanh(gate.x + state.h / (1 + state.h.square().cumsum(-1)))
