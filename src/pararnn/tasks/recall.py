"""Tasks of recall: what was said earlier is asked for later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pararnn.tasks.base import Batch, Task, judged_by, need, need_judge


@dataclass(frozen=True)
class KeepNth(Task):
    """The n-th symbol (from 1) of a sequence.

    The paper does not say where it is judged: judge "all" is at every position from the n-th on,
    "last" at the end only.
    """

    n: int = 5
    vocab: int = 128
    judge: str = "all"
    bare, positions, norm_weights = True, True, False

    def __post_init__(self) -> None:
        need_judge(self.judge)
        need(1 <= self.n <= self.length, f"n must be from 1 to {self.length}, got {self.n}")
        need(self.vocab > 1, f"vocab must be at least 2, got {self.vocab}")

    @property
    def symbols(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.vocab, (count, self.length), generator=generator)
        judged = judged_by(tokens, self.judge, self.n - 1)
        return Batch(tokens, tokens[:, self.n - 1 : self.n].where(judged, 0), judged)


@dataclass(frozen=True)
class MQAR(Task):
    """Multiple-query associative recall: pairs of key and value, then keys among noise.

    At every later key its value is asked for. The paper leaves open what kappa is, and how keys,
    values and noise share the vocabulary. Here kappa is the number of pairs, of different keys; the
    vocabulary's first half holds the `keys` that there are and then noise, its second half the
    values; each place behind the pairs holds noise with a chance of `noise`, else one of the keys.
    By default there are no more keys than pairs, which come in the keys' order; `shuffled`: in any.
    """

    kappa: int = 2
    vocab: int = 128
    keys: int = 2
    shuffled: bool = False
    noise: float = 0.5

    def __post_init__(self) -> None:
        need(self.vocab >= 4, f"vocab must be at least 4, got {self.vocab}")
        most = self.vocab // 2 - 1
        need(1 <= self.keys <= most, f"keys must be from 1 to {most}, got {self.keys}")
        most = min(self.keys, (self.length - 1) // 2)
        need(1 <= self.kappa <= most, f"kappa must be from 1 to {most}, got {self.kappa}")
        need(0 <= self.noise < 1, f"noise must be from 0 and below 1, got {self.noise}")

    @property
    def symbols(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        half = self.vocab // 2
        later = (count, self.length - 2 * self.kappa)
        order = torch.rand(count, self.keys, generator=generator).argsort(1)
        keys = order[:, : self.kappa] if self.shuffled else order[:, : self.kappa].sort(1).values
        values = torch.randint(half, self.vocab, keys.shape, generator=generator)
        pairs = torch.stack([keys, values], -1).flatten(1)
        which = torch.randint(self.kappa, later, generator=generator)
        noise = torch.randint(self.keys, half, later, generator=generator)
        asked = torch.rand(later, generator=generator) >= self.noise
        tail = torch.where(asked, keys.gather(1, which), noise)
        answers = values.gather(1, which).where(asked, 0)
        judged = torch.cat([torch.zeros(pairs.shape, dtype=torch.bool), asked], 1)
        targets = torch.cat([torch.zeros_like(pairs), answers], 1)
        return Batch(torch.cat([pairs, tail], 1), targets, judged)


@dataclass(frozen=True)
class KHop(Task):
    """From every element back to what followed its previous occurrence, `hops` times.

    Judged where all these occurrences exist: the paper's vocabulary has no symbol for "none".
    """

    hops: int = 1
    vocab: int = 10

    def __post_init__(self) -> None:
        need(self.hops > 0, f"hops must be positive, got {self.hops}")
        need(self.vocab > 1, f"vocab must be at least 2, got {self.vocab}")

    @property
    def symbols(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.vocab, (count, self.length), generator=generator)
        follower = _followers(tokens, self.vocab)
        place = follower
        for _ in range(self.hops - 1):
            place = torch.where(place < 0, -1, follower.gather(1, place.clamp_min(0)))
        judged = place >= 0
        return Batch(tokens, tokens.gather(1, place.clamp_min(0)).where(judged, 0), judged)


def _followers(tokens: Tensor, vocab: int) -> Tensor:
    """The place behind each token's previous occurrence, int64 (N, T); -1 where there is none."""
    latest = torch.full((len(tokens) * vocab,), -1)
    own = torch.arange(len(tokens)) * vocab  # where each sequence's entries of `latest` begin
    found = []
    for time, token in enumerate(tokens.T.contiguous()):
        entry = own + token
        found.append(latest.index_select(0, entry))
        latest.index_fill_(0, entry, time + 1)
    return torch.stack(found).T.contiguous()


@dataclass(frozen=True)
class Copying(Task):
    """The first `items` symbols, then blanks; at the last `items` places a mark asks for them.

    Symbols are 0 to vocab - 1, the blank, and the mark.
    """

    items: int = 10
    vocab: int = 8
    scattered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        most = self.length // 2
        need(1 <= self.items <= most, f"items must be from 1 to {most}, got {self.items}")
        need(self.vocab > 0, f"vocab must be positive, got {self.vocab}")

    @property
    def symbols(self) -> int:
        return self.vocab + 2

    @property
    def classes(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        items = torch.randint(self.vocab, (count, self.items), generator=generator)
        inputs = torch.full((count, self.length), self.vocab)
        inputs[:, -self.items :] = self.vocab + 1
        places = torch.arange(self.items).expand(count, -1)
        if self.scattered:
            room = torch.rand(count, self.length - self.items, generator=generator)
            places = room.topk(self.items).indices.sort(1).values
        inputs.scatter_(1, places, items)
        judged = inputs == self.vocab + 1
        targets = torch.zeros_like(inputs)
        targets[:, -self.items :] = items
        return Batch(inputs, targets, judged)


@dataclass(frozen=True)
class SelectiveCopying(Copying):
    """As Copying, with the items scattered among the blanks."""

    scattered = True


@dataclass(frozen=True)
class Adding(Task):
    """Numbers from 0 to 1, two of them marked, one in each half: their sum, at the end.

    Inputs are the number and the mark, a regression by squared error; an answer that is off by less
    than 0.04 counts as right.
    """

    features, tolerance = 2, 0.04

    def __post_init__(self) -> None:
        need(self.length > 1, f"length must be at least 2, got {self.length}")

    @property
    def symbols(self) -> int:
        return 0

    @property
    def classes(self) -> int:
        return 1

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        numbers = torch.rand(count, self.length, generator=generator)
        half = self.length // 2
        first = torch.randint(half, (count, 1), generator=generator)
        second = torch.randint(half, self.length, (count, 1), generator=generator)
        marks = torch.zeros_like(numbers).scatter(1, torch.cat([first, second], 1), 1.0)
        judged = judged_by(numbers, "last")
        total = (numbers * marks).sum(1, keepdim=True)
        return Batch(torch.stack([numbers, marks], -1), total.where(judged, 0), judged)
