"""Cells with vector states whose channels couple by norms and softmaxes, and by products."""

import torch
import torch.nn.functional as F

import pararnn
from pararnn import Param


class NormLSTM(pararnn.Cell):
    """A layer-norm LSTM: each product and the memory are normalised over the channels."""

    states = ("h", "c")
    gates = ("i", "f", "z", "o")
    params = {f"R_{gate}": Param("H,K,K") for gate in gates} | {
        f"w_{name}": Param("D", mean=1.0, std=0.1) for name in (*gates, "c")
    }

    def step(self, state, gate, param):
        def normed(matrix, weight):
            x = state.h @ matrix
            return F.layer_norm(x, x.shape[-1:]) * weight

        i = torch.sigmoid(gate.i + normed(param.R_i, param.w_i))
        f = torch.sigmoid(gate.f + normed(param.R_f, param.w_f))
        z = torch.tanh(gate.z + normed(param.R_z, param.w_z))
        o = torch.sigmoid(gate.o + normed(param.R_o, param.w_o))
        c = f * state.c + i * z
        return o * torch.tanh(F.layer_norm(c, c.shape[-1:]) * param.w_c), c


class NormGRU(pararnn.Cell):
    """A GRU with one matrix of all channels and RMS norms, one of them by hand, and a field."""

    states = ("h",)
    gates = ("z", "r", "n")
    fields = ("dt",)
    params = {"R": Param("D,D"), "scale": Param("", mean=0.5, std=0.1), "w": Param("D", mean=1.0)}
    config = {"eps": 1e-5}

    def step(self, state, gate, param):
        x = state.h @ param.R
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        z = torch.sigmoid(gate.z + param.scale * x) * torch.exp(-gate.dt)
        r = torch.sigmoid(gate.r + F.rms_norm(state.h, state.h.shape[-1:], eps=self.eps))
        return torch.lerp(state.h, torch.tanh(gate.n + r * x * param.w), z)


class Attentive(pararnn.Cell):
    """No products: a softmax over all channels, and three states."""

    states = ("h", "a", "s")
    gates = ("x", "u")
    params = {"w": Param("D", mean=0.5, std=0.1), "per_head": Param("H", mean=0.3)}

    def step(self, state, gate, param):
        a = torch.softmax(param.w * state.a + gate.u, -1)
        h = torch.tanh(param.per_head * state.h + a * gate.x)
        return h, 0.5 * state.a + h, torch.maximum(0.9 * state.s, h.amax(-1, keepdim=True) * a)


CELLS = (NormLSTM, NormGRU, Attentive)
