"""Draws of each row's next token, by the row's temperature and random number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import upload
from pararnn.lm.draws import scaled
from pararnn.lm.loss import Head


class Choice(NamedTuple):
    """Rule of one row: temperature, 0 for the likeliest token; top_p, the chance that the likeliest
    tokens to draw from have together; a number in [0, 1) that decides; and top_k, how many of the
    likeliest tokens may be drawn at most, of which top_p is then a share; 0 is all."""

    temperature: float = 0.0
    top_p: float = 1.0
    number: float = 0.0
    top_k: int = 0

    @property
    def has_limit(self) -> bool:
        """True if some tokens are not drawn."""
        return self.top_p < 1 or self.top_k > 0


class Score(NamedTuple):
    """A token's logarithm of its chance, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def draw(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """Draw a token for each row of logits (B, V); -1 where one is NaN or +inf, or all are -inf.

    A row's token depends only on its logits and choice, to the bit.
    """
    largest, tokens = logits.max(-1)
    if any(choice.temperature > 0 for choice in choices):
        size = logits.shape[1]  # a top_k may be larger than any float
        every = [
            (c.temperature, c.number, c.top_p, min(c.top_k, size), c.has_limit) for c in choices
        ]
        columns = upload([*zip(*every, strict=True)], logits.device, torch.float64).unsqueeze(2)
        warm, numbers, top_p, top_k, has_limit = columns
        chances = scaled(logits, warm).softmax(-1).double()
        by_number = _inverse(chances, numbers)
        if any(choice.has_limit for choice in choices):
            most = torch.where(top_k > 0, top_k, size)
            some = _among_likeliest(logits, chances, top_p, most, numbers)
            by_number = torch.where(has_limit.squeeze(1) > 0, some, by_number)
        tokens = torch.where(warm.squeeze(1) > 0, by_number, tokens)
    return torch.where(largest.isfinite(), tokens, -1).tolist()


def _inverse(chances: Tensor, numbers: Tensor) -> Tensor:
    """Return the first index whose cumulative chance is above number x total, (B,)."""
    sums = chances.cumsum(-1)
    index = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    return index.squeeze(1).clamp_max(chances.shape[1] - 1)


def _among_likeliest(
    logits: Tensor, chances: Tensor, top_p: Tensor, top_k: Tensor, numbers: Tensor
) -> Tensor:
    """Draw among the fewest of the top_k likeliest tokens that have top_p of their chance."""
    # Not by chances, which a high temperature makes equal.
    index = logits.argsort(stable=True, dim=-1, descending=True)
    is_among = torch.arange(logits.shape[1], device=logits.device) < top_k
    sorted_chances = chances.gather(1, index) * is_among
    sums = sorted_chances.cumsum(-1)
    # Without top_k the share is top_p itself: a sum of rounded chances is not quite 1.
    share = torch.where(top_k < logits.shape[1], top_p * sums[:, -1:], top_p)
    is_needed = sums - sorted_chances < share
    is_needed[:, 0] = True  # also where the smallest top_p makes a share of 0
    rank = _inverse(sorted_chances * is_needed, numbers)
    return index.gather(1, rank.unsqueeze(1)).squeeze(1)


def scores(head: Head, logits: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """Return the score of a token for each row of a head's logits (n, V), with the `top` likeliest
    tokens.

    Chances are those of temperature 1 among all tokens; a chance of zero has the least finite
    logarithm. A row's score depends on its logits alone, to the bit, and is `Head.log_prob`.
    """
    least = torch.finfo(torch.float32).min
    logs = head.log_prob(logits, torch.tensor(tokens, device=logits.device)).clamp_min(least)
    if not top:
        return [Score(token, log) for token, log in zip(tokens, logs.tolist(), strict=True)]
    every = logits.float().log_softmax(-1)
    indices = _likeliest(every, min(top, logits.shape[1]))
    likeliest = every.gather(1, indices).clamp_min(least)
    columns = logs.tolist(), likeliest.tolist(), indices.tolist()
    return [
        Score(token, log, tuple(zip(index, values, strict=True)))
        for token, log, values, index in zip(tokens, *columns, strict=True)
    ]


def _likeliest(logs: Tensor, count: int) -> Tensor:
    """Return the indices (n, count) of the largest of each row (n, V), of equal ones the first,
    and last those that are no numbers.

    topk alone would choose and order equal ones by `count`, in which other rows have a part.
    """
    logs = torch.where(logs.isnan(), -torch.inf, logs)
    least = logs.topk(count, -1).values[:, -1:]
    is_larger, is_equal = logs > least, logs == least
    is_first = is_equal.cumsum(-1) <= count - is_larger.sum(-1, keepdim=True)
    indices = (is_larger | (is_equal & is_first)).nonzero()[:, 1].view(-1, count)
    order = logs.gather(1, indices).sort(dim=-1, descending=True, stable=True).indices
    return indices.gather(1, order)
