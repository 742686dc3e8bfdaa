"""The sequential solver: the recurrence itself, one step after the other. Exact, any cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.base.private import higher_order_scan
from pararnn.solvers.system import System


def unroll(system: System) -> Tensor:
    """Return all states (B, T, N, D) by plain, differentiable PyTorch (paper, eq. rnn_seq)."""
    return torch.stack(unroll_states(system), 2)


def unroll_states(system: System) -> tuple[Tensor, ...]:
    """Return all states, (B, T, D) each, sharing no memory."""
    to_onnx = torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
    if to_onnx and system.length not in (0, 1):
        return _scan_steps(system).unbind(2)
    step = system.program.step
    states = tuple(system.initial.unbind(1))
    inputs = [x.unbind(1) for x in system.inputs]
    start = None if system.start is None else [s.unbind(1) for s in system.start.unbind(2)]
    fresh = None if system.fresh is None else system.fresh.unbind(1)
    padding = None if system.padding is None else system.padding.unbind(1)
    out: list[tuple[Tensor, ...]] = []
    for t in range(system.length):
        if fresh is not None and start is not None:
            states = tuple(
                torch.where(fresh[t], begin[t], s) for begin, s in zip(start, states, strict=True)
            )
        states = step(states, [x[t] for x in inputs], system.params)
        if padding is not None:
            states = tuple(s.masked_fill(padding[t], 0) for s in states)
        out.append(states)
    if not out:
        # Empty, but with a graph to all that entries would depend on.
        leaves = torch.stack([x.sum() for x in (system.initial, *system.inputs, *system.params)])
        batch, num_states, channels = system.initial.shape
        return tuple([leaves.sum().expand(batch, 0, channels).clone() for _ in range(num_states)])
    return tuple([torch.stack(series, 1) for series in zip(*out, strict=True)])


def _scan_steps(system: System) -> Tensor:
    """Return all states by one operator for any T, which becomes ONNX's Scan."""
    step, count = system.program.step, len(system.inputs)
    masks = [x for x in (system.fresh, system.start, system.padding) if x is not None]

    def body(states: tuple[Tensor, ...], series: list[Tensor]) -> tuple[Any, Tensor]:
        inputs, masks = series[:count], series[count:]
        if system.fresh is not None and system.start is not None:
            fresh, begin, *masks = masks
            states = tuple(
                torch.where(fresh, b, s) for b, s in zip(begin.unbind(1), states, strict=True)
            )
        new = step(states, inputs, system.params)
        if masks:
            new = tuple(s.masked_fill(masks[0], 0) for s in new)
        return tuple(s.clone() for s in new), torch.stack(new, 1)

    first = tuple(s.clone() for s in system.initial.unbind(1))
    # Along the first dimension: PyTorch 2.11 stacks there whatever it is told.
    _, states = higher_order_scan(
        body, first, [x.movedim(1, 0) for x in (*system.inputs, *masks)], dim=0
    )
    return states.movedim(0, 1)
