"""Draws of each row's next token, by the row's temperature and random number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.lm.sample import scaled


class Choice(NamedTuple):
    """Rule of one row: temperature, 0 for the likeliest token; top_p, the chance that the likeliest
    tokens to draw from have together; and a number in [0, 1) that decides."""

    temperature: float = 0.0
    top_p: float = 1.0
    number: float = 0.0


def draw(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """Draw a token for each row of logits (B, V); -1 where one is NaN or +inf, or all are -inf.

    A row's token depends only on its logits and choice, to the bit.
    """
    largest, tokens = logits.max(-1)
    if any(choice.temperature > 0 for choice in choices):
        warm = _column([choice.temperature for choice in choices], logits)
        chances = scaled(logits, warm).softmax(-1).double()
        numbers = _column([c.number for c in choices], logits)
        by_number = _inverse(chances, numbers)
        if any(choice.top_p < 1 for choice in choices):
            top_p = _column([choice.top_p for choice in choices], logits)
            some = _among_likeliest(logits, chances, top_p, numbers)
            has_limit = [c.top_p < 1 for c in choices]
            by_number = torch.where(_flags(has_limit, logits), some, by_number)
        is_warm = [c.temperature > 0 for c in choices]
        tokens = torch.where(_flags(is_warm, logits), by_number, tokens)
    return torch.where(largest.isfinite(), tokens, -1).tolist()


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(1)


def _flags(flags: Sequence[bool], like: Tensor) -> Tensor:
    return torch.tensor(flags, device=like.device)


def _inverse(chances: Tensor, numbers: Tensor) -> Tensor:
    """Return the first index whose cumulative chance is above number x total, (B,)."""
    sums = chances.cumsum(-1)
    index = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    return index.squeeze(1).clamp_max(chances.shape[1] - 1)


def _among_likeliest(logits: Tensor, chances: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """Draw among the fewest likeliest tokens that have top_p of the chance together."""
    # Not by chances, which a high temperature makes equal.
    index = logits.argsort(stable=True, dim=-1, descending=True)
    sorted_chances = chances.gather(1, index)
    is_needed = sorted_chances.cumsum(-1) - sorted_chances < top_p
    rank = _inverse(sorted_chances * is_needed, numbers)
    return index.gather(1, rank.unsqueeze(1)).squeeze(1)
