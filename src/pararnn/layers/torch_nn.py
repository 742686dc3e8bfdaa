"""Layers of torch.nn by kernels: its LSTM, GRU and RNN with their arguments and weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.base.parameters import Draw, draw_anew
from pararnn.cells import Cell
from pararnn.engines.arguments import Arguments
from pararnn.layers.projection import Weights
from pararnn.layers.recurrent import Clipping, RecurrentLayer
from pararnn.layers.rnn import ParaRNN
from pararnn.zoo import HeadElmanCell, HeadGRUCell, HeadLSTMCell


class StackedLayer(RecurrentLayer):
    """Layer in one direction of a stack that holds the weights, and passes them to each call."""

    def _make_weights(
        self, cell_class: type[Cell], bias: bool, factory: dict[str, Any], config: dict[str, Any]
    ) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads = {self.num_heads}, got "
                f"{self.hidden_size}"
            )
        cell = cell_class(self.hidden_size, num_heads=self.num_heads, device="meta", **config)
        self.__dict__["cell"] = cell  # no submodule, whose parameters would be the layer's
        self.bias = None

    def _arguments(self, *args: Any) -> Arguments:
        if args[-1] is None:
            raise TypeError(
                "layers of pararnn.LSTM, GRU and RNN hold no weights: call the whole, or make a "
                "pararnn.RecurrentLayer of its cell"
            )
        return super()._arguments(*args)

    def recurrent_parameters(self) -> list[Tensor]:
        """Return none: they are the stack's."""
        return []

    def reset_parameters(self) -> None:
        """Do nothing: the stack draws its weights."""


class TorchStack(Clipping, ParaRNN):
    """Base of the layers that have torch.nn's arguments, weights and results.

    Weights have torch.nn's names, shapes and initialisation, so that a `state_dict` loads both
    ways. With num_heads = H > 1 recurrent matrices are block-diagonal: weight_hh_l0 is
    (H, G K, K) for K = hidden_size / H, head i being weight_hh of a torch.nn layer of K channels.
    Other weights keep their shapes: the projection is dense, its rows gate by gate.

    Args:
        num_heads: heads of the recurrent matrices.
        options: as in `ParaRNN`: solver, backend, mode, on_failure, recompute_gates, keep_dtype
            (True here) and recurrent_clip (None here).

    Other arguments are those of torch.nn, `batch_first=False` included; calls take all that those
    of `ParaRNN` do.
    """

    layer_class = StackedLayer

    def __init__(
        self,
        cell_class: type[Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        num_heads: int,
        keep_dtype: bool = True,
        recurrent_clip: float | None = None,
        **options: Any,
    ) -> None:
        for name in ("projection_gain", "recurrent_std"):
            if name in options:
                raise TypeError(f"{self._name} has no {name}: its weights start as torch.nn's")
        super().__init__(
            cell_class,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            num_heads=num_heads,
            keep_dtype=keep_dtype,
            recurrent_clip=recurrent_clip,
            **options,
        )
        gates, channels = len(cell_class.gates), hidden_size // num_heads
        recurrent = (gates * channels, channels)
        self._names: list[list[str]] = []
        for index, part in enumerate(self._parts()):
            layer = index // (2 if bidirectional else 1)
            sizes: dict[str, tuple[int, ...]] = {
                "weight_ih": (gates * hidden_size, part.input_size),
                "weight_hh": recurrent if num_heads == 1 else (num_heads, *recurrent),
            }
            if bias:
                sizes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates * hidden_size,))
            suffix = f"_l{layer}{'_reverse' if part.reverse else ''}"
            self._names.append([name + suffix for name in sizes])
            for name, size in sizes.items():
                value = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
                self.register_parameter(name + suffix, value)
        self.reset_parameters()

    def _weights(self, index: int) -> Weights:
        """Return the weights of a layer and direction as its call takes them."""
        projection, recurrent, *biases = [getattr(self, name) for name in self._names[index]]
        channels = self.hidden_size // self.num_heads
        matrices = recurrent.reshape(self.num_heads, -1, channels, channels).unbind(1)
        bias, params = self._bias(*biases) if biases else self._no_bias(recurrent)
        if bias is not None:
            bias = bias.view(-1, self.hidden_size)
        return Weights(projection.unsqueeze(0), bias, (*matrices, *params))

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the bias of the gates, and the parameters of the cell behind its matrices."""
        return bias_ih + bias_hh, ()

    def _no_bias(self, like: Tensor) -> tuple[None, tuple[Tensor, ...]]:
        """Return what `_bias` does, for a layer without biases."""
        return None, ()

    def _with(self, index: int) -> dict[str, Any]:
        return {"weights": self._weights(index)}

    def _merge(self, outputs: list[Tensor], last: bool) -> Tensor:
        return torch.cat(outputs, -1)

    @property
    def cell(self) -> Cell:
        """The first layer's cell, with a copy of its weights."""
        return self._parts()[0].cell_with(self._weights(0))

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of every layer and direction, in the order of h_n."""
        return [[getattr(self, name) for name in names] for names in self._names]

    def draws(self) -> dict[str, Draw]:
        """Return how each parameter is drawn: uniform, as torch.nn does, up to 1/sqrt(hidden_size),
        matrices of heads up to 1/sqrt(K)."""
        channels = self.hidden_size // self.num_heads
        return {
            name: Draw("uniform", spread=1 / math.sqrt(size))
            for names in self._names
            for name in names
            for size in [channels if name.startswith("weight_hh") else self.hidden_size]
        }

    def reset_parameters(self) -> None:
        """Draw all weights again, as `draws` says, in torch.nn's order."""
        draw_anew(self, self.draws())

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the recurrent matrices.

        Raises ValueError for one that a parametrisation or a hook computes: it cannot be clamped.
        """
        names = [names[1] for names in self._names]
        for name in names:
            if name not in self._parameters:
                raise ValueError(
                    f"{name} is computed by a parametrisation or a hook: clamping it would change "
                    "nothing; leave recurrent_clip at None, or let that bound it"
                )
        return [getattr(self, name) for name in names]

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


class LSTM(TorchStack):
    """`torch.nn.LSTM` by kernels, with `num_heads` in addition: see `TorchStack`.

    Results are (output, (h_n, c_n)). Without proj_size: ValueError.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        **options: Any,
    ) -> None:
        if proj_size:
            raise ValueError(
                f"proj_size must be 0, got {proj_size}: here h and c have one width. Take "
                "torch.nn.LSTM, or put a Linear behind the layer, which is another model"
            )
        super().__init__(
            HeadLSTMCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            num_heads=num_heads,
            **options,
        )

    def _mode(self) -> str:
        return "LSTM"


class GRU(TorchStack):
    """`torch.nn.GRU` by kernels, with `num_heads` in addition: see `TorchStack`.

    Results are (output, h_n).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            HeadGRUCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            num_heads=num_heads,
            **options,
        )

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        # The candidate's recurrent bias is inside of its reset.
        start = 2 * self.hidden_size
        gates = torch.cat([bias_ih[:start] + bias_hh[:start], bias_ih[start:]])
        return gates, (bias_hh[start:],)

    def _no_bias(self, like: Tensor) -> tuple[None, tuple[Tensor, ...]]:
        return None, (like.new_zeros(self.hidden_size),)

    def _mode(self) -> str:
        return "GRU"


class RNN(TorchStack):
    """`torch.nn.RNN` by kernels, with `num_heads` in addition: see `TorchStack`.

    nonlinearity is "tanh" or "relu", or another name in `pararnn.NONLINEARITIES`. Results are
    (output, h_n).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            HeadElmanCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            num_heads=num_heads,
            state_nonlinearity=nonlinearity,
            **options,
        )
        self.nonlinearity = nonlinearity

    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"
