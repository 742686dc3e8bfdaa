"""Gated DeltaNet in plain PyTorch, for comparison: a linear recurrence that can track states."""

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

CHUNK = 64


class DeltaNet(Mixer):
    """Gated DeltaNet's mixer with eigenvalues from -1 to 1, after Grazzi et al. 2024.

    q, k, v, a, b = W u, q, k, v = silu(conv(q, k, v)), q and k of length 1; by heads
    S_t = exp(-exp(A) softplus(a)) (I - 2 sigmoid(b) k k^T) S_(t-1) + 2 sigmoid(b) k v^T and
    y = S^T q; the result is V (norm(y) silu(z)). `bare` is the recurrence alone: no convolution
    with its silu, no gate, norm or V.
    """

    scales_residual = True

    def __init__(self, width: int, heads: int, taps: int, bare: bool) -> None:
        super().__init__()
        self.sizes = [width, width, width, heads, heads]
        self.in_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.gate_proj = None if bare else nn.Linear(width, width, bias=False)
        self.conv = None if bare else CausalConv(3 * width, taps)
        if self.conv is not None:
            draw_parameters(self.conv, self.conv.draws())
        self.norm = None if bare else nn.RMSNorm(width // heads, eps=1e-5)
        self.out_proj = nn.Identity() if bare else nn.Linear(width, width, bias=False)
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.a_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus undoes it
        self.a_log = nn.Parameter(torch.arange(1.0, heads + 1).log())

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        heads = self.sizes[-1]
        qkv, a, b = self.in_proj(x).split([3 * x.shape[-1], heads, heads], -1)
        if self.conv is not None:
            qkv = self.conv(qkv, rows)[0]
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in qkv.chunk(3, -1))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        decay = -F.softplus(a + self.a_bias) * self.a_log.exp()
        y = delta_scan(q, k, v, decay, 2 * torch.sigmoid(b))
        if self.norm is not None and self.gate_proj is not None:
            y = self.norm(y) * F.silu(self.gate_proj(x)).unflatten(-1, (heads, -1))
        return self.out_proj(y.flatten(-2))

    def draws(self, layer: int) -> dict[str, Draw]:
        """Return none: the parameters are drawn where they are made."""
        return {}


def delta_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Compute y_t = S_t^T q_t, S_t = exp(decay_t) (I - strength_t k_t k_t^T) S_(t-1) +
    strength_t k_t v_t^T.

    q, k, v (B, T, H, N), decay and strength (B, T, H), y as v. Within a chunk of time, S_t is what
    is left of the chunk's first state and of k_i w_i^T of its steps i; w solves a triangular
    system. A loop joins the chunks.
    """
    steps = q.shape[1]
    size = min(steps, CHUNK)
    missing = -steps % size
    q, k, v = (
        F.pad(t, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, size)).transpose(2, 3)
        for t in (q, k, v)
    )  # (B, C, H, Q, N)
    decay, strength = (
        F.pad(t, (0, 0, 0, missing)).unflatten(1, (-1, size)).transpose(2, 3)
        for t in (decay, strength)
    )
    total = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    fade = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    overlap = strength.unsqueeze(-1) * fade * (k @ k.mT)
    one = torch.eye(size, dtype=q.dtype, device=q.device)
    system = one + overlap.masked_fill(one.bool(), 0)
    scale = strength.unsqueeze(-1)
    sides = torch.cat([scale * v, scale * total.exp().unsqueeze(-1) * k], -1)
    solution = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solution.split(
        [v.shape[-1], k.shape[-1]], -1
    )  # w of the zero state, and what the first state takes off
    attend, scaled_q = fade * (q @ k.mT), q * total.exp().unsqueeze(-1)
    end = total[..., -1:]
    last = k * (end - total).exp().unsqueeze(-1)
    state, outputs = torch.zeros_like(k[:, 0].mT @ v[:, 0]), []
    for index in range(q.shape[1]):
        w = values[:, index] - keys[:, index] @ state
        outputs.append(scaled_q[:, index] @ state + attend[:, index] @ w)
        state = state * end[:, index].exp().unsqueeze(-1) + last[:, index].mT @ w
    return torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :steps]
