"""Layers of torch.nn by kernels: its LSTM, GRU and RNN with their arguments and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.numerics import check_io_dtype
from pararnn.base.parameters import Draw, draw_parameters
from pararnn.base.tensors import States, as_states
from pararnn.cells import Cell
from pararnn.engines.arguments import Arguments
from pararnn.layers.checks import check_count
from pararnn.layers.projection import Weights, check_weight
from pararnn.layers.recurrent import (
    Clipping,
    RecurrentLayer,
    arguments_of_step,
    states_of_step,
    stored_parameter,
)
from pararnn.layers.rnn import ParaRNN
from pararnn.solve import Memory, SolveInputs
from pararnn.zoo import HeadElmanCell, HeadGRUCell, HeadLSTMCell, ProjectedLSTMCell


def _no_weights(x: Tensor) -> NoReturn:
    raise TypeError(
        "layers of a stack in the form of torch.nn hold no weights: call the whole, or make a "
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

    steps_by_stored: ClassVar[bool] = True
    """True if a step may run on weights as the stack stores them."""

    def weights_of(self, projection: Tensor, recurrent: Tensor, *biases: Tensor) -> Weights:
        """Return weights that torch.nn stores, as a call takes them."""
        channels = self.hidden_size // self.num_heads
        matrices = recurrent.reshape(self.num_heads, -1, channels, channels).unbind(1)
        bias, *params = self._biases(recurrent, *biases)
        if bias is not None:
            bias = bias.view(-1, self.hidden_size)
        return Weights(projection, bias, (*matrices, *(p[-self.hidden_size :] for p in params)))

    def _biases(self, recurrent: Tensor, *biases: Tensor) -> tuple[Any, ...]:
        """Return the gates' bias or None; behind it, where the candidate's recurrent bias is inside
        of its reset, a vector that ends with that."""
        if not self._resets_inside:
            return (biases[0] + biases[1],) if biases else (None,)
        if not biases:
            return None, recurrent.new_zeros(self.hidden_size)
        of_input, of_state = biases
        outside = of_state.narrow(0, 0, 2 * self.hidden_size)
        return of_input + F.pad(outside, (0, self.hidden_size)), of_state

    @property
    def _resets_inside(self) -> bool:
        """True if the candidate's recurrent bias is inside of its reset, as the GRU's."""
        return "b_n" in self.cell.params

    def step(self, x_t: Tensor, state: States | None = None, **options: Any) -> Any:
        """Run one time step: see `RecurrentLayer.step`. stored: the weights as torch.nn stores
        them."""
        stored = options.pop("stored", None)
        if stored is None:
            return super().step(x_t, state, **options)
        self._check_step(x_t)
        direct = None
        if not any(option is not None for option in options.values()):
            direct = self.step_directly(x_t, state, stored=stored)
        return direct or super().step(x_t, state, weights=self.weights_of(*stored), **options)

    def step_directly(
        self,
        x_t: Tensor,
        state: States | None,
        *,
        stored: Sequence[Tensor] = (),
        stacked: bool = False,
        **options: Any,
    ) -> tuple[Tensor, States] | None:
        """Run one time step on weights as torch.nn stores them: see `RecurrentLayer`."""
        if not (stored and self._may_run_directly()):
            return None
        cell, (projection, recurrent, *biases) = self.cell, stored
        check_weight(x_t, projection)
        gates = F.linear(x_t, projection)
        check_io_dtype(gates.dtype, "gates")
        initial = states_of_step(cell, state, options)
        rest = [bias for bias in self._biases(recurrent, *biases) if bias is not None]
        tensors = (gates, *initial, recurrent, *rest)
        how = len(initial), self.num_heads, len(cell.gates), len(biases) > 0, stacked
        return self._launch_step(cell, tensors, _arguments_of_step, *how, **options)

    def recurrent_parameters(self) -> list[Tensor]:
        """Return none: they are the stack's."""
        return []

    def reset_parameters(self) -> None:
        """Do nothing: the stack draws its weights."""


def _arguments_of_step(
    tensors: Sequence[Tensor], states: int, heads: int, gates: int, has_bias: bool, stacked: bool
) -> Arguments:
    """Return the record of a step on gates, initial states, weight_hh, a bias or none, and a vector
    that ends with the candidate's bias or none."""
    of_input, *rest = tensors
    initial, recurrent = rest[:states], rest[states]
    bias, inside = rest[states + 1 :][:has_bias], rest[states + 1 :][has_bias:]
    width = of_input.shape[1] // gates
    matrices = recurrent.reshape(heads, -1, width // heads, width // heads).unbind(1)
    rows = of_input.view(-1, 1, gates, width), *(b.view(gates, width) for b in bias)
    params = *matrices, *(vector[-width:] for vector in inside)
    return arguments_of_step((*rows, *initial, *params), has_bias, states, stacked)


class ProjectedLayer(StackedLayer):
    """Layer in one direction of an LSTM with proj_size. Its cell has one head, without whose axis
    states are given and returned."""

    steps_by_stored = False

    def weights_of(self, projection: Tensor, recurrent: Tensor, *others: Tensor) -> Weights:
        *biases, of_output = others
        bias = (biases[0] + biases[1]).unsqueeze(0) if biases else None
        matrices = recurrent.view(len(self.cell.gates), 1, -1, self.hidden_size).unbind()
        return Weights(projection, bias, (*matrices, of_output.t().contiguous().unsqueeze(0)))

    def state_sizes_in(self, memory: Memory | None) -> tuple[tuple[int, ...], ...]:
        return tuple(size[1:] for size in super().state_sizes_in(memory))

    def _inputs(
        self,
        cell: Cell,
        x: Tensor,
        initial: States | None,
        reset_states: States | None,
        *others: Any,
    ) -> SolveInputs:
        by_head = _in_one_head(initial), _in_one_head(reset_states)
        return super()._inputs(cell, x, *by_head, *others)

    def _final_states(self, final: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple([h.squeeze(1) for h in final])


def _in_one_head(states: States | None) -> States | None:
    """Return states (B, N) as those of one head, (B, 1, N)."""
    if states is None:
        return None
    return tuple([h.unsqueeze(1) for h in as_states("initial states", states)])


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
    cell_class: type[Cell]

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
        proj_size: int = 0,
        **options: Any,
    ) -> None:
        for name in ("projection_gain", "recurrent_std"):
            if name in options:
                raise TypeError(f"{self._name} has no {name}: its weights start as torch.nn's")
        check_count("hidden_size", hidden_size)
        check_count("num_heads", num_heads)
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}"
            )
        if proj_size and self.cell_class is not ProjectedLSTMCell:
            raise ValueError(f"{self._name} has no proj_size, got {proj_size}: pararnn.LSTM has it")
        self.num_heads = num_heads
        gates, channels = len(self.cell_class.gates), hidden_size // num_heads
        sizes = (num_layers, bias, batch_first)
        base = (input_size, hidden_size, *sizes, 0.0, bidirectional, proj_size)
        nn.RNNBase.__init__(self, MODES[gates], *base, device="meta")
        width = proj_size or hidden_size
        options = {"keep_dtype": True, "recurrent_clip": None, "num_heads": num_heads, **options}
        super().__init__(
            self.cell_class, input_size, width, *sizes, dropout, bidirectional, **options
        )
        self.hidden_size = hidden_size
        of_heads = (num_heads, gates * channels, channels)
        for name, weight in [*self._parameters.items()]:
            assert weight is not None
            size = of_heads if num_heads > 1 and name.startswith("weight_hh") else weight.shape
            setattr(self, name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        for index, names in enumerate(self._all_weights):
            suffix = names[0].removeprefix("weight_ih")
            for name, count in self._vectors().items():
                value = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
                setattr(self, f"{name}{suffix}", value)
            self._all_weights[index] = [*names, *(f"{name}{suffix}" for name in self._vectors())]
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self.reset_parameters()

    def _vectors(self) -> dict[str, int]:
        """Return the lengths of further weights of a layer and direction, by name."""
        return {}

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

    def _stored(self, index: int) -> list[Tensor]:
        """Return the weights of a layer and direction, as they are stored or computed."""
        parameters: dict[str, Any] = self._parameters  # attributes take longer to find
        return [
            parameters[name] if name in parameters else getattr(self, name)
            for name in self._all_weights[index]
        ]

    def _with(self, index: int) -> dict[str, Any]:
        layer = cast("StackedLayer", self._all_layers()[index])
        return {"weights": layer.weights_of(*self._stored(index))}

    def _step_with(self, index: int) -> dict[str, Any]:
        by_stored = cast("StackedLayer", self._all_layers()[index]).steps_by_stored
        return {"stored": self._stored(index)} if by_stored else self._with(index)

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
        return self._all_layers()[0].cell_with(self._with(0)["weights"])

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
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
        return [stored_parameter(self, names[1]) for names in self._all_weights]

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


class LSTM(TorchStack):
    """`torch.nn.LSTM` by kernels, with `num_heads` in addition: see `TorchStack`.

    Results are (output, (h_n, c_n)). With proj_size = P the output and h are P channels, a product
    of the LSTM's output with weight_hr_l0 (P, hidden_size) inside the recurrence; such a layer has
    one head and no `all_states`.
    """

    cell_class: type[Cell] = HeadLSTMCell
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
        if proj_size and not 0 < proj_size < hidden_size:
            raise ValueError(
                f"proj_size must be 0 or from 1 to hidden_size - 1 = {hidden_size - 1}, got "
                f"{proj_size}"
            )
        if proj_size and num_heads > 1:
            raise ValueError(
                f"proj_size is of an LSTM with one head, got num_heads = {num_heads}: its output "
                "is a product with one matrix of all channels"
            )
        if proj_size:
            self.layer_class, self.cell_class = ProjectedLayer, ProjectedLSTMCell
            options["K"] = hidden_size
        sizes = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        options = {**options, "num_heads": num_heads, "proj_size": proj_size}
        super().__init__(*sizes, device, dtype, **options)

    def _mode(self) -> str:
        return "LSTM"

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, proj_size={self.proj_size}" if self.proj_size else text


class GRU(TorchStack):
    """`torch.nn.GRU` by kernels, with `num_heads` in addition: see `TorchStack`.

    Results are (output, h_n).
    """

    cell_class = HeadGRUCell

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
