"""Calls of a tangent program: a call and its direction as one record, and results apart again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.cells.matrix import HeadSizes
from pararnn.engines import table
from pararnn.engines.arguments import Arguments, Options
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.program.program import Program
from pararnn.program.tangent import BIAS, tangent_of

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
    moving = moving_in(program, args, direction)
    gates, bias = args.gates, args.bias
    if program.head_sizes is not None:
        gates = _with_gates(program.head_sizes, gates, direction.gates)
        bias = None if bias is None else _with_bias(program.head_sizes, bias, direction.bias)
    tangent = tangent_of(program, moving.names)
    count = len(program.params)
    initial: tuple[Tensor, ...] = ()
    if args.initial:
        initial = (*args.initial, *map(filled, direction.initial, args.initial))
    both = replace(
        args,
        gates=gates,
        bias=bias,
        fields=(*args.fields, *present(direction.fields), *moving.gates),
        params=(
            *args.params[:count],
            *present(direction.params[:count]),
            *moving.biases,
            *args.params[count:],
            *present(direction.params[count:]),
        ),
        initial=initial,
        options=options_of_tangents(args),
    )
    return TangentCall(tangent, both, pair_for(tangent, pair, both), program, args)


class Moving(NamedTuple):
    """What a direction moves: names of fields, params and memories, and of vectors' gates and BIAS;
    the tangents of these gates (B, T, D) and of biases (D,)."""

    names: list[str]
    gates: list[Tensor]
    biases: list[Tensor]


def moving_in(program: Program, args: Arguments, direction: Any) -> Moving:
    """Return what a direction moves. Raises NotImplementedError for sequences that ranks share."""
    if args.options.context:
        raise NotImplementedError(
            "second and forward-mode derivatives of sequences that ranks share: leave "
            "pararnn.context_parallel for them"
        )
    names = (*program.fields, *program.params, *program.memory)
    tangents = (*direction.fields, *direction.params)
    moving = Moving(
        [name for name, t in zip(names, tangents, strict=True) if t is not None], [], []
    )
    if program.head_sizes is not None:
        return moving
    # Fields and params of their own, which need no copy beside the gates.
    if direction.gates is not None:
        moving.names.extend(program.gates)
        moving.gates.extend(direction.gates.to(args.dtype).flatten(3).unbind(2))
    if direction.bias is not None:
        moving.names.append(BIAS)
        moving.biases.extend(direction.bias.unbind())
    return moving


def options_of_tangents(args: Arguments) -> Options:
    """Return the options of a call's tangents, which are read whole."""
    return args.options._replace(output_only=False, segments=None, burn_in=None, save_values=None)


def pair_for(program: Program, pair: tuple[str, str], args: Arguments) -> tuple[str, str]:
    """Return a pair with a backward pass that takes a call."""
    dtype, device = args.gates.dtype, args.gates.device
    reason = table.why_not(program, pair, dtype, device)
    if reason is None:
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
        f"method ({reason}): use solver='sequential', backend='torch', which is plain "
        "differentiable PyTorch"
    )


def present(tensors: Sequence[Maybe]) -> list[Tensor]:
    """Return those tensors that are there."""
    return [tensor for tensor in tensors if tensor is not None]


def filled(tangent: Maybe, like: Tensor) -> Tensor:
    """Return a tensor's tangent in its dtype, zero if there is none."""
    return torch.zeros_like(like) if tangent is None else tangent.to(like.dtype)


def _with_gates(sizes: HeadSizes, gates: Tensor, tangent: Maybe) -> Tensor:
    pair = gates, filled(tangent, gates)
    return torch.cat([sizes.by_head(x) for x in pair], -1).unsqueeze(2)


def _with_bias(sizes: HeadSizes, bias: Tensor, tangent: Maybe) -> Tensor:
    size = sizes.heads, sizes.width
    return torch.cat([bias.view(size), filled(tangent, bias).view(size)], -1).view(1, -1)


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
    return torch.cat([filled(x, like) for x in pair], -1), None


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
    those of `wanted_of`, of which a matrix cell's gates and bias have tangents beside them."""
    args, sizes, found = call.base_args, call.base.head_sizes, list(grads)
    if sizes is None:
        return found
    for i, (name, _) in enumerate(args.places(wanted)):
        if name == "gates":
            found[i] = found[i][:, :, 0, :, : sizes.width].reshape(args.gates.shape)
        elif name == "bias":
            of_bias = found[i].view(sizes.heads, -1)[:, : sizes.width]
            found[i] = of_bias.reshape(1, -1)
    return found
