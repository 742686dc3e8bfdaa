"""Modules of torch.nn for one time step by kernels: its LSTMCell, GRUCell and RNNCell."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pararnn import zoo
from pararnn.base.tensors import States, as_states
from pararnn.cells import Cell
from pararnn.cells.base import NAMESAKES
from pararnn.engines.fused.layout import as_dtype
from pararnn.layers.checks import check_input
from pararnn.layers.recurrent import Clipping, stored_parameter
from pararnn.layers.torch_nn import StackedLayer
from pararnn.solve import initial_of

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class StepModule(Clipping, nn.RNNCellBase):
    """Base of modules for one time step that are torch.nn's, and run by the kernels of a layer.

    Results and gradients equal torch.nn's to rounding; new states have the dtype of given ones,
    else that of the input. backend: that of the step, as in `ParaRNN`; None defers to
    `pararnn.using`, then to the rule. Raises NotImplementedError, with the cure, for second
    derivatives by kernels.
    """

    recurrence: ClassVar[type[Cell]]
    recurrent_clip: float | None = None
    layer: StackedLayer
    """The step: a layer without weights, which is given the module's."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        # The next class is torch.nn's cell, whose arguments are not those of its base.
        super().__init__(input_size, hidden_size, bias, device, dtype)  # type: ignore[arg-type]
        self._make_layer(backend)

    def _make_layer(self, backend: str | None, **config: Any) -> None:
        self.layer = StackedLayer(
            self.recurrence, self.input_size, self.hidden_size, backend=backend, **config
        )

    def recurrent_parameters(self) -> list[Tensor]:
        """Return weight_hh.

        Raises ValueError if a parametrisation or a hook computes it: it cannot be clamped.
        """
        return [stored_parameter(self, "weight_hh")]

    def _step(self, x: Tensor, state: States | None) -> tuple[Tensor, ...]:
        """Return the new states of one step from given ones, or from zero."""
        check_input(type(self).__name__, x, self.input_size, (1, 2))
        given = None if state is None else as_states("hx", state)
        like, rows = x if given is None else given[0], x.ndim == 2
        if not rows:
            x = x.unsqueeze(0)
            given = given and tuple([h.unsqueeze(0) for h in given])
        parameters: dict[str, Any] = self._parameters  # attributes take longer to find
        names = WEIGHTS if self.bias else WEIGHTS[:2]
        stored = [parameters[n] if n in parameters else getattr(self, n) for n in names]
        layer = self.layer
        check = None if given is None else partial(initial_of, layer.cell, given)
        result = layer.step_directly(x, given, stored=stored, shares=True, check=check)
        _, final = result or layer.step(x, given, stored=stored)
        new = final if isinstance(final, tuple) else (final,)
        return tuple([as_dtype(h if rows else h.squeeze(0), like) for h in new])


class LSTMCell(StepModule, nn.LSTMCell):
    """`torch.nn.LSTMCell` by kernels: see `StepModule`. A call returns (h', c')."""

    recurrence = zoo.HeadLSTMCell

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one step: input (B, input_size) or (input_size,), and states (h, c) or zero."""
        h, c = self._step(input, hx)
        return h, c


class GRUCell(StepModule, nn.GRUCell):
    """`torch.nn.GRUCell` by kernels: see `StepModule`. A call returns h'."""

    recurrence = zoo.HeadGRUCell

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Run one step: input (B, input_size) or (input_size,), and the state h or zero."""
        return self._step(input, hx)[0]


class RNNCell(StepModule, nn.RNNCell):
    """`torch.nn.RNNCell` by kernels: see `StepModule`. A call returns h'."""

    recurrence = zoo.HeadElmanCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        nn.RNNCell.__init__(self, input_size, hidden_size, bias, nonlinearity, device, dtype)
        self._make_layer(backend, state_nonlinearity=nonlinearity)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Run one step: input (B, input_size) or (input_size,), and the state h or zero."""
        return self._step(input, hx)[0]


NAMESAKES |= {zoo.LSTMCell: LSTMCell, zoo.GRUCell: GRUCell}
