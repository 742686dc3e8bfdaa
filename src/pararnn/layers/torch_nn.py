"""Layers of torch.nn by kernels: its LSTM, GRU and RNN with their arguments and weights."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from pararnn.base.parameters import Draw, draw_parameters
from pararnn.base.tensors import States
from pararnn.cells import Cell
from pararnn.layers.projection import Weights
from pararnn.layers.recurrent import Clipping, RecurrentLayer
from pararnn.layers.rnn import ParaRNN
from pararnn.zoo import HeadElmanCell, HeadGRUCell, HeadLSTMCell


def _no_weights(x: Tensor) -> NoReturn:
    raise TypeError(
        "layers of pararnn.LSTM, GRU and RNN hold no weights: call the whole, or make a "
        "pararnn.RecurrentLayer of its cell"
    )


class StackedLayer(RecurrentLayer):
    """Layer in one direction of a stack that holds the weights, and passes them to each call."""

    def _make_weights(
        self, cell_class: type[Cell], bias: bool, factory: dict[str, Any], config: dict[str, Any]
    ) -> None:
        cell = cell_class(self.hidden_size, num_heads=self.num_heads, device="meta", **config)
        self.__dict__["cell"] = cell  # no submodule, whose parameters would be the layer's
        self.__dict__["proj"] = _no_weights
        self.bias = None

    def recurrent_parameters(self) -> list[Tensor]:
        """Return none: they are the stack's."""
        return []

    def reset_parameters(self) -> None:
        """Do nothing: the stack draws its weights."""


MODES = {1: "RNN_TANH", 3: "GRU", 4: "LSTM"}
"""Modes of torch.nn.RNNBase, by the number of gates that weights are of."""


class TorchStack(Clipping, ParaRNN, nn.RNNBase):
    """Base of the layers that have torch.nn's arguments, weights and results.

    It is a torch.nn.RNNBase, and no torch.nn.LSTM, GRU or RNN, as no module that torch.compile
    takes can be. Weights have torch.nn's names, shapes and initialisation, so that a `state_dict`
    loads both ways. With num_heads = H > 1 recurrent matrices are block-diagonal: weight_hh_l0 is
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
    cell_class: ClassVar[type[Cell]]

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
        for name in ("projection_gain", "recurrent_std"):
            if name in options:
                raise TypeError(f"{self._name} has no {name}: its weights start as torch.nn's")
        if num_heads < 1:
            raise ValueError(f"num_heads must be positive, got {num_heads}")
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}"
            )
        self.num_heads = num_heads
        gates, channels = len(self.cell_class.gates), hidden_size // num_heads
        sizes = (input_size, hidden_size, num_layers, bias, batch_first)
        nn.RNNBase.__init__(self, MODES[gates], *sizes, 0.0, bidirectional, device="meta")
        options = {"keep_dtype": True, "recurrent_clip": None, "num_heads": num_heads, **options}
        super().__init__(self.cell_class, *sizes, dropout, bidirectional, **options)
        of_heads = (num_heads, gates * channels, channels)
        for name, weight in [*self._parameters.items()]:
            assert weight is not None
            size = of_heads if num_heads > 1 and name.startswith("weight_hh") else weight.shape
            setattr(self, name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    __setattr__ = nn.Module.__setattr__  # type: ignore[assignment]  # RNNBase's updates a list

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        """The weights by their names, which parametrisations and hooks may compute."""
        return [getattr(self, name, None) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: Any) -> None:
        """Ignore the list of `torch.nn.RNNBase`: a stored one may be stale."""

    def _init_flat_weights(self) -> None:
        """Do nothing: weights are looked up."""

    def _update_flat_weights(self) -> None:
        """Do nothing: weights are looked up."""

    def _weights(self, index: int) -> Weights:
        """Return the weights of a layer and direction as its call takes them."""
        parameters: dict[str, Any] = self._parameters  # attributes take longer to find
        projection, recurrent, *biases = [
            parameters[name] if name in parameters else getattr(self, name)
            for name in self._all_weights[index]
        ]
        channels = self.hidden_size // self.num_heads
        matrices = recurrent.reshape(self.num_heads, -1, channels, channels).unbind(1)
        bias, params = self._bias(*biases) if biases else self._no_bias(recurrent)
        if bias is not None:
            bias = bias.view(-1, self.hidden_size)
        return Weights(projection, bias, (*matrices, *params))

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the bias of the gates, and the parameters of the cell after its matrices."""
        return bias_ih + bias_hh, ()

    def _no_bias(self, like: Tensor) -> tuple[None, tuple[Tensor, ...]]:
        """Return what `_bias` does, for a layer without biases."""
        return None, ()

    def _with(self, index: int) -> dict[str, Any]:
        return {"weights": self._weights(index)}

    def _merge(self, outputs: list[Tensor], last: bool) -> Tensor:
        return torch.cat(outputs, -1)

    def step(self, *args: Any, **options: Any) -> tuple[Tensor, States]:
        """Run one time step: see `ParaRNN.step`.

        Forward pre-hooks run before it where they may compute weights, as torch.nn.utils.prune's.
        """
        if not self._parameters.keys() >= {*self._flat_weights_names}:
            for hook in self._forward_pre_hooks.values():
                hook(self, args)
        return super().step(*args, **options)

    @property
    def cell(self) -> Cell:
        """The first layer's cell, with a copy of its weights."""
        return self._all_layers()[0].cell_with(self._weights(0))

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of every layer and direction, in the order of h_n."""
        return [[getattr(self, name) for name in names] for names in self._all_weights]

    def draws(self) -> dict[str, Draw]:
        """Return how each parameter is drawn: uniform, as torch.nn does, up to 1/sqrt(hidden_size),
        matrices of heads up to 1/sqrt(K)."""
        channels = self.hidden_size // self.num_heads
        return {
            name: Draw("uniform", spread=1 / math.sqrt(size))
            for names in self._all_weights
            for name in names
            for size in [channels if name.startswith("weight_hh") else self.hidden_size]
        }

    def reset_parameters(self) -> None:
        """Draw all weights again, as `draws` says, in torch.nn's order."""
        draw_parameters(self, self.draws())

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the recurrent matrices.

        Raises ValueError for one that a parametrisation or a hook computes: it cannot be clamped.
        """
        names = [names[1] for names in self._all_weights]
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

    cell_class = HeadLSTMCell
    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    permute_hidden = nn.LSTM.permute_hidden  # type: ignore[assignment]

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
        sizes = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(*sizes, device, dtype, num_heads=num_heads, **options)

    def _mode(self) -> str:
        return "LSTM"


class GRU(TorchStack):
    """`torch.nn.GRU` by kernels, with `num_heads` in addition: see `TorchStack`.

    Results are (output, h_n).
    """

    cell_class = HeadGRUCell

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        # The candidate's recurrent bias is inside of its reset.
        sizes = (2 * self.hidden_size, self.hidden_size)
        of_gates, of_candidate = bias_hh.split_with_sizes(sizes)
        first, last = bias_ih.split_with_sizes(sizes)
        return torch.cat([first + of_gates, last]), (of_candidate,)

    def _no_bias(self, like: Tensor) -> tuple[None, tuple[Tensor, ...]]:
        return None, (like.new_zeros(self.hidden_size),)

    def _mode(self) -> str:
        return "GRU"


class RNN(TorchStack):
    """`torch.nn.RNN` by kernels, with `num_heads` in addition: see `TorchStack`.

    nonlinearity is "tanh" or "relu", or another name in `pararnn.NONLINEARITIES`. Results are
    (output, h_n).
    """

    cell_class = HeadElmanCell

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
        self.nonlinearity = nonlinearity
        sizes = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        options = {**options, "num_heads": num_heads}
        super().__init__(*sizes, device, dtype, state_nonlinearity=nonlinearity, **options)

    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nonlinearity={self.nonlinearity!r}"
