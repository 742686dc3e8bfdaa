"""A causal depthwise convolution within documents, with SiLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.base.parameters import Draw
from pararnn.layers.marks import after_steps
from pararnn.lm.invariant import PLAIN, Layers
from pararnn.lm.rows import Rows
from pararnn.messages.group import OnRanks
from pararnn.messages.shift import relay, shift


class CausalConv(OnRanks, nn.Module):
    """silu(y), y_t = sum_k w_k * u_(t - k) + b, channel by channel, over `taps` tokens of one
    document.

    (B, T, d) to (B, T, d). The weight is (taps, d), the newest token's first.
    """

    def __init__(self, channels: int, taps: int, layers: Layers = PLAIN, **factory: Any) -> None:
        super().__init__()
        self.convolve = layers.convolve
        self.weight = nn.Parameter(torch.empty(taps, channels, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory))

    def forward(self, u: Tensor, rows: Rows, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the result, and the last taps - 1 inputs, (B, d, taps - 1), for a later call.

        `before` are those inputs of an earlier call; None is zeros, or on several ranks those of
        the rank before. Inputs at padding, and of documents that end within the rows, are returned
        as 0: only the last one of a row continues.
        """
        reach, steps = len(self.weight) - 1, u.shape[1]
        halo = None if before is None else before.transpose(1, 2).to(u.dtype)
        tail = self._tail(_last(u, halo, reach), rows)
        if self.group and steps < reach:
            keep = _continues(rows, reach, steps, u.device).unsqueeze(1)
            halo = relay(self._tail(u, rows), keep, self.group, False).transpose(1, 2)
        elif self.group:
            halo = shift(tail, self.group, False).transpose(1, 2)
        return self.convolve(u, self.weight, self.bias, halo, rows.since), tail

    def inputs_after(self, u: Tensor, before: Tensor | None, steps: Sequence[int]) -> Tensor:
        """Return the last taps - 1 inputs after some steps of whole rows, (B, n, d, taps - 1).

        Arguments as in `forward`; no input is padding.
        """
        reach, channels = len(self.weight) - 1, u.shape[2]
        halo = u.new_zeros(len(u), reach, channels) if before is None else before.transpose(1, 2)
        windows = torch.cat([halo.to(u.dtype), u], 1).unfold(1, reach, 1)  # after 0 to T steps
        return after_steps(windows, steps, 0)

    def _tail(self, last: Tensor, rows: Rows) -> Tensor:
        if rows.real is not None:
            real = nn.functional.pad(rows.real, (last.shape[1], 0), value=True)[:, -last.shape[1] :]
            last = last.masked_fill(~real.unsqueeze(-1), 0)
        if rows.since is not None:
            continues = _continues(rows, last.shape[1], 0, last.device)
            last = last.masked_fill(~continues.unsqueeze(-1), 0)
        return last.transpose(1, 2)

    def draws(self) -> dict[str, Draw]:
        """Return initial draws: torch.nn.Conv1d's for weights, as in Mamba, and zero biases."""
        reach = 1 / math.sqrt(len(self.weight))
        return {"weight": Draw("uniform", spread=reach), "bias": Draw("constant")}


def _continues(rows: Rows, first: int, end: int, device: torch.device) -> Tensor:
    """Return whether the last document of rows holds the inputs from `first` down to more than
    `end` tokens before their end, bool (B or 1, first - end)."""
    back = torch.arange(first - 1, end - 1, -1, device=device)
    return back.ge(0).unsqueeze(0) if rows.since is None else rows.since[:, -1:] >= back


def _last(u: Tensor, halo: Tensor | None, count: int) -> Tensor:
    """Return the last `count` inputs of u and, where these are too few, of the halo or zeros."""
    missing = count - u.shape[1]
    if missing <= 0:
        return u.narrow(1, -missing, count)
    if halo is None:
        return nn.functional.pad(u, (0, 0, missing, 0))
    return torch.cat([halo[:, halo.shape[1] - missing :], u], 1)
