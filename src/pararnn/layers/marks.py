"""A layer's run with its carried states after some steps, as a later call continues from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.base.tensors import States, as_states
from pararnn.cells.base import unwrap
from pararnn.engines.table import why_not
from pararnn.layers.readout import read_out
from pararnn.layers.recurrent import RecurrentLayer
from pararnn.program.program import program_of
from pararnn.solve import Fields, plan_solve

Marked = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
"""A layer's output (B, T, ...), its final states, and its states after n steps, (B, n, ...)."""


def run_with_marks(
    layer: RecurrentLayer,
    x: Tensor,
    initial: States | None,
    steps: Sequence[int],
    fields: Fields | None = None,
) -> Marked:
    """Run a layer over whole rows; return its states after some steps too, without a gradient.

    Args:
        x, initial, fields: as in `RecurrentLayer.forward`.
        steps: increasing numbers of steps, from 1 to T.

    States have the dtype in which they are carried, float32 for 16-bit outputs. A layer whose
    solver keeps the states of all steps, and runs on gates of that dtype too, runs once. Others,
    such as those of matrix states, run by pieces that end at the steps, and so do 16-bit layers
    with `batch_invariant`: the output has the bits of a call without marks.
    """
    with torch.no_grad():
        if unwrap(layer.cell).keeps_states:
            result = _run_once(layer, x, initial, steps, fields)
            if result is not None:
                return result
        return _run_pieces(layer, x, initial, steps, fields)


def _run_once(
    layer: RecurrentLayer,
    x: Tensor,
    initial: States | None,
    steps: Sequence[int],
    fields: Fields | None,
) -> Marked | None:
    """Run over all steps at once; None where no engine of the layer's pair takes wide gates."""
    args = layer.arguments(x, initial, fields=fields, all_states=True)
    program = program_of(unwrap(layer.cell))
    pair = plan_solve(program, args, *layer.requested_pair()).choice.pair
    is_wide = args.gates.dtype == args.dtype
    # Kernels on wide gates have other bits than those on narrow ones.
    if why_not(program, pair, args.dtype, x.device) or (layer.batch_invariant and not is_wide):
        return None
    # States of all steps have the gates' dtype: wide gates keep theirs, and change no other number.
    wide = replace(args, gates=args.gates.to(args.dtype))
    states, final, _ = plan_solve(program, wide, *pair).run(program, wide)
    narrow = [state.to(args.gates.dtype) for state in states]
    output = read_out(program, args, narrow) if program.step.has_readout else narrow[0]
    return output, final, tuple([after_steps(state, steps, 1) for state in states])


def _run_pieces(
    layer: RecurrentLayer,
    x: Tensor,
    initial: States | None,
    steps: Sequence[int],
    fields: Fields | None,
) -> Marked:
    outputs, marked, state = [], [], initial
    for first, end in pieces(steps, x.shape[1]):
        output, state = layer(x[:, first:end], state, fields=fields)
        outputs.append(output)
        marked.append(as_states("state", state))
    columns = zip(*marked[: len(steps)], strict=True)
    final = marked[-1]
    none = tuple([h.new_empty(len(h), 0, *h.shape[1:]) for h in final])
    return torch.cat(outputs, 1), final, tuple([torch.stack(c, 1) for c in columns]) or none


def after_steps(states: Tensor, steps: Sequence[int], first: int) -> Tensor:
    """Return the states (B, n, ...) after n steps from those (B, T, ...) after steps `first` on."""
    stride = steps[1] - steps[0] if len(steps) > 1 else 1
    if not steps or [*steps] == [*range(steps[0], steps[-1] + 1, stride)]:
        # A recorded graph may copy no index. Most of them as a view: it holds on to all others.
        start = steps[0] - first if steps else states.shape[1]
        chosen = states[:, start : start + stride * len(steps) : stride]
        is_view = 2 * len(steps) >= states.shape[1]
        return chosen if is_view else chosen.clone(memory_format=torch.contiguous_format)
    index = torch.tensor(steps, device=states.device, dtype=torch.long) - first
    return states.index_select(1, index)


def pieces(steps: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Return first steps and ends of the pieces of a row that end at some steps and at the last."""
    return list(itertools.pairwise(sorted({0, *steps, total})))
