"""Engines of the meta device, whose results have shapes, dtypes and devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Engine
from pararnn.engines.fit import output_sizes
from pararnn.engines.rule import Rank
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program


def outputs(program: Program, engine: Engine, args: Arguments) -> Solution:
    """Allocate an engine's solution."""
    new = args.gates.new_empty
    state_sizes = (*output_sizes(program, args), *engine.stored(program, args))
    states = tuple([new(size, dtype=dtype) for size, dtype in state_sizes])
    sizes = args.state_sizes(program)
    final = tuple([new((args.sequences, *size), dtype=args.dtype) for size in sizes])
    return Solution(states, final, new((engine.info_rows, 2), dtype=torch.int64))


def gradients(args: Arguments) -> Gradients:
    """Allocate the gradients."""

    def like(tensors: Sequence[Tensor], *first: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty((*first, *t.shape), dtype=t.dtype, device=t.device) for t in tensors
        )

    bias = None if args.bias is None else like([args.bias], *args.samples)[0]
    others = (like(args.fields), like(args.params, *args.samples), like(args.initial))
    return Gradients(torch.empty_like(args.gates), bias, *others)


class MetaEngine(Engine):
    """Engine of a pair on the meta device, for every cell."""

    completes = True

    def __init__(self, solver: str, backend: str) -> None:
        self.solver, self.backend = solver, backend

    def forward(self, program: Program, args: Arguments) -> Solution:
        return outputs(program, self, args)

    def backward(self, program: Program, args: Arguments, *others: Any) -> Gradients:
        return gradients(args)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        return Rank.ON_REQUEST_ONLY, "the meta device holds no numbers: results have shapes alone"
