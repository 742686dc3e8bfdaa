"""Exports to ONNX: layers of torch.nn's LSTM, GRU and RNN by ONNX's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import autocast_dtype, compute_dtype
from pararnn.cells import Cell
from pararnn.layers.projection import Weights
from pararnn.sequences import Sequences
from pararnn.solve import SolveInputs
from pararnn.zoo import HeadElmanCell, HeadGRUCell, HeadLSTMCell


class Operator(NamedTuple):
    """An operator of ONNX: its name, its gates by the cell's names, and its attributes."""

    name: str
    gates: tuple[str, ...]
    attributes: dict[str, Any]


def operator_of(
    cell: Cell, x: Tensor, weights: Weights, sequences: Sequences, all_states: bool
) -> Operator | None:
    """Return the operator that computes a layer's call on x; None if there is none.

    They have one head, no resets, padding on the right, and return all values of one state only.
    Runtimes have them in float32: float64 would lose digits, and autocast rounds in between.
    """
    if sequences.reset is not None or (sequences.seq is not None and sequences.lengths is None):
        return None
    if compute_dtype(x.dtype) != torch.float32 or autocast_dtype(x.device):
        return None
    if x.dtype != weights.projection.dtype:  # an error, which the projection raises
        return None
    if cell.num_heads != 1 or (all_states and len(cell.states) > 1):
        return None
    if type(cell) is HeadLSTMCell:
        return Operator("LSTM", ("i", "o", "f", "g"), {})
    if type(cell) is HeadGRUCell:
        return Operator("GRU", ("z", "r", "n"), {"linear_before_reset": 1})
    activation = {"tanh": "Tanh", "relu": "Relu"}.get(getattr(cell, "state_nonlinearity", ""))
    if type(cell) is HeadElmanCell and activation:
        return Operator("RNN", ("h_in",), {"activations": [activation]})
    return None


def run_operator(
    operator: Operator, cell: Cell, x: Tensor, inputs: SolveInputs, weights: Weights
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a layer's output (B, T, D), and its final states (B, D) in float32, by an operator."""
    from torch.onnx import ops

    initial, lengths = inputs.initial, inputs.sequences.lengths

    (batch, steps, _), size, count = x.shape, cell.hidden_size, len(cell.states)
    states = () if initial is None else (initial,) if isinstance(initial, Tensor) else initial
    order = [list(type(cell).gates).index(name) for name in operator.gates]
    rows = weights.projection.unflatten(0, (1, len(order), size)).unbind(1)
    matrices, vectors = weights.params[: len(order)], weights.params[len(order) :]
    bias = None
    if weights.bias is not None:
        # Of the input, and of the states: the GRU has one there, for its last gate.
        of_states = [weights.bias.new_zeros(size)] * (len(order) - len(vectors))
        bias = torch.cat([*(weights.bias[i] for i in order), *of_states, *vectors]).unsqueeze(0)
    operands = [
        x.transpose(0, 1).float(),
        torch.cat([rows[i] for i in order], 1).float(),
        torch.cat([matrices[i] for i in order], 1).float(),
        None if bias is None else bias.float(),
        None if lengths is None else lengths.to(torch.int32),
        *(state.float().unsqueeze(0) for state in states),
    ]
    direction = "reverse" if inputs.options.reverse else "forward"
    outputs = ops.symbolic_multi_out(
        operator.name,
        operands,
        {"hidden_size": size, "direction": direction, **operator.attributes},
        dtypes=[torch.float32] * (1 + count),
        shapes=[[steps, 1, batch, size], *[[1, batch, size]] * count],
    )
    output, *final = _only_in_onnx(outputs, x)
    final = [state.squeeze(0) for state in final]
    if lengths is not None or not isinstance(steps, int):
        # Without a step runtimes return zeros, or memory that they have not written.
        some = (torch.full((1,), steps, device=x.device) if lengths is None else lengths) > 0
        begin: Sequence[Tensor | float] = [state.float() for state in states] or [0.0] * count
        pairs = zip(final, begin, strict=True)
        final = [torch.where(some.unsqueeze(1), h, start) for h, start in pairs]
    return output.squeeze(1).transpose(0, 1).to(x.dtype), tuple(final)


def _only_in_onnx(outputs: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return an operator's outputs, divided by a 1 that is 0 in PyTorch.

    There operators of ONNX return zeros. Whoever runs the exported program in PyTorch gets NaN.
    """
    from torch.onnx import ops

    one = ops.symbolic("Identity", [torch.ones(())], dtype=torch.float32, shape=())
    return [(output / one).to(like.device) for output in outputs]
