"""Mamba2 in plain PyTorch, for comparison: a linear recurrence whose decay depends on the input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.parameters import Draw, draw_parameters
from pararnn.lm.cache import LayerCache
from pararnn.lm.conv import CausalConv
from pararnn.lm.mixers import Mixer
from pararnn.lm.rows import Rows

CHUNK = 128


class Mamba2(Mixer):
    """Mamba2's mixer: expand 1, one group, an inner state of `state` a channel.

    z, x, B, C, dt = W u; x, B, C = silu(conv(x, B, C)); by heads, S_t = exp(dt A) S_(t-1) + dt B x,
    y = C S + D x; the result is V norm(y silu(z)). `bare` is the recurrence alone: no convolution
    with its silu, no gate, norm or V. dt, A and D start as in transformers' Mamba2. The full block
    has a norm in front as well, as theirs: with it the number of parameters is the published one.
    (The bare one has 1,160 fewer than published, which no reading here explains.)
    """

    scales_residual = True

    def __init__(self, width: int, heads: int, state: int, taps: int, bare: bool) -> None:
        super().__init__()
        self.sizes = [width, state, state, heads]
        self.own_norm = nn.Identity() if bare else nn.RMSNorm(width, eps=1e-5)
        self.in_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.gate_proj = None if bare else nn.Linear(width, width, bias=False)
        self.conv = None if bare else CausalConv(width + 2 * state, taps)
        if self.conv is not None:
            draw_parameters(self.conv, self.conv.draws())
        self.norm = None if bare else nn.RMSNorm(width, eps=1e-5)
        self.out_proj = nn.Identity() if bare else nn.Linear(width, width, bias=False)
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus undoes it
        self.a_log = nn.Parameter(torch.arange(1.0, heads + 1).log())
        self.skip = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        width, state, _, heads = self.sizes
        x = self.own_norm(x)
        xbc, dt = self.in_proj(x).split([width + 2 * state, heads], -1)
        if self.conv is not None:
            xbc = self.conv(xbc, rows)[0]
        u, b, c = xbc.split(self.sizes[:3], -1)
        u, dt = u.unflatten(-1, (heads, -1)), F.softplus(dt + self.dt_bias)
        y = scan(u * dt.unsqueeze(-1), -dt * self.a_log.exp(), b, c)
        y = (y + u * self.skip.unsqueeze(-1)).flatten(-2)
        if self.norm is not None and self.gate_proj is not None:
            y = self.norm(y * F.silu(self.gate_proj(x)))
        return self.out_proj(y)

    def draws(self, layer: int) -> dict[str, Draw]:
        """Return none: the parameters are drawn where they are made."""
        return {}


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute y_t = C_t S_t with S_t = exp(decay_t) S_(t-1) + B_t x_t.

    x (B, T, H, P), decay (B, T, H), b and c (B, T, N), y as x. Chunks of time are computed by
    products, as attention; a loop joins them.
    """
    steps = x.shape[1]
    size = min(steps, CHUNK)
    missing = -steps % size
    x, decay = (F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing)) for tensor in (x, decay))
    b, c = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (b, c))
    x, decay, b, c = (tensor.unflatten(1, (-1, size)) for tensor in (x, decay, b, c))
    total = decay.cumsum(2).transpose(2, 3)  # (B, K, H, Q)
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    factors = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    weights = (c @ b.mT).unsqueeze(2) * factors
    x = x.transpose(2, 3)  # (B, K, H, Q, P)
    y = weights @ x
    if x.shape[1] > 1:
        end = total[..., -1:]
        new = (b.mT.unsqueeze(2) * (end - total).exp().unsqueeze(-2)) @ x  # (B, K, H, N, P)
        state, states = torch.zeros_like(new[:, 0]), []
        for update, fade in zip(new.unbind(1), end.exp().unsqueeze(-1).unbind(1), strict=True):
            states.append(state)
            state = state * fade + update
        y = y + (c.unsqueeze(2) @ torch.stack(states, 1)) * total.exp().unsqueeze(-1)
    return y.transpose(2, 3).flatten(1, 2)[:, :steps]
