"""Cells with vector states whose channels couple by norms and softmaxes, and by products."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import pararnn
from pararnn import Param

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from norms import NormLSTM


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


class WeightedNorm(pararnn.Cell):
    """A layer norm with a weight and a bias, whose gradients are the norm's."""

    states = ("h",)
    gates = ("x",)
    params = {"R": Param("D,D"), "w": Param("D", mean=1.0, std=0.5), "b": Param("D", std=0.5)}

    def step(self, state, gate, param):
        h = F.layer_norm(state.h @ param.R, state.h.shape[-1:], param.w, param.b)
        return torch.tanh(gate.x + h)


CELLS = (NormLSTM, NormGRU, Attentive, WeightedNorm)
