"""Tasks of recall: an earlier symbol is asked for later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pararnn.lab.tasks.base import JUDGED, Batch, Task, positions_judged
from pararnn.lm.config import POSITIVE, Range, at_least, check_ranges, interval

VOCABULARY = {"vocab": at_least(2)}


@dataclass(frozen=True)
class KeepNth(Task):
    """The n-th symbol (from 1) of a sequence.

    The paper does not say where it is judged: judge "all" is from the n-th position on, "last" at
    the end only.
    """

    n: int = 5
    vocab: int = 128
    judge: str = "all"
    bare, positions, norm_weights = True, True, False

    def __post_init__(self) -> None:
        check_ranges(self, {"judge": JUDGED, "n": interval(1, self.length), **VOCABULARY})

    @property
    def symbols(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.vocab, (count, self.length), generator=generator)
        mask = positions_judged(tokens, self.judge, self.n - 1)
        return Batch(tokens, tokens[:, self.n - 1 : self.n].where(mask, 0), mask)


@dataclass(frozen=True)
class MQAR(Task):
    """Multiple-query associative recall: pairs of key and value, then keys among noise.

    At every later key its value is asked for. The paper does not define kappa, nor how keys, values
    and noise share the vocabulary. Here kappa is the number of pairs, of different keys. The
    vocabulary's first half holds the `keys` and then noise, its second half the values. Each
    position after the pairs holds noise with a chance of `noise`, else one of the keys. By default
    there are as many keys as pairs. Pairs come in the order of their keys; `shuffled`: in any.
    """

    kappa: int = 2
    vocab: int = 128
    keys: int = 2
    shuffled: bool = False
    noise: float = 0.5

    def __post_init__(self) -> None:
        ranges = {
            "vocab": at_least(4),
            "keys": interval(1, self.vocab // 2 - 1),
            "kappa": interval(1, min(self.keys, (self.length - 1) // 2)),
            "noise": Range("from 0 and below 1", lambda x: 0 <= x < 1),
        }
        check_ranges(self, ranges)

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
        is_key = torch.rand(later, generator=generator) >= self.noise
        tail = torch.where(is_key, keys.gather(1, which), noise)
        answers = values.gather(1, which).where(is_key, 0)
        mask = torch.cat([torch.zeros(pairs.shape, dtype=torch.bool), is_key], 1)
        targets = torch.cat([torch.zeros_like(pairs), answers], 1)
        return Batch(torch.cat([pairs, tail], 1), targets, mask)


@dataclass(frozen=True)
class KHop(Task):
    """From every element back to what followed its previous occurrence, `hops` times.

    latest: each hop looks for the latest occurrence before the element, as the paper's figures ask
    for; otherwise for that before the place which the last hop reached (induction heads of k hops,
    arXiv 2402.09268). Judged where all these occurrences exist: the paper's vocabulary has no
    symbol for "none".
    """

    hops: int = 1
    vocab: int = 10
    latest: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, {"length": at_least(2), "hops": POSITIVE, **VOCABULARY})

    @property
    def symbols(self) -> int:
        return self.vocab

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.vocab, (count, self.length), generator=generator)
        latest = torch.full((count, self.vocab), -1)  # the place after each symbol's last one
        once, places = torch.full_like(tokens, -1), []
        for time, token in enumerate(tokens.split(1, 1)):
            once[:, time : time + 1] = place = latest.gather(1, token)
            for _ in range(self.hops - 1):
                near = place.clamp_min(0)
                symbol = tokens.gather(1, near)
                further = latest.gather(1, symbol) if self.latest else once.gather(1, near)
                place = torch.where(place < 0, -1, further)
            places.append(place)
            latest.scatter_(1, token, time + 1)
        place = torch.cat(places, 1)
        mask = place >= 0
        return Batch(tokens, tokens.gather(1, place.clamp_min(0)).where(mask, 0), mask)


@dataclass(frozen=True)
class Copying(Task):
    """The first `items` symbols, then blanks; at the last `items` positions a mark asks for them.

    Symbols are 0 to vocab - 1, the blank, and the mark.
    """

    items: int = 10
    vocab: int = 8
    scattered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self, {"items": interval(1, self.length // 2), "vocab": POSITIVE})

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
        positions = torch.arange(self.items).expand(count, -1)
        if self.scattered:
            chances = torch.rand(count, self.length - self.items, generator=generator)
            positions = chances.topk(self.items).indices.sort(1).values
        inputs.scatter_(1, positions, items)
        mask = inputs == self.vocab + 1
        targets = torch.zeros_like(inputs)
        targets[:, -self.items :] = items
        return Batch(inputs, targets, mask)


@dataclass(frozen=True)
class SelectiveCopying(Copying):
    """As Copying, with the items scattered among the blanks."""

    scattered = True


@dataclass(frozen=True)
class Adding(Task):
    """Numbers from 0 to 1, two of them marked, one in each half: their sum, at the end.

    Inputs are the number and the mark. A regression by squared error; an error below 0.04 counts as
    right.
    """

    features, tolerance = 2, 0.04

    def __post_init__(self) -> None:
        check_ranges(self, {"length": at_least(2)})

    @property
    def symbols(self) -> int:
        return 0

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        numbers = torch.rand(count, self.length, generator=generator)
        half = self.length // 2
        first = torch.randint(half, (count, 1), generator=generator)
        second = torch.randint(half, self.length, (count, 1), generator=generator)
        marks = torch.zeros_like(numbers).scatter(1, torch.cat([first, second], 1), 1.0)
        mask = positions_judged(numbers, "last")
        total = (numbers * marks).sum(1, keepdim=True)
        return Batch(torch.stack([numbers, marks], -1), total.where(mask, 0), mask)
