"""Engine: runs one (solver, backend) pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.fit import saved_size
from pararnn.engines.rule import Rank
from pararnn.engines.split import Split, SplitRequest
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program

Incoming = tuple[Tensor | None, ...]
"""Incoming gradients, one a state; None for an absent one."""


class BackwardInputs(NamedTuple):
    """States as a forward pass has returned them, incoming gradients of these and of final states,
    and the names, in LEAVES, of the arguments whose gradients are wanted."""

    states: tuple[Tensor, ...]
    grad_states: Incoming
    grad_final: Incoming
    wanted: Sequence[str]


class Engine:
    """Way to run one (solver, backend) pair; subclasses define the passes.

    Tensors that `forward` and `backward` return share no memory, neither among themselves nor with
    arguments.
    """

    solver: str
    backend: str
    has_backward = True
    """False if autograd differentiates `forward` by itself."""
    completes = False
    """True if the engine takes arguments as they come; others get `Arguments.completed` ones."""
    builds = False
    """True if `build` has to make something before the engine can run."""
    cuts_time = False
    """True if the engine runs segments of time, and defines `plan_split`."""
    info_rows = 1
    """K of the info of a Solution."""

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve the recurrence."""
        raise NotImplementedError

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return the gradients of the wanted arguments."""
        raise NotImplementedError

    def check_backward(self, program: Program, args: Arguments) -> None:
        """Raise EngineError where `backward` could not run after a call's forward pass."""

    def sums_samples(self, program: Program) -> bool:
        """Return True if `backward` does what `Options.samples` says."""
        return False

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True if `forward` on gates of a dtype can do what `Options.save_values` says."""
        return False

    def linearises_returned(self, program: Program) -> bool:
        """Return True if gradients are those at the returned states, False if at those that the
        forward pass carried, before they were rounded to the gates' dtype."""
        return self.has_backward

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return sizes and dtypes of what `forward` gives behind its outputs, for `backward`."""
        return [(saved_size(program, args), args.dtype)] if args.options.save_values else []

    def why_not(self, program: Program) -> str | None:
        """Return the reason why this engine cannot run a cell, or None."""
        return None

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        """Return the engine's rank among those that a request allows, and the reason for it."""
        raise NotImplementedError

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Make what a run on gates of `dtype` needs; without `compiles` only generate its code.

        Raises EngineError where that fails.
        """

    def plan_split(self, program: Program, workload: Workload, request: SplitRequest) -> Split:
        """Plan the segments of a forward pass on gates of the usual layout."""
        raise NotImplementedError
