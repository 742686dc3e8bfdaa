"""Layers that keep no gates for the backward pass, but project their input anew there."""

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

from pararnn.engines.arguments import Arguments, Engine
from pararnn.engines.signature import PLAIN_TYPES
from pararnn.errors import warn_user
from pararnn.layers.projection import Projection, headwise_gates
from pararnn.layers.readout import Results, read_out, solve_and_read
from pararnn.op import Source
from pararnn.program.program import Program
from pararnn.solve import run_engine


def gate_source(gates: Tensor, made: Sequence[Projection]) -> Source | None:
    """Return what the gates can be made of again, if they are among what projections have made.

    Hooks of the projection, and modules in its place, do not run again: what they have changed is
    kept, with a warning.
    """
    for one in made:
        other = one.gates
        same = gates is other or (
            type(gates) in PLAIN_TYPES
            and gates.data_ptr() == other.data_ptr()
            and (gates.shape, gates.stride(), gates.dtype)
            == (other.shape, other.stride(), other.dtype)
        )
        if same and gates._version == one.version:
            return Source(partial(headwise_gates, gates=gates.shape[2]), (one.x, one.weight))
    warn_user(
        "recompute_gates: what the projection gave was changed by a hook on it, or by a module in "
        "its place, and cannot be made again: these gates are kept",
        UserWarning,
    )
    return None


def solve_without_gates(
    program: Program, engine: Engine, args: Arguments, source: Source | None
) -> Results:
    """Do what `solve_and_read` does, with a source of the gates kept in their place."""
    if source is None:
        return solve_and_read(program, engine, args)
    if engine.backward is None:
        return recompute(partial(solve_and_read, program, engine), args, source)
    states, final, counts = run_engine(program, engine, args, source)
    output = states[0]
    if program.step.has_readout:
        output = recompute(
            lambda args, *states: read_out(program, args, states), args, source, *states
        )
    return output, states, final, counts


def recompute(
    function: Callable[..., Any], args: Arguments, source: Source, *others: Tensor
) -> Any:
    """Return `function(args, *others)`, of which autograd keeps the arguments but the gates, and
    checks that they are what they were."""
    (gates, *tensors), rest = args.flatten()
    assert gates is not None
    held, wanted, first, own = [gates], gates.requires_grad, len(source.tensors), len(tensors)

    def run(*given: Any) -> Any:
        made = held.pop() if held else source.gates(*given[:first]).requires_grad_(wanted)
        rows = [made, *given[first : first + own]]
        return function(Arguments.unflatten(rows, rest), *given[first + own :])

    source, given = source._replace(tensors=()), (*source.tensors, *tensors, *others)
    del gates
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)


def recompute_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, of which compiled code keeps states alone."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say what is kept of a solve: the states."""
    if op is torch.ops.pararnn.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
