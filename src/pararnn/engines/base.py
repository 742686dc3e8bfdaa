"""What every engine takes and gives: the op's arguments, and one record an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pararnn.engines.split import BY_RULE, Pin, Split
from pararnn.numerics import compute_dtype
from pararnn.program import Program


@dataclass(frozen=True)
class Arguments:
    """The op's tensors, checked: see `pararnn.solve` for their meaning.

    gates (B, T, G, D) or (B, T, G, H, D/H); bias (G, D) or None; fields (B, T, D) each; params (D,)
    each, in their own dtypes; initial (S, D) a state, S sequences, or none at all for zero;
    seq int32 (B, T) or None (row b is sequence b), each sequence one run of steps; reset bool
    (B, T) or None; split: what is asked of (newton, fused), which others leave alone.
    """

    gates: Tensor
    bias: Tensor | None
    fields: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]
    sequences: int
    seq: Tensor | None
    reset: Tensor | None
    reverse: bool
    split: Pin = BY_RULE

    @property
    def channels(self) -> int:
        """D."""
        return math.prod(self.gates.shape[3:])

    def start(self, num_states: int) -> tuple[Tensor, ...]:
        """The initial states, zero if there are none."""
        size = (self.sequences, self.channels)
        return self.initial or tuple(
            self.gates.new_zeros(size, dtype=self.dtype) for _ in range(num_states)
        )

    def completed(self, num_states: int) -> Arguments:
        """These arguments with initial states, and with params in the compute dtype."""
        params = tuple(p.to(self.dtype) for p in self.params)
        return replace(self, initial=self.start(num_states), params=params)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return compute_dtype(self.gates.dtype)


@dataclass(frozen=True)
class Solution:
    """States (B, T, D) in the gates' dtype and final states (S, D) in the compute dtype, a state
    each, and info: int64 (K, 2), sweeps and mended columns of some columns each; see `totals`."""

    states: tuple[Tensor, ...]
    final: tuple[Tensor, ...]
    info: Tensor


def totals(info: Tensor) -> Tensor:
    """What all columns took, int64 (2,): the most sweeps, and how many were mended."""
    return torch.stack([info[:, 0].amax(), info[:, 1].sum()])


@dataclass(frozen=True)
class Gradients:
    """Gradients of the arguments of the same names, in their dtypes and shapes.

    That of the gates has the layout of `torch.empty_like(gates)`; the others are contiguous.
    """

    gates: Tensor
    bias: Tensor | None
    fields: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]


Forward = Callable[[Program, Arguments, str], Solution]
Backward = Callable[
    [Program, Arguments, tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Tensor | None, ...]],
    Gradients,
]
SplitOf = Callable[[Program, tuple[int, int, int], torch.dtype, torch.device, Pin], Split]


@dataclass(frozen=True)
class Engine:
    """A way to run one (solver, backend) pair.

    `forward(program, arguments, on_failure)`; `backward(program, arguments, states, grad_states,
    grad_final)`, or None for an engine that autograd differentiates by itself; `why_not(program)`
    is the reason why this engine cannot take a cell, or None. `build(program, dtype)` makes ready
    what running on gates of `dtype` needs, and raises EngineError where it cannot.
    `completes`: whether it takes arguments as they come; others are given `Arguments.completed`
    ones. `info_rows`: the K of its Solution's info. `split(program, size, dtype, device, asked)`,
    for engines that cut time: how the forward pass on gates of a size (B, T, D) and dtype does.
    Tensors that `forward` and `backward` return share no memory, neither among themselves nor with
    arguments.
    """

    solver: str
    backend: str
    forward: Forward
    backward: Backward | None
    why_not: Callable[[Program], str | None]
    build: Callable[[Program, torch.dtype], object] | None = None
    completes: bool = False
    info_rows: int = 1
    split: SplitOf | None = None
