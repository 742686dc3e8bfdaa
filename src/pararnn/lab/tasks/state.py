"""Tasks of state tracking: each symbol changes a state, and the state is asked after each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pararnn.lab.tasks.base import JUDGED, Batch, Task, positions_judged
from pararnn.lm.config import POSITIVE, at_least, check_ranges, one_of


@dataclass(frozen=True)
class Parity(Task):
    """Parity of the bits so far. The paper asks for that of the sequence.

    It does not say where it is judged: judge "all" is after every bit, "last" at the end only,
    where gradients hardly tell which bit mattered.
    """

    judge: str = "all"
    bare, clip = True, None

    def __post_init__(self) -> None:
        check_ranges(self, {"length": POSITIVE, "judge": JUDGED})

    @property
    def symbols(self) -> int:
        return 2

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        bits = torch.randint(2, (count, self.length), generator=generator)
        mask = positions_judged(bits, self.judge)
        return Batch(bits, (bits.cumsum(1) % 2).where(mask, 0), mask)


@dataclass(frozen=True)
class ModularAddition(Task):
    """The sum of the digits so far, modulo `modulus`; judged at every position."""

    modulus: int = 5
    clip = None

    def __post_init__(self) -> None:
        check_ranges(self, {"length": POSITIVE, "modulus": at_least(2)})

    @property
    def symbols(self) -> int:
        return self.modulus

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        digits = torch.randint(self.modulus, (count, self.length), generator=generator)
        return Batch(digits, digits.cumsum(1) % self.modulus, positions_judged(digits))


GROUPS = ("s3", "a5", "s5")


@cache
def elements(group: str) -> list[tuple[int, ...]]:
    """Return a group's permutations in the order of their symbols; symbol 0 is the identity."""
    permutations = list(itertools.permutations(range(int(group[1:]))))
    return [p for p in permutations if _even(p)] if group[0] == "a" else permutations


def _even(permutation: tuple[int, ...]) -> bool:
    pairs = itertools.combinations(permutation, 2)
    return sum(first > second for first, second in pairs) % 2 == 0


@cache
def product_table(group: str) -> Tensor:
    """Return int64 (n, n): entry (a, b) is the element that applies b first and then a."""
    members = elements(group)
    number = {p: index for index, p in enumerate(members)}
    return torch.tensor([[number[tuple(a[i] for i in b)] for b in members] for a in members])


@dataclass(frozen=True)
class WordProblem(Task):
    """The product of the permutations so far, the newest applied last; judged at every position.

    group: "s3" of 6 elements, solvable; "a5" of 60 and "s5" of 120, which are not. Symbols are all
    its elements, with equal chances.
    """

    group: str = "s3"
    clip = None

    def __post_init__(self) -> None:
        check_ranges(self, {"length": POSITIVE, "group": one_of(*GROUPS)})

    @property
    def symbols(self) -> int:
        return len(elements(self.group))

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        table = product_table(self.group).flatten()
        tokens = torch.randint(self.symbols, (count, self.length), generator=generator)
        products, reach = tokens, 1  # of the last `reach` symbols
        while reach < self.length:
            longer = table[products[:, reach:] * self.symbols + products[:, :-reach]]
            products = torch.cat([products[:, :reach], longer], 1)
            reach *= 2
        return Batch(tokens, products, positions_judged(tokens))


@dataclass(frozen=True)
class Dyck(Task):
    """Brackets of `kinds` kinds, at most `depth` deep: which kind is the innermost open one?

    Symbols are openings 0 to kinds - 1, then the closings in the same order; class `kinds` says
    that none is open. A bracket opens or closes with even odds where both are possible. Judged at
    every position.
    """

    kinds: int = 2
    depth: int = 8
    clip = None

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("length", "kinds", "depth"), POSITIVE))

    @property
    def symbols(self) -> int:
        return 2 * self.kinds

    @property
    def classes(self) -> int:
        return self.kinds + 1

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        size = (self.length, count)
        coin = torch.randint(2, size, generator=generator).bool()
        kinds = torch.randint(self.kinds, size, generator=generator)
        # An entry a level and sequence; level 0 stands for "none is open".
        stack = torch.full((count * (self.depth + 1),), self.kinds)
        base = torch.arange(count) * (self.depth + 1)
        level = torch.zeros(count, dtype=torch.int64)
        top = stack.index_select(0, base)
        tokens, answers = [], []
        for opens, opened in zip(coin, kinds, strict=True):
            opens = ((level == 0) | opens) & (level < self.depth)
            tokens.append(torch.where(opens, opened, top + self.kinds))
            level = torch.where(opens, level + 1, level - 1)
            top = torch.where(opens, opened, stack.index_select(0, base + level))
            stack.index_copy_(0, base + level, top)
            answers.append(top)
        inputs = torch.stack(tokens, 1)
        return Batch(inputs, torch.stack(answers, 1), positions_judged(inputs))
