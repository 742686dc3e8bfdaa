"""The leaky integrate-and-fire neuron, trained by a surrogate gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell


class Spike(torch.autograd.Function):
    """1 where x > 0, else 0, with the slope 1 / (1 + sharpness |x|)^2 of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharpness: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sharpness = sharpness
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / (1 + ctx.sharpness * ctx.saved_tensors[0].abs()) ** 2, None


class LIFCell(Cell):
    """Leaky integrate-and-fire neurons: states s (spikes), u (membrane), i (current); gate x.

    :equation: ``i' = alpha i + x_x``, ``u' = beta u + i - s``; ``s' = 1`` where ``u' > 1``, else 0
    :source: Neftci et al. 2019, Surrogate Gradient Learning in Spiking Neural Networks, section 3

    Neurons of a layer are connected by the next projection. The slope of s' is that of Zenke and
    Ganguli 2018 (SuperSpike), of sharpness `sharpness`. Config: this, and the decays alpha, beta.
    States jump, so that Newton's method may leave a column of a long sequence to the loop.
    """

    states = ("s", "u", "i")
    gates = ("x",)
    config = {"alpha": 0.8, "beta": 0.9, "sharpness": 10.0}
    structure = "block_diagonal"

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        u = self.beta * state.u + state.i - state.s
        return Spike.apply(u - 1, self.sharpness), u, self.alpha * state.i + gate.x
