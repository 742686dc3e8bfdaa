"""What a synthetic task is: batches with judged positions, a metric and what guessing reaches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

CHANCE_ROWS = 4096


class Batch(NamedTuple):
    """N sequences: inputs, int64 tokens (N, T) or float32 features (N, T, F); targets (N, T), int64
    classes or float32 values; judged, bool (N, T): where loss and metric look.

    Targets are 0 where nothing is judged.
    """

    inputs: Tensor
    targets: Tensor
    judged: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """A task: subclass it as a frozen dataclass whose fields are its options.

    `symbols` are the tokens of inputs, `features` the numbers in their place, `classes` what
    targets are among; a regression has `tolerance`, up to which a value counts as right, and one
    class. `bare`, `positions`, `clip` and `norm_weights` are how the paper's models meet the task
    (Appendix C.2): the cell alone or the full block, fixed sinusoids or none, the bound of
    recurrent weights, and whether the outer norms have weights, as its parameter counts say.
    """

    length: int = 100

    features: ClassVar[int] = 0
    tolerance: ClassVar[float] = 0.0
    bare: ClassVar[bool] = False
    positions: ClassVar[bool] = False
    clip: ClassVar[float | None] = 0.9
    norm_weights: ClassVar[bool] = True

    @property
    @abstractmethod
    def symbols(self) -> int:
        """How many tokens there are; 0 where inputs are features."""

    @property
    def classes(self) -> int:
        """How many classes targets are among; 1 for a regression. Tokens, if not said otherwise."""
        return self.symbols

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """`count` sequences, independent, on the CPU."""

    @property
    def regression(self) -> bool:
        """Whether targets are values, trained on by squared error."""
        return self.tolerance > 0

    def at(self, length: int) -> Task:
        """The same task at another length."""
        return replace(self, length=length)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Where outputs (..., T, classes) say the targets (..., T): bool (..., T)."""
        if self.regression:
            return (outputs.squeeze(-1) - targets).abs() < self.tolerance
        return outputs.argmax(-1) == targets

    def chance(self) -> float:
        """The accuracy of the best constant answer, on sequences of a fixed seed."""
        batch = self.draw(CHANCE_ROWS, generator_of(0))
        answers = batch.targets[batch.judged]
        if self.regression:
            return ((answers - answers.mean()).abs() < self.tolerance).float().mean().item()
        return (answers.bincount().amax() / len(answers)).item()


def generator_of(*seed: int) -> torch.Generator:
    """A generator on the CPU, its seed mixed from several numbers."""
    mixed = 0
    for part in seed:
        mixed = (mixed * 0x9E3779B97F4A7C15 + part + 1) % 2**63
    return torch.Generator().manual_seed(mixed)


def need(holds: bool, what: str) -> None:
    """ValueError that says what an option must be, unless it holds."""
    if not holds:
        raise ValueError(what)


def judged_all(tokens: Tensor) -> Tensor:
    """Every position counts."""
    return torch.ones(tokens.shape, dtype=torch.bool)


def judged_by(tokens: Tensor, judge: str, first: int = 0) -> Tensor:
    """The last position, or all from the first that can be answered on, as `judge` says."""
    judged = torch.zeros(tokens.shape, dtype=torch.bool)
    judged[:, first if judge == "all" else -1 :] = True
    return judged


def need_judge(judge: str) -> None:
    """ValueError unless it is a way to judge."""
    need(judge in ("all", "last"), f"judge must be all or last, got {judge!r}")
