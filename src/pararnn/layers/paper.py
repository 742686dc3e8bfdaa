"""Weights as the paper's interface names them (Appendix D): A, B, b, and C for peepholes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pararnn.base.parameters import assign
from pararnn.base.tensors import check_tensor
from pararnn.cells import Cell
from pararnn.cells.base import unwrap
from pararnn.layers.recurrent import RecurrentLayer
from pararnn.layers.rnn import ParaRNN
from pararnn.zoo import GRUCell, LSTMCell

ROWS: dict[type[Cell], tuple[tuple[str, ...], tuple[str, ...]]] = {
    GRUCell: (("a_z", "a_r", "a_c"), ()),
    LSTMCell: (("a_f", "a_z", "a_o"), ("c_f", "c_o")),
}
"""The parameters of each cell that make up A (one row a gate, in the gates' order) and C."""


def load_paper_weights(
    layer: ParaRNN | RecurrentLayer, A: Tensor, B: Tensor, b: Tensor, C: Tensor | None = None
) -> None:
    """Copy one layer's weights from the plain tensors of the paper's interface.

    Args:
        layer: a ParaGRU or ParaLSTM of one layer and direction, or one layer of a deeper one:
            `rnn.layers[i]`, `rnn.reverse_layers[i]`.
        A: recurrent weights (G, D), gates in the order z, r, c (GRU) and f, z, o (LSTM).
        B: input weights (G, D, input), or with heads (G, H, D/H, input/H).
        b: biases (G, D).
        C: the LSTM's peephole weights (2, D), f and o.

    A, b and C may come by head, (G, H, D/H). Values are converted to the layer's dtype and device.
    Raises TypeError for other cells and what is no tensor, ValueError for wrong sizes.
    """
    one = _single_layer(layer)
    cell = unwrap(one.cell)
    (recurrent, peepholes), heads = _rows(cell), one.proj.num_heads
    gates, channels, inputs = len(cell.gates), cell.hidden_size, one.proj.weight.shape[2]
    if (C is None) == bool(peepholes):
        raise ValueError(f"{type(cell).__name__} has {len(peepholes)} rows of peephole weights C")
    if one.bias is None:
        raise ValueError("the layer has no bias to put b into: make it with bias=True")
    by_head = (gates, heads, channels // heads, inputs)
    weight = _checked_size("B", B, by_head, *(() if heads > 1 else ((gates, channels, inputs),)))
    weight = weight.reshape(by_head).transpose(0, 1).reshape(heads, -1, inputs)

    def rows(name: str, value: Tensor, count: int) -> Tensor:
        sizes = ((count, channels), (count, heads, channels // heads))
        return _checked_size(name, value, *sizes).reshape(count, channels)

    new: list[tuple[nn.Module, str, Tensor]] = [
        (one.proj, "weight", weight),
        (one, "bias", rows("b", b, gates)),
        *((cell, name, row) for name, row in zip(recurrent, rows("A", A, gates), strict=True)),
    ]
    if C is not None:
        peephole_rows = rows("C", C, len(peepholes))
        new += [(cell, name, row) for name, row in zip(peepholes, peephole_rows, strict=True)]
    for module, name, value in new:
        assign(module, name, value)


def paper_weights(layer: ParaRNN | RecurrentLayer) -> dict[str, Tensor]:
    """Return one layer's weights as `load_paper_weights` takes them: A, B, b, and C for the LSTM.

    Detached copies; with several heads B is (G, H, D/H, input/H). A layer without biases has zeros.
    """
    one = _single_layer(layer)
    cell = unwrap(one.cell)
    (recurrent, peepholes), heads = _rows(cell), one.proj.num_heads
    gates, channels, inputs = len(cell.gates), cell.hidden_size, one.proj.weight.shape[2]
    weight = one.proj.weight.detach().reshape(heads, gates, channels // heads, inputs)
    weights = {
        "A": torch.stack([getattr(cell, name).detach() for name in recurrent]),
        "B": weight.transpose(0, 1).squeeze(1).clone(memory_format=torch.contiguous_format),
        "b": weight.new_zeros(gates, channels) if one.bias is None else one.bias.detach().clone(),
    }
    if peepholes:
        weights["C"] = torch.stack([getattr(cell, name).detach() for name in peepholes])
    return weights


def _single_layer(layer: nn.Module) -> RecurrentLayer:
    if isinstance(layer, RecurrentLayer):
        return layer
    if isinstance(layer, ParaRNN) and layer.num_layers == 1 and not layer.bidirectional:
        return layer.get_submodule("layers.0")  # type: ignore[return-value]
    raise TypeError(
        "A, B and b are one layer's weights: give a ParaRNN of one layer and direction, or one of "
        f"rnn.layers and rnn.reverse_layers, not {type(layer).__name__}"
    )


def _rows(cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for cell_class, rows in ROWS.items():
        if isinstance(cell, cell_class):
            return rows
    names = ", ".join(cell_class.__name__ for cell_class in ROWS)
    raise TypeError(f"the paper's A, B, b are those of {names}, got {type(cell).__name__}")


def _checked_size(name: str, value: Tensor, *sizes: tuple[int, ...]) -> Tensor:
    check_tensor(name, value)
    if tuple(value.shape) not in sizes:
        allowed_sizes = " or ".join(map(str, sizes))
        raise ValueError(f"{name} must be {allowed_sizes}, got {tuple(value.shape)}")
    return value.detach()
