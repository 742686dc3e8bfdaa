"""Project the input again in the backward pass, instead of saving gates for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pararnn.base.errors import warn_user
from pararnn.base.function import Source
from pararnn.engines.arguments import Arguments
from pararnn.engines.signature import PLAIN_TYPES
from pararnn.layers.projection import Projection, headwise_gates
from pararnn.layers.readout import Results, read_out, solve_and_read
from pararnn.program.program import Program
from pararnn.solve import SolvePlan


def gate_source(gates: Tensor, projections: Sequence[Projection]) -> Source | None:
    """Return the source that computes the gates again; None, with a warning, if there is none.

    Hooks of the projection, and modules in its place, do not run again. If they have changed the
    gates, these are saved.
    """
    for projection in projections:
        made = projection.gates
        same = gates is made or (
            type(gates) in PLAIN_TYPES
            and gates.data_ptr() == made.data_ptr()
            and (gates.shape, gates.stride(), gates.dtype)
            == (made.shape, made.stride(), made.dtype)
        )
        if same and gates._version == projection.version:
            return Source(
                partial(headwise_gates, gates=gates.shape[2]), (projection.x, projection.weight)
            )
    warn_user(
        "recompute_gates: a hook on the projection, or a module in its place, changed its result, "
        "which cannot be computed again: these gates are kept",
        UserWarning,
    )
    return None


def solve_without_gates(
    program: Program, plan: SolvePlan, args: Arguments, source: Source | None
) -> Results:
    """Return what `solve_and_read` returns, saving a source of the gates instead of the gates."""
    if source is None:
        return solve_and_read(program, plan, args)
    if not plan.engine.has_backward:
        return recompute(partial(solve_and_read, program, plan), args, source)
    states, final, counts = plan.run(program, args, source)
    if not program.keeps_states:
        return states[0].flatten(2), (), final, counts
    output = states[0]
    if program.step.has_readout:
        output = recompute(
            lambda args, *states: read_out(program, args, states), args, source, *states
        )
    return output, states, final, counts


def recompute(
    function: Callable[..., Any], args: Arguments, source: Source, *states: Tensor
) -> Any:
    """Return `function(args, *states)`; autograd saves all arguments but the gates, and checks that
    they are unchanged."""
    (gates, *tensors), values = args.flatten()
    assert gates is not None
    first_gates, needs_grad = [gates], gates.requires_grad
    sources, count = len(source.tensors), len(tensors)

    def run(*operands: Any) -> Any:
        if first_gates:
            gates = first_gates.pop()
        else:
            with torch.no_grad():  # a checkpoint takes values from here, not their graph
                gates = source.gates(*operands[:sources])
            gates.requires_grad_(needs_grad)
        tensors = [gates, *operands[sources : sources + count]]
        return function(Arguments.unflatten(tensors, values), *operands[sources + count :])

    source, operands = source._replace(tensors=()), (*source.tensors, *tensors, *states)
    del gates
    return checkpoint(run, *operands, use_reentrant=False, preserve_rng_state=False)


def recompute_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; compiled code saves only the states of its solves."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy that saves the states of a solve and nothing else."""
    if op is torch.ops.pararnn.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
