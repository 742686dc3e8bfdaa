"""Mamba's selective scan as a peer: the reduction alone, and a simplified Mamba around it.

`selective_scan_cuda` is the extension of mamba-ssm, whose package on PyPI holds sources only. Its
files csrc/selective_scan/*.cu, for float32, compute capability 9.0 and the PyTorch at hand, are
enough. No Python code of mamba-ssm is used.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STATES = 16
"""States a channel, Mamba's default."""
SHARE = 16
"""Channels for each rank of the step size's projection, Mamba's default."""

Scan = Callable[..., Tensor]
"""y (B, D, T) of u, delta (B, D, T), A (D, N), B, C (B, 1, N, T), D (D) or None, the step size's
bias (D) or None, and whether it goes through softplus."""


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *tensors, softplus = args
        u, delta, a, b, c, d, bias = tensors
        out, x, *_ = _extension().fwd(u, delta, a, b, c, d, None, bias, softplus)
        ctx.save_for_backward(*tensors, x)
        ctx.softplus = softplus
        return out

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        u, delta, a, b, c, d, bias, x = ctx.saved_tensors
        (grad,) = arriving
        grads = _extension().bwd(
            *(u, delta, a, b, c, d, None, bias, grad.contiguous(), x, None, None),
            *(ctx.softplus, False),
        )
        du, ddelta, da, db, dc, dd, dbias = grads[:7]
        return du, ddelta, da, db, dc, dd if d is not None else None, dbias, None


def _extension() -> Any:
    return importlib.import_module("selective_scan_cuda")


@torch.compiler.disable
def selective_scan(*args: Any) -> Tensor:
    """Mamba's CUDA kernel: see `Scan`. ImportError where the extension is not built."""
    _extension()
    return _SelectiveScan.apply(*args)


def reference_scan(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> Tensor:
    """Compute the kernel's result step by step: h = exp(delta A) h + delta B u, y = C h + D u."""
    if bias is not None:
        delta = delta + bias[:, None]
    if softplus:
        delta = F.softplus(delta)
    h, out = u.new_zeros(*u.shape[:2], a.shape[1]), []
    for step in range(u.shape[2]):
        size, u_t = delta[:, :, step, None], u[:, :, step, None]
        h = torch.exp(size * a) * h + size * b[:, :, :, step] * u_t
        out.append((h * c[:, :, :, step]).sum(-1))
    y = torch.stack(out, 2)
    return y if d is None else y + d[:, None] * u


def reduction(decay: Tensor, values: Tensor, scan: Scan = selective_scan) -> Callable[[], Tensor]:
    """Return h_t = decay_t h_{t-1} + values_t as a selective scan of one state; (B, D, T).

    Its inputs, delta = -log(decay) with A = -1 and u = values / delta, are computed here and not
    timed: the kernel takes the same two sequences, and an exponential more.
    """
    delta = -decay.log()
    u = values / delta
    batch, channels, steps = values.shape
    ones = values.new_ones(batch, 1, 1, steps)
    a = -values.new_ones(channels, 1)
    return lambda: scan(u, delta, a, ones, ones, None, None, False)


class SimplifiedMamba(nn.Module):
    """Mamba's block without gate, convolution and outer projections: (B, T, D) to (B, T, D).

    The parameters of the state space model from the input (B, C, and the step size through a low
    rank), and its application; float32.
    """

    def __init__(
        self, channels: int, scan: Scan = selective_scan, device: torch.device | str = "cuda"
    ) -> None:
        super().__init__()
        self.rank, self.scan = math.ceil(channels / SHARE), scan
        self.to_parameters = nn.Linear(channels, self.rank + 2 * STATES, bias=False, device=device)
        self.to_step = nn.Linear(self.rank, channels, device=device)
        log = torch.arange(1.0, STATES + 1, device=device).log().repeat(channels, 1)
        self.a_log = nn.Parameter(log)
        self.d = nn.Parameter(torch.ones(channels, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low, b, c = self.to_parameters(x).split([self.rank, STATES, STATES], -1)
        delta = (low @ self.to_step.weight.mT).mT.contiguous()
        b, c = (t.mT.unsqueeze(1).contiguous() for t in (b, c))
        a = -torch.exp(self.a_log)
        u = x.mT.contiguous()
        return self.scan(u, delta, a, b, c, self.d, self.to_step.bias, True).mT
