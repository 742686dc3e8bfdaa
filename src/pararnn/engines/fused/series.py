"""Statements of gates and parameters, evaluated by PyTorch at all steps of a matrix cell's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments
from pararnn.program.program import Program
from pararnn.program.pullback import evaluate
from pararnn.program.statements import Statements

Series = dict[tuple[str, int], Tensor]
"""Tensors (B, T, H, ...) by kind and number, as `Statements.inputs`."""


def inputs_of(
    program: Program,
    args: Arguments,
    statements: Statements,
    others: Mapping[tuple[str, int], Tensor],
) -> Series:
    """Return what statements read, in the compute dtype; others: what is neither gate nor
    parameter."""
    sizes, tensors = program.step.head, Series()
    gates = sizes.split(sizes.by_head(args.gates))
    biases: tuple[Tensor, ...] = ()
    if args.bias is not None:
        biases = sizes.split(args.bias.to(args.dtype).view(sizes.heads, sizes.width))
    for kind, number in statements.inputs:
        if kind == "gate":
            gate = gates[number].to(args.dtype)
            tensors[kind, number] = gate + biases[number] if biases else gate
        elif kind == "param":
            tensors[kind, number] = args.params[number].to(args.dtype)
        else:
            tensors[kind, number] = others[kind, number]
    return tensors


def of_sequences(args: Arguments, x: Tensor) -> Tensor:
    """Return (B, T, ...) with zero at steps of no sequence."""
    if args.seq is None:
        return x
    real = (args.seq >= 0).reshape(*args.seq.shape, *[1] * (x.ndim - 2))
    return torch.where(real, x, x.new_zeros(()))


def as_series(value: Tensor | float, args: Arguments) -> Tensor:
    """Return a value of a statement as a tensor; numbers without a copy from the host, which no
    recorded graph takes."""
    if isinstance(value, Tensor):
        return value
    return torch.scalar_tensor(value, dtype=args.dtype, device=args.gates.device)


class Pulled(NamedTuple):
    """Gradients of what statements read: of gates, None without one; params (B, T, H, numbers);
    others by kind and number."""

    gates: list[Tensor | None]
    params: Tensor
    others: Series


def pull(program: Program, args: Arguments, backward: Statements, tensors: Series) -> Pulled:
    """Return the gradients that statements write, zero at steps of no sequence."""
    sizes, numbers = program.step.head, program.param_numbers
    lead = (*args.gates.shape[:2], sizes.heads)
    pulled = Pulled(
        [None] * len(sizes.gates), args.gates.new_zeros((*lead, sum(numbers)), dtype=args.dtype), {}
    )
    of_params = pulled.params.split(numbers, -1)
    for target, value in evaluate(backward, tensors) if tensors else ():
        x = of_sequences(args, as_series(value, args))
        size = [sizes.lengths[axis] for axis in target.axes]
        if target.kind == "grad_gate":
            pulled.gates[target.number] = x
        elif target.kind == "grad_param":
            of_params[target.number].copy_(x.expand(*lead, *size).reshape(*lead, -1))
        else:
            kind = target.kind.removeprefix("grad_")
            pulled.others[kind, target.number] = x.expand(*lead, *size)
    return pulled
