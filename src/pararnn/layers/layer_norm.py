"""Layers whose recurrence has layer norms: the LSTM's of speech, and Dreamer's GRU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.base.parameters import Draw
from pararnn.cells import Cell
from pararnn.layers.projection import Weights
from pararnn.layers.torch_nn import StackedLayer, TorchStack
from pararnn.zoo import LayerNormGRUCell, LayerNormLSTMCell


class _NormedGRULayer(StackedLayer):
    """Layer in one direction of a `LayerNormGRU`."""

    steps_by_stored = False

    def weights_of(self, projection: Tensor, recurrent: Tensor, *vectors: Tensor) -> Weights:
        *bias, weight, shift = vectors
        params = [v for value in (recurrent, weight, shift) for v in self._by_gate(value)]
        return Weights(projection, self._in_gates(*bias) if bias else None, tuple(params))

    def _in_gates(self, value: Tensor) -> Tensor:
        """Return a vector or a matrix (G D, ...) by gate, (G, D, ...)."""
        return value.unflatten(0, (self.cell.num_gates, self.hidden_size))

    def _by_gate(self, value: Tensor) -> tuple[Tensor, ...]:
        return self._in_gates(value).unbind()


class _NormedLSTMLayer(_NormedGRULayer):
    """Layer in one direction of a `LayerNormLSTM`."""

    def weights_of(self, projection: Tensor, recurrent: Tensor, *vectors: Tensor) -> Weights:
        *of_input, weight, shift, memory_weight, memory_shift = vectors
        weights = super().weights_of(projection, recurrent, *of_input[1:], weight, shift)
        params = (*weights.params, memory_weight, memory_shift)
        return weights._replace(params=params, scale=of_input[0] if of_input else None)

    def _project(self, cell: Cell, x: Tensor, weights: Weights) -> Tensor:
        gates = super()._project(cell, x, weights)
        if weights.scale is None:
            return gates
        normed = F.layer_norm(gates.flatten(2), weights.scale.shape, weights.scale, eps=cell.eps)
        return normed.to(gates.dtype).view(gates.shape)


class NormedStack(TorchStack):
    """Base of the layers with norms. Names of weights follow torch.nn's; calls take all that those
    of `ParaRNN` do.

    Args:
        input_size, hidden_size, num_layers, batch_first, dropout, bidirectional, device, dtype: as
            in torch.nn.LSTM; by name from batch_first on.
        eps: added to variances.
        options: as in `ParaRNN`: solver, backend, mode, on_failure, keep_dtype (True here) and
            recurrent_clip (None here).
    """

    def draws(self) -> dict[str, Draw]:
        """Return how each parameter is drawn: matrices as torch.nn does, weights of norms as 1,
        biases as 0."""
        draws = super().draws()
        for names in self._all_weights:
            for name in names:
                if not name.startswith("weight_"):
                    draws[name] = Draw("constant", float("_weight_" in name))
        return draws


class LayerNormLSTM(NormedStack):
    """LSTM with layer norms over its four gates together, and over its memory c: see
    `LayerNormLSTMCell`.

    Results are (output, (h_n, c_n)), c_n with its norm. norm_of_sum: False for a norm of the
    projected input and another of the projected state, as in PyTorch's TorchScript example; True
    for one of their sum, as in torchaudio's RNN-T. Other arguments: see `NormedStack`.

    Weights of layer k, after weight_ih_l{k} and weight_hh_l{k}: norm_ih_weight, norm_ih_bias (where
    the input has its own), norm_hh_weight, norm_hh_bias, (4 D,) each; norm_c_weight, norm_c_bias.
    """

    layer_class = _NormedLSTMLayer
    cell_class = LayerNormLSTMCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        norm_of_sum: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if options.get("recompute_gates") and not norm_of_sum:
            raise ValueError(
                "recompute_gates=True computes gates by a matrix product alone, and here the input "
                "has a norm of its own: take norm_of_sum=True, or save the gates"
            )
        self.norm_of_sum = norm_of_sum
        sizes = (input_size, hidden_size, num_layers, False, batch_first, dropout, bidirectional)
        options = {**options, "norm_of_sum": norm_of_sum, "eps": eps}
        super().__init__(*sizes, device, dtype, num_heads=1, **options)

    def _vectors(self) -> dict[str, int]:
        norms = ("norm_hh",) if self.norm_of_sum else ("norm_ih", "norm_hh")
        sizes = {**dict.fromkeys(norms, 4 * self.hidden_size), "norm_c": self.hidden_size}
        return {f"{norm}_{kind}": n for norm, n in sizes.items() for kind in ("weight", "bias")}


class LayerNormGRU(NormedStack):
    """GRU with a layer norm over its three gates together, as DreamerV2's: see `LayerNormGRUCell`.

    Results are (output, h_n). bias: of the dense layer, before the norm. update_bias: added to the
    update gate after it. Other arguments: see `NormedStack`.

    Weights of layer k, after weight_ih_l{k} and weight_hh_l{k}: bias, if any, norm_weight and
    norm_bias, (3 D,) each, gates in the order reset, candidate, update.
    """

    layer_class = _NormedGRULayer
    cell_class = LayerNormGRUCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        eps: float = 1e-3,
        update_bias: float = -1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.has_bias = bias
        sizes = (input_size, hidden_size, num_layers, False, batch_first, dropout, bidirectional)
        options = {**options, "eps": eps, "update_bias": update_bias}
        super().__init__(*sizes, device, dtype, num_heads=1, **options)
        self.bias = bias

    def _vectors(self) -> dict[str, int]:
        bias = ("bias",) if self.has_bias else ()
        return dict.fromkeys((*bias, "norm_weight", "norm_bias"), 3 * self.hidden_size)
