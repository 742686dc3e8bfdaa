"""A synthetic task: batches with judged positions, a metric, and the accuracy of guessing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pararnn.lm.config import Range

CHANCE_ROWS = 4096


class Batch(NamedTuple):
    """N sequences: inputs, int64 tokens (N, T) or float32 features (N, T, F); targets (N, T), int64
    classes or float32 values, 0 where not judged; judged, bool (N, T), the positions that loss and
    metric read.
    """

    inputs: Tensor
    targets: Tensor
    judged: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """A task: subclass it as a frozen dataclass whose fields are its options.

    Inputs are `symbols` tokens, or `features` numbers a step. Targets are `classes` classes; a
    regression has one class and a `tolerance`, below which an error counts as right. `bare`,
    `positions`, `clip` and `norm_weights` are the paper's models for this task (Appendix C.2): the
    cell alone or the full block, fixed sinusoids or none, the bound of recurrent weights, and
    whether the outer norms have weights, which follows from its parameter counts.
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
        """Number of tokens; 0 where inputs are features."""

    @property
    def classes(self) -> int:
        """Number of classes of targets, by default that of tokens; 1 for a regression."""
        return 1 if self.regression else self.symbols

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw `count` independent sequences, on the CPU."""

    @property
    def regression(self) -> bool:
        """True if targets are values, trained on by squared error."""
        return self.tolerance > 0

    def at(self, length: int) -> Task:
        """Return the same task at another length."""
        return replace(self, length=length)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compare outputs (..., T, classes) with targets (..., T): bool (..., T)."""
        if self.regression:
            return (outputs.squeeze(-1) - targets).abs() < self.tolerance
        return outputs.argmax(-1) == targets

    def chance(self) -> float:
        """Return the accuracy of the best constant answer, on sequences of a fixed seed."""
        batch = self.draw(CHANCE_ROWS, generator_of(0))
        answers = batch.targets[batch.judged]
        if self.regression:
            return ((answers - answers.mean()).abs() < self.tolerance).float().mean().item()
        return (answers.bincount().amax() / len(answers)).item()


def generator_of(*seed: int) -> torch.Generator:
    """Make a generator on the CPU, its seed mixed from several numbers."""
    mix = 0
    for number in seed:
        mix = (mix * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(mix)


JUDGED = Range("all or last", lambda judge: judge in ("all", "last"))
"""Range of a task's `judge`."""


def positions_judged(tokens: Tensor, judge: str = "all", first: int = 0) -> Tensor:
    """Return bool (N, T), True at the last position or from `first` on, as `judge` says."""
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, first if judge == "all" else -1 :] = True
    return mask
