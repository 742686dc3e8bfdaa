"""The loop over time: step after step, or in exports to ONNX one operator for any T."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pararnn.base.private import exporting_to_onnx, higher_order_scan
from pararnn.solvers.onnx_math import call_precisely

Tensors = tuple[Tensor, ...]
Body = Callable[[Tensors, Sequence[Tensor], Sequence[Tensor], int], tuple[Tensors, Tensors]]
"""One step: takes the carried tensors, the step's rows of all series, the parameters and the number
of the step; returns the carried tensors and the outputs."""


def run_steps(
    body: Body, carry: Tensors, series: Sequence[Tensor], params: Sequence[Tensor], length: int
) -> tuple[Tensors, Tensors]:
    """Run a loop over series (B, T, ...) of T = `length` steps.

    Return the carried tensors after the last step, and the outputs stacked, (B, T, ...) each; no
    outputs without a step. In an export to ONNX every step has number 0.
    """
    if exporting_to_onnx() and length not in (0, 1):
        return _scan(body, carry, series, params)
    rows = [x.unbind(1) for x in series]
    outputs: list[Tensors] = []
    for t in range(length):
        carry, output = call_precisely(body, carry, [x[t] for x in rows], params, t)
        outputs.append(output)
    return carry, tuple([torch.stack(steps, 1) for steps in zip(*outputs, strict=True)])


def _scan(
    body: Body, carry: Tensors, series: Sequence[Tensor], params: Sequence[Tensor]
) -> tuple[Tensors, Tensors]:
    """Run steps by PyTorch's scan operator, which becomes ONNX's Scan.

    Tensors are detached: ONNX has no gradients, and the exporter would derive the operator's.
    """
    count, end = len(carry), len(carry) + len(series)

    def step(*tensors: Tensor) -> list[Tensor]:
        rows, params = tensors[count:end], tensors[end:]
        new, outputs = call_precisely(body, tensors[:count], rows, params, 0)
        return _unshared(*new, *outputs)

    rows = [x.detach().movedim(1, 0) for x in series]
    results = higher_order_scan(step, _unshared(*carry), rows, _unshared(*params))
    return results[:count], tuple([x.movedim(0, 1) for x in results[count:]])


def _unshared(*tensors: Tensor) -> list[Tensor]:
    """Return copies of tensors that share no memory, as the operator requires."""
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
