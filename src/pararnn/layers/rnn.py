"""Stacks of recurrent layers, in one direction or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pararnn.cells import Cell, GRUCell, LSTMCell
from pararnn.cells.base import unwrapped
from pararnn.engines.base import totals
from pararnn.engines.request import Request, request
from pararnn.layers.layout import BATCH_FIRST, UNBATCHED, Layout, layout_of
from pararnn.layers.recurrent import (
    Fields,
    RecurrentLayer,
    SolveInfo,
    States,
    decoding_pair,
    without_padding,
)


def _shared(name: str) -> Any:
    """An attribute that all parts of a stack have: the first one's is read, all are set."""

    def read(stack: ParaRNN) -> Any:
        return getattr(stack.layers[0], name)

    def write(stack: ParaRNN, value: Any) -> None:
        for part in stack._parts():
            setattr(part, name, value)

    return property(read, write)


class ParaRNN(nn.Module):
    """Any cell as a recurrent layer (or several), trained in parallel over the sequence.

    Args:
        cell_class: the `Cell` subclass.
        input_size, hidden_size: channels in and out; multiples of num_heads.
        num_layers: layers, each fed with the output of the one below.
        bias: whether gates have biases.
        batch_first: tensors are (batch, time, channels), else (time, batch, channels).
        dropout: probability of zeroing an output of every layer but the last, in training.
        bidirectional: a second recurrence from the last step to the first; outputs have
            2 hidden_size channels, forward first.
        num_heads: heads of the input projection (block-diagonal; paper, Appendix C).
        device, dtype: of the parameters.
        solver, backend, on_failure: as in `pararnn.solve`.
        mode: one of the paper's modes (`MODES`) in place of a solver and a backend.
        recurrent_clip: bound that `clip_after_step` clamps recurrent parameters to; None for none.
        recompute_gates: do not keep the gates (B, T, G, D) for the backward pass, but project the
            input anew there: a layer then keeps its input and its states only.
        projection_gain, recurrent_std: of the initialisation, as in `RecurrentLayer`.
        config: the cell's config.

    It is a stack of `RecurrentLayer`, in `layers` (and `reverse_layers`), and its attributes
    solver, backend, on_failure and recurrent_clip are theirs: setting one sets it on all of them.

    `proj_size` of torch.nn.LSTM is refused: it would mix channels within the recurrence. Raises
    CellError for a malformed cell, ValueError for impossible sizes, EngineError for an unknown
    solver, backend or mode.
    """

    solver, backend = _shared("solver"), _shared("backend")
    on_failure, recurrent_clip = _shared("on_failure"), _shared("recurrent_clip")

    def __init__(
        self,
        cell_class: type[Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        solver: str | None = None,
        backend: str | None = None,
        mode: str | None = None,
        on_failure: str = "warn",
        recurrent_clip: float | None = 0.5,
        recompute_gates: bool = False,
        projection_gain: float = 1.0,
        recurrent_std: float | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be positive, got {num_layers}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout}")
        if proj_size:
            raise ValueError(
                f"proj_size must be 0, got {proj_size}: projected states would mix channels within "
                "the recurrence, which could not run in parallel then; put a Linear behind it"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.num_heads, self.batch_first, self.dropout = num_heads, batch_first, dropout
        self.bidirectional = bidirectional

        def part(index: int, reverse: bool) -> RecurrentLayer:
            return RecurrentLayer(
                cell_class,
                hidden_size * (1 + bidirectional) if index else input_size,
                hidden_size,
                bias,
                num_heads=num_heads,
                reverse=reverse,
                solver=solver,
                backend=backend,
                mode=mode,
                on_failure=on_failure,
                recurrent_clip=recurrent_clip,
                recompute_gates=recompute_gates,
                projection_gain=projection_gain,
                recurrent_std=recurrent_std,
                device=device,
                dtype=dtype,
                **config,
            )

        self.layers = nn.ModuleList(part(index, False) for index in range(num_layers))
        if bidirectional:
            self.reverse_layers = nn.ModuleList(part(index, True) for index in range(num_layers))

    @property
    def cell(self) -> Cell:
        """The first layer's cell."""
        return unwrapped(cast(RecurrentLayer, self.layers[0]).cell)

    @property
    def last_solve(self) -> SolveInfo | None:
        """What the solvers of the last eager call did; None before it: see `RecurrentLayer`."""
        counts = [part.counts for part in self._parts()]
        found = [totals(count) for count in counts if count is not None]
        return SolveInfo(*torch.stack(found, 1)) if len(found) == len(counts) else None

    def forward(
        self,
        x: Tensor | PackedSequence,
        h_0: States | None = None,
        *,
        fields: Fields | None = None,
        reset: Tensor | PackedSequence | None = None,
        lengths: Tensor | list[int] | None = None,
        padding: str = "right",
        cu_seqlens: Tensor | None = None,
        all_states: bool = False,
        solver: str | None = None,
        backend: str | None = None,
        mode: str | None = None,
    ) -> Any:
        """Run over whole sequences.

        Args:
            x: (B, T, input_size), or (T, B, input_size) without batch_first; (T, input_size)
                unbatched; or a PackedSequence.
            h_0: initial states (num_layers, B, hidden_size), a tuple of N for N states; None is
                zero. Twice as many layers if bidirectional, in the order layer 0 forward, layer 0
                reverse, layer 1 forward. Without B for unbatched x; S in place of B with
                `cu_seqlens`.
            fields: the cell's fields by name, each laid out like x without its channels, or with
                hidden_size of them, or a number.
            reset: bool, laid out like x without its channels; such a step starts from the zero
                state, in the order of processing.
            lengths: int (B,); the steps of each sequence, the rest being padding. Integers on the
                CPU are checked; on CUDA the device asserts.
            padding: the side that padding is on, "right" or "left".
            cu_seqlens: int (S + 1,), the starts of S sequences packed into one row (B = 1, or
                unbatched x), and the end of the last.
            all_states: return the states of all layers at all steps too.
            solver, backend, mode: for this call; else those of `using`, else the layer's own.

        Returns:
            (output, h_n): the last layer's first state, laid out like x with hidden_size channels
            (twice as many if bidirectional), in the dtype of the projection's result, 0 at padding;
            the final states, like h_0, in float32 (or float64). With `all_states` a third item: for
            each layer and direction, in the order of h_n, a tuple of N tensors like the output.
        """
        if isinstance(x, PackedSequence):
            self._check_rank(x.data, (2,))
        else:
            self._check_rank(x, (2, 3))
        layout = layout_of(x, self.batch_first, lengths, padding, cu_seqlens)
        asked = request(solver, backend, mode)
        return self._run(x, h_0, layout, asked, fields or {}, reset, all_states)

    def step(
        self, x_t: Tensor, state: States | None = None, *, fields: Fields | None = None
    ) -> tuple[Tensor, States]:
        """One time step, for decoding: x_t (B, input_size), states and results as in `forward`.

        It is `forward` at T = 1 by the sequential solver, and takes (input_size,) unbatched; fields
        are (B,), (B, hidden_size) or numbers. Raises ValueError for bidirectional layers.
        """
        if self.bidirectional:
            raise ValueError(
                "a bidirectional layer cannot decode step by step: its reverse direction starts "
                "from the last step"
            )
        self._check_rank(x_t, (1, 2))
        layout, time = (BATCH_FIRST, 1) if x_t.ndim == 2 else (UNBATCHED, 0)
        given = fields or {}
        fields = {k: v.unsqueeze(time) if torch.is_tensor(v) else v for k, v in given.items()}
        asked = decoding_pair(self.backend)
        x, finals = self._run(x_t.unsqueeze(time), state, layout, asked, fields, None, False)
        return x.squeeze(time), finals

    def _run(
        self,
        given: Any,
        h_0: States | None,
        layout: Layout,
        asked: Request,
        fields: Fields,
        reset: Any,
        all_states: bool,
    ) -> Any:
        """All layers; `asked`: the request of this call."""
        into, back = layout.into, layout.back
        x = into(given)
        if layout.sequences is not None and isinstance(given, Tensor):
            x = without_padding(x, layout.sequences)  # a PackedSequence has ours, which is 0
        fields = {k: v if isinstance(v, (int, float)) else into(v) for k, v in fields.items()}
        reset = None if reset is None else into(reset)
        initial = self._per_part(h_0, x, layout)
        finals: list[tuple[Tensor, ...]] = []
        series: list[tuple[Tensor, ...]] = []
        parts, directions = self._parts(), 1 + self.bidirectional
        for index in range(self.num_layers):
            if index and self.dropout and self.training:
                # On CUDA the mask follows the layout, which would depend on the engine.
                x = F.dropout(x.contiguous(), self.dropout)
            outputs = []
            for part in parts[index * directions : (index + 1) * directions]:
                output, final, *states = part(
                    x,
                    initial[len(finals)],
                    fields=fields,
                    reset=reset,
                    sequences=layout.sequences,
                    all_states=all_states,
                    solver=asked.solver,
                    backend=asked.backend,
                )
                outputs.append(output)
                finals.append(final if isinstance(final, tuple) else (final,))
                series.extend(states)
            x = outputs[0] if directions == 1 else self._merged(outputs, index)
        results = back(x), self._stacked(finals, layout.batched)
        if not all_states:
            return results
        return *results, tuple(tuple(back(s) for s in states) for states in series)

    def _merged(self, outputs: list[Tensor], index: int) -> Tensor:
        """Both directions side by side; between layers head by head, as each head sees a slice."""
        if index == self.num_layers - 1 or self.num_heads == 1:
            return torch.cat(outputs, -1)
        by_head = [output.unflatten(-1, (self.num_heads, -1)) for output in outputs]
        return torch.cat(by_head, -1).flatten(-2)

    def reset_parameters(self) -> None:
        """Initialise anew (paper, Appendix C): see `HeadwiseLinear` and `Param`; zero biases."""
        for part in self._parts():
            part.reset_parameters()

    def recurrent_parameters(self) -> list[Tensor]:
        """The parameters that clipping concerns.

        Raises ValueError for one that a parametrisation computes, which cannot be clamped.
        """
        return [p for part in self._parts() for p in part.recurrent_parameters()]

    def clip_recurrent(self) -> None:
        """Clamp the recurrent parameters elementwise to [-recurrent_clip, recurrent_clip].

        Raises ValueError as `recurrent_parameters`.
        """
        for part in self._parts():
            part.clip_recurrent()

    def flatten_parameters(self) -> None:
        """Nothing: for code written for torch.nn.GRU, whose cuDNN wants weights in one piece."""

    def extra_repr(self) -> str:
        shown = ("num_layers", "batch_first", "dropout", "bidirectional", "num_heads")
        options = [f"{name}={getattr(self, name)!r}" for name in (*shown, "solver", "backend")]
        return ", ".join([str(self.input_size), str(self.hidden_size), *options])

    def _parts(self) -> list[RecurrentLayer]:
        """Layers in the order of their states: layer 0 forward, layer 0 reverse, layer 1 ..."""
        layers = cast(list[RecurrentLayer], list(self.layers))
        if not self.bidirectional:
            return layers
        reverse = cast(list[RecurrentLayer], list(self.reverse_layers))
        return [part for pair in zip(layers, reverse, strict=True) for part in pair]

    def _check_rank(self, x: Tensor, ranks: tuple[int, ...]) -> None:
        name = type(self).__name__
        if x.ndim not in ranks:
            wanted = " or ".join(f"{rank}D" for rank in ranks)
            raise ValueError(f"{name}: Expected input to be {wanted}, got {x.ndim}D instead")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"{name}: input.size(-1) must be equal to input_size. Expected {self.input_size}, "
                f"got {x.shape[-1]}"
            )

    def _per_part(
        self, states: States | None, x: Tensor, layout: Layout
    ) -> Sequence[tuple[Tensor, ...] | None]:
        count = self.num_layers * (1 + self.bidirectional)
        if states is None:
            return [None] * count
        names = self.cell.states
        given = (states,) if isinstance(states, Tensor) else tuple(states)
        rows = x.shape[0] if layout.sequences is None else layout.sequences.total
        size = (count, rows, self.hidden_size) if layout.batched else (count, self.hidden_size)
        shapes = [tuple(state.shape) for state in given]
        if shapes != [size] * len(names):
            raise ValueError(
                f"{type(self).__name__}: Expected hidden states {tuple(names)} of size {size} "
                f"each, got {shapes}"
            )
        if not layout.batched:
            given = tuple(state.unsqueeze(1) for state in given)
        return list(zip(*(state.unbind() for state in given), strict=True))

    def _stacked(self, finals: list[tuple[Tensor, ...]], batched: bool) -> States:
        if len(finals) == 1:
            stacked = tuple(state.unsqueeze(0) for state in finals[0])
        else:
            stacked = tuple(torch.stack(series) for series in zip(*finals, strict=True))
        if not batched:
            stacked = tuple(state.squeeze(1) for state in stacked)
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
