"""Layers: projections, cells and states as torch.nn.Modules with torch.nn.GRU's habits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.hooks import RemovableHandle

from pararnn.cells import Cell, GRUCell, LSTMCell
from pararnn.engines.table import check_names
from pararnn.program import program_of
from pararnn.projection import HeadwiseLinear
from pararnn.solve import solve_with_info

States = Tensor | tuple[Tensor, ...]
Fields = Mapping[str, Tensor | float]


class SolveInfo(NamedTuple):
    """What the last forward pass's solvers did, int64 (num_layers,) on the layer's device.

    sweeps: Newton updates. mended: columns finished by the sequential solver.
    """

    sweeps: Tensor
    mended: Tensor


class DirectionalLayer(nn.Module):
    """One layer in one direction: projection, gate biases (G, D) and cell."""

    bias: nn.Parameter | None

    def __init__(
        self,
        proj: HeadwiseLinear,
        cell: Cell,
        bias: bool,
        recompute_gates: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.proj, self.recompute_gates = proj, recompute_gates
        size = (len(cell.gates), cell.hidden_size)
        self.bias = nn.Parameter(torch.zeros(size, **factory)) if bias else None
        self.cell = cell
        program_of(cell)  # now, because tracing cannot happen inside a compiled region

    def forward(
        self, x: Tensor, initial: tuple[Tensor, ...] | None, **options: Any
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        if not (self.recompute_gates and torch.is_grad_enabled()):
            return self._solve(x, initial, options)
        contexts = partial(create_selective_checkpoint_contexts, _keep_states)
        return checkpoint(
            self._solve, x, initial, options, use_reentrant=False, context_fn=contexts
        )

    def _solve(
        self, x: Tensor, initial: tuple[Tensor, ...] | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        states, final, info = solve_with_info(
            self.cell, self.proj(x), initial, bias=self.bias, output_only=True, **options
        )
        return states[0], final, info


def _keep_states(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What is kept for the backward pass where gates are recomputed: the states."""
    if op is torch.ops.pararnn.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class ParaRNN(nn.Module):
    """Any cell as a recurrent layer (or several), trained in parallel over the sequence.

    Args:
        cell_class: the `Cell` subclass.
        input_size, hidden_size: channels in and out; multiples of num_heads.
        num_layers: layers, each fed with the output of the one below.
        bias: whether gates have biases.
        batch_first: tensors are (batch, time, channels), else (time, batch, channels).
        dropout: probability of zeroing an output of every layer but the last, in training.
        num_heads: heads of the input projection (block-diagonal; paper, Appendix C).
        device, dtype: of the parameters.
        solver, backend, on_failure: as in `pararnn.solve`.
        recurrent_clip: bound that `clip_after_step` clamps recurrent parameters to; None for none.
        recompute_gates: do not keep the gates (B, T, G, D) for the backward pass, but project the
            input anew there: a layer then keeps its input and its states only.
        config: the cell's config.

    Raises CellError for a malformed cell, ValueError for impossible sizes, EngineError for an
    unknown solver or backend.
    """

    def __init__(
        self,
        cell_class: type[Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        solver: str = "auto",
        backend: str = "auto",
        on_failure: str = "warn",
        recurrent_clip: float | None = 0.5,
        recompute_gates: bool = False,
        **config: Any,
    ) -> None:
        super().__init__()
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_heads": num_heads}
        for name, value in {**sizes, "num_layers": num_layers}.items():
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if input_size % num_heads or hidden_size % num_heads:
            raise ValueError(
                f"input_size and hidden_size must be multiples of num_heads = {num_heads}, got "
                f"{input_size} and {hidden_size}"
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout}")
        check_names(solver, backend)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.num_heads, self.batch_first, self.dropout = num_heads, batch_first, dropout
        self.solver, self.backend, self.on_failure = solver, backend, on_failure
        self.recurrent_clip = recurrent_clip
        self._infos: tuple[Tensor, ...] = ()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList()
        for index in range(num_layers):
            inputs = hidden_size if index else input_size
            proj = HeadwiseLinear(inputs, len(cell_class.gates), hidden_size, num_heads, **factory)
            cell = cell_class(hidden_size, num_heads=num_heads, **factory, **config)
            self.layers.append(DirectionalLayer(proj, cell, bias, recompute_gates, **factory))

    @property
    def cell(self) -> Cell:
        """The first layer's cell."""
        return self._parts()[0].cell

    @property
    def last_solve(self) -> SolveInfo | None:
        """What the solvers of the last forward pass did; None before it."""
        return SolveInfo(*torch.stack(self._infos, 1)) if self._infos else None

    def forward(
        self,
        x: Tensor,
        h_0: States | None = None,
        *,
        fields: Fields | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        """Run over whole sequences.

        Args:
            x: (B, T, input_size), or (T, B, input_size) without batch_first.
            h_0: initial states (num_layers, B, hidden_size), a tuple of N for N states; None is
                zero.
            fields: the cell's fields by name, (B, T) or (B, T, hidden_size) each, or numbers; time
                first like x without batch_first.
            reset: bool (B, T), time first like x; such a step starts from the zero state.

        Returns:
            (output, h_n): the last layer's first state, like x with hidden_size channels and in the
            dtype of the projection's result; the final states, like h_0, in float32 (or float64).
        """
        self._check_input(x, 3)
        fields = dict(fields or {})
        if not self.batch_first:
            x = x.transpose(0, 1)
            fields = {
                k: v.transpose(0, 1) if isinstance(v, Tensor) else v for k, v in fields.items()
            }
            reset = None if reset is None else reset.transpose(0, 1)
        x, finals = self._run(
            x, h_0, fields=fields, reset=reset, solver=self.solver, backend=self.backend
        )
        return x if self.batch_first else x.transpose(0, 1), finals

    def step(
        self, x_t: Tensor, state: States | None = None, *, fields: Fields | None = None
    ) -> tuple[Tensor, States]:
        """One time step, for decoding: x_t (B, input_size), states and results as in `forward`.

        It is `forward` at T = 1 by the sequential solver: fields are (B,), (B, hidden_size) or
        numbers.
        """
        self._check_input(x_t, 2)
        fields = {
            k: v.unsqueeze(1) if isinstance(v, Tensor) else v for k, v in (fields or {}).items()
        }
        options = {"fields": fields, "solver": "sequential", "backend": self.backend}
        x, finals = self._run(x_t.unsqueeze(1), state, **options)
        return x.squeeze(1), finals

    def _run(self, x: Tensor, states: States | None, **options: Any) -> tuple[Tensor, States]:
        """All layers on x (B, T, input_size); records what their solvers did."""
        initial = self._per_layer(states, x.shape[0])
        options["on_failure"] = self.on_failure
        finals, infos = [], []
        for index, layer in enumerate(self._parts()):
            if index and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            x, final, info = layer(x, initial[index], **options)
            finals.append(final)
            infos.append(info)
        self._infos = tuple(infos)
        return x, self._stacked(finals)

    def reset_parameters(self) -> None:
        """Initialise anew (paper, Appendix C): see `HeadwiseLinear` and `Param`; zero biases."""
        for layer in self._parts():
            layer.proj.reset_parameters()
            layer.cell.reset_parameters()
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def clip_recurrent(self) -> None:
        """Clamp the recurrent parameters elementwise to [-recurrent_clip, recurrent_clip]."""
        if self.recurrent_clip is None:
            return
        with torch.no_grad():
            for layer in self._parts():
                for parameter in layer.cell.recurrent_parameters():
                    parameter.clamp_(-self.recurrent_clip, self.recurrent_clip)

    def extra_repr(self) -> str:
        shown = ("num_layers", "batch_first", "dropout", "num_heads", "solver", "backend")
        options = [f"{name}={getattr(self, name)!r}" for name in shown]
        return ", ".join([str(self.input_size), str(self.hidden_size), *options])

    def _parts(self) -> list[DirectionalLayer]:
        return cast(list[DirectionalLayer], list(self.layers))

    def _check_input(self, x: Tensor, ndim: int) -> None:
        name = type(self).__name__
        if x.ndim != ndim:
            raise ValueError(f"{name}: expected input to be {ndim}D, got {x.ndim}D instead")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"{name}: input's last dimension must be input_size = {self.input_size}, got "
                f"{x.shape[-1]}"
            )

    def _per_layer(self, states: States | None, batch: int) -> Sequence[tuple[Tensor, ...] | None]:
        if states is None:
            return [None] * self.num_layers
        names = self.cell.states
        given = (states,) if isinstance(states, Tensor) else tuple(states)
        size = (self.num_layers, batch, self.hidden_size)
        shapes = [tuple(state.shape) for state in given]
        if shapes != [size] * len(names):
            raise ValueError(
                f"{type(self).__name__}: initial states {tuple(names)} must each be {size}, "
                f"got {shapes}"
            )
        return list(zip(*given, strict=True))

    def _stacked(self, finals: list[tuple[Tensor, ...]]) -> States:
        if len(finals) == 1:
            stacked = tuple(state.unsqueeze(0) for state in finals[0])
        else:
            stacked = tuple(torch.stack(series) for series in zip(*finals, strict=True))
        return stacked[0] if len(stacked) == 1 else stacked


class ParaGRU(ParaRNN):
    """The paper's GRU layer (eq. GRU, diagonal recurrence); arguments as in `ParaRNN`.

    Config: gate_nonlinearity, state_nonlinearity (names in `pararnn.cells.NONLINEARITIES`).
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(GRUCell, input_size, hidden_size, *args, **kwargs)


class ParaLSTM(ParaRNN):
    """The paper's LSTM layer (eq. LSTM: CIFG, peepholes, diagonal recurrence); as in `ParaRNN`.

    The output is h, the states are (h, c). Config: gate_nonlinearity, input_nonlinearity,
    state_nonlinearity.
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(LSTMCell, input_size, hidden_size, *args, **kwargs)


def clip_after_step(optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
    """After each `optimizer.step()`, clamp the recurrent parameters of every layer in `module`.

    Each layer's `recurrent_clip` is the bound (paper, Appendix C: 0.5); None leaves it alone.
    Returns the hook's handle, whose `remove()` ends the clipping.
    """

    def clip(*_: Any) -> None:
        for part in module.modules():
            if isinstance(part, ParaRNN):
                part.clip_recurrent()

    return optimizer.register_step_post_hook(clip)
