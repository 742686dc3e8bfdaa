"""Calls of a program of tangents along known states, which are inputs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.base.numerics import without_autocast
from pararnn.cells.products import product
from pararnn.engines.arguments import Arguments, Gradients
from pararnn.engines.forward_time import in_order
from pararnn.engines.tangents import (
    Maybe,
    TangentCall,
    filled,
    moving_in,
    options_of_tangents,
    pair_for,
    present,
)
from pararnn.program.along import Known, KnownProduct, along, known_of
from pararnn.program.program import Program
from pararnn.solvers.boundaries import Boundaries


def along_call(
    program: Program,
    pair: tuple[str, str],
    args: Arguments,
    direction: Arguments | Gradients,
    states: Sequence[Tensor],
) -> TangentCall:
    """Return the call that computes the tangents along a direction of the states (B, T, D) that a
    call has returned; differentiable by these, the call's tensors and the direction.

    direction: a record with None for each tensor without a tangent. The program has `known_of`.
    Pair and errors as those of `tangent_call`.
    """
    known = known_of(program)
    assert known is not None
    moving = moving_in(program, args, direction)
    vectors = [
        None if is_matrix else tangent
        for tangent, is_matrix in zip(direction.params, program.step.matrices, strict=True)
    ]
    with without_autocast(args.gates.device):
        before = states_before(args, states)
        products = [products_of(known, before, some) for some in (args.params, direction.params)]
    moves = any(tangent is not None for tangent in direction.initial)
    call = replace(
        args,
        fields=(
            *args.fields,
            *(before[i] for i in known.states),
            *present([*products[0], *products[1]]),
            *present(direction.fields),
            *moving.gates,
        ),
        params=(*args.params, *present(vectors), *moving.biases),
        initial=tuple(map(filled, direction.initial, args.initial)) if moves else (),
        options=options_of_tangents(args),
    )
    tangents = along(program, moving.names)
    return TangentCall(tangents, call, pair_for(tangents, pair, call), program, args)


def states_before(args: Arguments, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the states (B, T, D) before each step of a call, in its order of time, of those after
    each step; differentiable. They are rounded to the dtype of these."""
    reverse, seq, reset = args.options.reverse, args.seq, args.reset
    first: Sequence[Tensor] = args.initial
    boundaries, zero = None, reset
    if seq is not None or not first:
        first = [x.new_zeros((x.shape[0], x.shape[2])) for x in states]
    if seq is not None:
        in_time = [None if x is None else in_order(x, reverse) for x in (seq, reset)]
        found = Boundaries.of(*in_time)  # type: ignore[arg-type]
        boundaries = Boundaries(*(in_order(x, reverse) for x in vars(found).values()))
        zero = boundaries.padding if reset is None else boundaries.padding | reset
    before = []
    for index, (state, start) in enumerate(zip(states, first, strict=True)):
        edge, steps = start.to(state.dtype).unsqueeze(1), state.shape[1]
        ends = (state[:, 1:], edge) if reverse else (edge, state[:, :-1])
        earlier = torch.cat(ends, 1)[:, :steps]
        if boundaries is not None:
            begun: Tensor | float = 0.0
            if args.initial:
                begun = boundaries.initial(args.initial[index].to(state.dtype))
            earlier = torch.where(boundaries.begins.unsqueeze(-1), begun, earlier)
        before.append(earlier if zero is None else earlier.masked_fill(zero.unsqueeze(-1), 0))
    return before


def products_of(known: Known, before: Sequence[Tensor], factors: Sequence[Maybe]) -> list[Maybe]:
    """Return the products of a step, (B, T, D) each, of the states before each step and matrices,
    or their tangents; None for a matrix that is None. One product for those of a state with
    matrices of a single head."""
    found: dict[KnownProduct, Tensor] = {}
    for state, x in enumerate(before):
        group: dict[KnownProduct, Tensor] = {}
        for which in known.products:
            factor = factors[which.matrix]
            if which.state == state and factor is not None:
                group[which] = factor.mT if which.transpose else factor
        if not group:
            continue
        matrices = [*group.values()]
        x = x.to(torch.promote_types(x.dtype, matrices[0].dtype))
        matrices = [matrix.to(x.dtype) for matrix in matrices]
        if all(matrix.ndim == 2 or len(matrix) == 1 for matrix in matrices):
            whole = torch.cat([matrix.flatten(0, -2) for matrix in matrices], -1)
            results = (x @ whole).chunk(len(matrices), -1)
        else:
            results = tuple([product(x, matrix) for matrix in matrices])
        found |= dict(zip(group, results, strict=True))
    return [found.get(which) for which in known.products]
