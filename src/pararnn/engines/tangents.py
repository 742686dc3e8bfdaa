"""Calls of a tangent program: a call and its direction as one record, and results apart again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.engines import table
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.program.program import Program
from pararnn.program.tangent import tangent_of

Maybe = Tensor | None
NEWTON = ("newton", "torch")
"""The pair that takes what no kernels take."""


class TangentCall(NamedTuple):
    """A call of a tangent program, the pair of the engine that runs it, and the cell's call."""

    program: Program
    args: Arguments
    pair: tuple[str, str]
    base: Program
    base_args: Arguments


def tangent_call(
    program: Program, pair: tuple[str, str], args: Arguments, direction: Any
) -> TangentCall:
    """Return the call that computes states and their tangents along a direction, a record with
    None for each tensor without a tangent.

    It runs by the pair of the cell's call if that takes it, else by the first one with a gradient
    in the order of `auto`. Raises NotImplementedError where none does.
    """
    if args.options.context:
        raise NotImplementedError(
            "second and forward-mode derivatives of sequences that ranks share: leave "
            "pararnn.context_parallel for them"
        )
    names = (*program.fields, *program.params, *program.memory)
    tangents = (*direction.fields, *direction.params)
    moving = [name for name, t in zip(names, tangents, strict=True) if t is not None]
    tangent = tangent_of(program, moving)
    count = len(program.params)
    initial: tuple[Tensor, ...] = ()
    if args.initial:
        initial = (*args.initial, *map(_filled, direction.initial, args.initial))
    both = replace(
        args,
        gates=_with_gates(program, args.gates, direction.gates),
        bias=None if args.bias is None else _with_bias(program, args.bias, direction.bias),
        fields=(*args.fields, *_present(direction.fields)),
        params=(
            *args.params[:count],
            *_present(direction.params[:count]),
            *args.params[count:],
            *_present(direction.params[count:]),
        ),
        initial=initial,
        options=args.options._replace(
            output_only=False, segments=None, burn_in=None, save_values=None
        ),
    )
    return TangentCall(tangent, both, _pair_for(tangent, pair, both), program, args)


def _pair_for(program: Program, pair: tuple[str, str], args: Arguments) -> tuple[str, str]:
    """Return a pair with a backward pass that takes a call."""
    dtype, device = args.gates.dtype, args.gates.device
    if table.why_not(program, pair, dtype, device) is None:
        return pair
    workload = (program.workload_size(args.size), dtype, device)
    heads = heads_of_matrices(args.params) or 1
    choice = table.choose(program, *workload, "auto", "auto", heads)
    if choice.engine().has_backward:
        return choice.pair
    if table.why_not(program, NEWTON, dtype, device) is None:
        return NEWTON
    raise NotImplementedError(
        f"tangents of {program.cell_name.removesuffix('Tangent')} by generated kernels or Newton's "
        "method: use solver='sequential', backend='torch', which is plain differentiable PyTorch"
    )


def _present(tensors: Sequence[Maybe]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _filled(tangent: Maybe, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tangent is None else tangent.to(like.dtype)


def _with_gates(program: Program, gates: Tensor, tangent: Maybe) -> Tensor:
    full = _filled(tangent, gates)
    if program.head_sizes is None:
        return torch.cat([gates, full], 2)
    by_head = program.head_sizes.by_head
    return torch.cat([by_head(gates), by_head(full)], -1).unsqueeze(2)


def _with_bias(program: Program, bias: Tensor, tangent: Maybe) -> Tensor:
    full = _filled(tangent, bias)
    if program.head_sizes is None:
        return torch.cat([bias, full])
    size = program.head_sizes.heads, program.head_sizes.width
    return torch.cat([bias.view(size), full.view(size)], -1).view(1, -1)


def values_of(program: Program, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the values without tangents among what a tangent call returns in place of states."""
    if program.keeps_states:
        return outputs[: program.num_states]
    return [x.tensor_split(2, -1)[0] for x in outputs]


def tangents_of(program: Program, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tangents among what a tangent call returns in place of states."""
    if program.keeps_states:
        return outputs[program.num_states :]
    return [x.tensor_split(2, -1)[1] for x in outputs]


def join_gradients(
    program: Program, of_values: Sequence[Maybe], of_tangents: Sequence[Maybe]
) -> tuple[Maybe, ...]:
    """Return the incoming gradients of what a tangent call returns in place of states."""
    if program.keeps_states:
        return (*of_values, *of_tangents)
    pair = of_values[0], of_tangents[0]
    like = next((x for x in pair if x is not None), None)
    if like is None:
        return None, None
    return torch.cat([_filled(x, like) for x in pair], -1), None


def wanted_of(call: TangentCall, wanted: Sequence[str]) -> list[str]:
    """Return the names of the gradients by a tangent call's arguments that stand where the wanted
    ones by the cell's do; see `Wanted`."""
    weights, memories = len(call.base.params), len(call.program.params)
    single = ("fields", "params", "initial")
    return [
        name
        if name not in single
        else f"{name}.{i if name != 'params' or i < weights else memories + i - weights}"
        for name, i in call.base_args.places(wanted)
    ]


def gradients_of(call: TangentCall, grads: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
    """Return the gradients by a cell's arguments, in the order of `Arguments.leaves(wanted)`, given
    those of `wanted_of`, whose gates and bias have tangents beside them."""
    program, args = call.base, call.base_args
    firsts = {"gates": (_first_gates, args.gates), "bias": (_first_bias, args.bias)}
    found = list(grads)
    for i, (name, _) in enumerate(args.places(wanted)):
        if name in firsts:
            first, like = firsts[name]
            assert like is not None
            found[i] = first(program, found[i]).reshape(like.shape)
    return found


def _first_gates(program: Program, grad: Tensor) -> Tensor:
    if program.head_sizes is None:
        return grad[:, :, : len(program.gates)]
    return grad[:, :, 0, :, : program.head_sizes.width]


def _first_bias(program: Program, grad: Tensor) -> Tensor:
    if program.head_sizes is None:
        return grad[: len(program.gates)]
    return grad.view(program.head_sizes.heads, -1)[:, : program.head_sizes.width]
