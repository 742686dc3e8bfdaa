"""A causal depthwise convolution within documents."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.context.group import OnRanks
from pararnn.context.shift import shift
from pararnn.lm.rows import Rows
from pararnn.parameters import Draw


class CausalConv(OnRanks, nn.Module):
    """y_t = sum_k w_k * u_(t - k) + b, channel by channel, over `taps` tokens of one document.

    (B, T, d) to (B, T, d). The weight is (taps, d), the newest token's first.
    """

    def __init__(self, channels: int, taps: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory))

    def forward(self, u: Tensor, rows: Rows, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the result, and the last taps - 1 inputs, (B, d, taps - 1), for a later call.

        `before` are those inputs of an earlier call; None is zeros, or on several ranks those of
        the rank before. Inputs at padding, and of documents that end within the rows, are returned
        as 0: only the last one of a row continues.

        Raises ValueError for spans of ranks that are shorter than taps - 1.
        """
        reach, steps = len(self.weight) - 1, u.shape[1]
        halo = tail = None
        if self.context:
            if steps < reach:
                raise ValueError(
                    f"a convolution of {reach + 1} taps needs spans of {reach} tokens at least on "
                    f"each rank, got {steps}"
                )
            tail = self._tail(u[:, steps - reach :], rows)
            halo = shift(tail, self.context, False).transpose(1, 2)
        inputs = u if before is None else torch.cat([before.transpose(1, 2).to(u.dtype), u], 1)
        newest, *earlier = self.weight.unbind()
        y = torch.addcmul(self.bias, u, newest)
        for lag, weight in enumerate(earlier, 1):
            # Each lag is padded by itself: compilers then read u itself, and store no padded copy.
            window = _last(inputs, lag, steps)
            if halo is not None:
                window = window + nn.functional.pad(halo[:, -lag:], (0, 0, 0, steps - lag))
            if rows.since is not None:
                window = window.masked_fill((rows.since < lag).unsqueeze(-1), 0)
            y = torch.addcmul(y, window, weight)
        return y, self._tail(_last(inputs, 0, reach), rows) if tail is None else tail

    def _tail(self, last: Tensor, rows: Rows) -> Tensor:
        if rows.real is not None:
            real = nn.functional.pad(rows.real, (last.shape[1], 0), value=True)[:, -last.shape[1] :]
            last = last.masked_fill(~real.unsqueeze(-1), 0)
        if rows.since is not None:
            back = torch.arange(last.shape[1] - 1, -1, -1, device=last.device)
            last = last.masked_fill((rows.since[:, -1:] < back).unsqueeze(-1), 0)
        return last.transpose(1, 2)

    def draws(self) -> dict[str, Draw]:
        """Return initial draws: torch.nn.Conv1d's for weights, as in Mamba, and zero biases."""
        reach = 1 / math.sqrt(len(self.weight))
        return {"weight": Draw("uniform", spread=reach), "bias": Draw("constant")}


def _last(inputs: Tensor, lag: int, count: int) -> Tensor:
    """Return `count` steps up to the last but `lag`, with zeros before the first."""
    first = inputs.shape[1] - lag - count
    if first >= 0:
        return inputs.narrow(1, first, count)
    part = inputs[:, : max(inputs.shape[1] - lag, 0)]
    return nn.functional.pad(part, (0, 0, count - part.shape[1], 0))
