"""What a solve gives on the meta device, which holds no numbers: shapes, dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments, Engine, Gradients, Solution
from pararnn.engines.rule import Merit, Size
from pararnn.program.program import Program


def outputs(program: Program, args: Arguments, info_rows: int = 1) -> Solution:
    """A solution that nothing is written into."""
    new, count = args.gates.new_empty, program.num_states
    states = tuple(new(args.size) for _ in range(count))
    size = (args.sequences, args.channels)
    final = tuple(new(size, dtype=args.dtype) for _ in range(count))
    return Solution(states, final, new((info_rows, 2), dtype=torch.int64))


def gradients(args: Arguments) -> Gradients:
    """Gradients that nothing is written into."""

    def like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors)

    bias = None if args.bias is None else like([args.bias])[0]
    given = map(like, (args.fields, args.params, args.initial))
    return Gradients(torch.empty_like(args.gates), bias, *given)


def _backward(program: Program, args: Arguments, *others: Any) -> Gradients:
    return gradients(args)


def _pays(program: Program, size: Size, dtype: torch.dtype, device: torch.device) -> Merit:
    return Merit(0, "the meta device holds no numbers: results have shapes alone")


def engine_of_shapes(solver: str, backend: str) -> Engine:
    """A pair's engine for the meta device: it takes every cell, and builds nothing."""
    return Engine(solver, backend, outputs, _backward, lambda program: None, _pays, completes=True)
