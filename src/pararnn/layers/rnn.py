"""Stacks of recurrent layers, in one direction or both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pararnn.base.errors import warn_user
from pararnn.base.private import unsafe_view
from pararnn.base.tensors import ArrayLike, States
from pararnn.cells import Cell
from pararnn.cells.base import unwrap
from pararnn.engines.arguments import Arguments, totals
from pararnn.layers.checks import (
    ByLayer,
    check_count,
    check_input,
    has_time,
    initial_states,
    one_of,
    states_at_resets,
)
from pararnn.layers.layout import layout_of, order_of_resets
from pararnn.layers.recurrent import RecurrentLayer, SolveInfo
from pararnn.messages.group import OnRanks
from pararnn.sequences import checked_reset, one_a_row, without_padding
from pararnn.solve import Fields, Memory, by_name, exports_to_onnx
from pararnn.zoo import BlockGRUCell, GRUCell, HeadSLSTMCell, LSTMCell


def _shared(name: str) -> Any:
    """Return a property that reads the first layer's attribute, and sets that of all."""

    def read(stack: ParaRNN) -> Any:
        return getattr(stack.layers[0], name)

    def write(stack: ParaRNN, value: Any) -> None:
        for layer in stack._all_layers():
            setattr(layer, name, value)

    return property(read, write)


_NOT_OURS = (
    "are of torch.nn: full recurrent matrices fit no diagonal recurrence, so the layer keeps its "
    "weights, and must be trained from the start; pararnn.LSTM, GRU and RNN take them"
)


class ParaRNN(OnRanks, nn.Module):
    """Any cell as a recurrent layer (or several), trained in parallel over the sequence.

    Args:
        cell_class: the `Cell` subclass.
        input_size, hidden_size: channels in and out; multiples of num_heads.
        num_layers: layers, each fed with the output of the one below.
        bias: True if gates have biases.
        batch_first: tensors are (batch, time, channels), else (time, batch, channels).
        dropout: probability of zeroing an output of every layer but the last, in training.
        bidirectional: a second recurrence from the last step to the first; outputs have
            2 hidden_size channels, forward first.
        num_heads: heads of the input projection (block-diagonal; paper, Appendix C).
        device, dtype: of the parameters.
        options: those of every layer as `RecurrentLayer` takes them (solver, backend, mode,
            on_failure, recurrent_clip, recompute_gates, keep_dtype, projection_gain,
            recurrent_std), and the cell's config.

    It is a stack of `RecurrentLayer`, in `layers` (and `reverse_layers`), and its attributes
    solver, backend, on_failure and recurrent_clip are theirs: setting one sets it on all of them.

    `proj_size` of torch.nn.LSTM is refused: it would mix channels within the recurrence, as
    `pararnn.LSTM` does. Raises CellError for a malformed cell, ValueError for impossible sizes,
    TypeError for sizes that are no integers, and for `reverse`, which `RecurrentLayer` has;
    EngineError for an unknown solver, backend or mode.
    """

    layer_class: type[RecurrentLayer] = RecurrentLayer
    proj_size = 0  # for what looks for it in a torch.nn.LSTM
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
        **options: Any,
    ) -> None:
        if "_modules" not in self.__dict__:  # torch.nn.RNNBase has made a module
            super().__init__()
        check_count("num_layers", num_layers)
        if "reverse" in options:
            raise TypeError(
                f"{self._name} has no reverse: bidirectional=True adds a second direction, and "
                "pararnn.RecurrentLayer(..., reverse=True) runs from the last step alone"
            )
        if isinstance(dropout, bool) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout}")
        if dropout and num_layers == 1:
            warn_user(f"dropout = {dropout} is between layers: one alone has none", UserWarning)
        if proj_size:
            raise ValueError(
                f"proj_size must be 0, got {proj_size}: projected states would mix channels within "
                "the recurrence, which could not run in parallel then: put a Linear behind it, or "
                "take pararnn.LSTM, which has it"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.num_heads, self.batch_first = num_heads, batch_first
        # No float where there is none: with dynamic sizes torch.compile takes it for an input, and
        # compiles all again once it finds that it is a constant.
        self.dropout: float = dropout or 0
        self.bidirectional, self.bias = bidirectional, bias

        def make(index: int, reverse: bool) -> RecurrentLayer:
            return self.layer_class(
                cell_class,
                hidden_size * (1 + bidirectional) if index else input_size,
                hidden_size,
                bias,
                num_heads=num_heads,
                reverse=reverse,
                device=device,
                dtype=dtype,
                **options,
            )

        self.layers = nn.ModuleList(make(index, False) for index in range(num_layers))
        if bidirectional:
            self.reverse_layers = nn.ModuleList(make(index, True) for index in range(num_layers))

    @property
    def cell(self) -> Cell:
        """The first layer's cell."""
        return unwrap(self._all_layers()[0].cell)

    @property
    def mode(self) -> str:
        """The cell's name as in torch.nn.RNNBase, "GRU" or "LSTM"; else that of its class."""
        return self._mode()

    @mode.setter
    def mode(self, value: Any) -> None:
        if "layers" not in self._modules:  # torch.nn.RNNBase says what it makes weights of
            return
        raise AttributeError(
            f"mode names the cell, {self.mode}, as in torch.nn, and cannot be {value!r}. The "
            "paper's modes are arguments of a layer, of its call and of pararnn.using"
        )

    @property
    def last_solve(self) -> SolveInfo | None:
        """Counts of the last eager call's solves; None before it: see `RecurrentLayer`."""
        counts = [layer.counts for layer in self._all_layers()]
        solves = [totals(count) for count in counts if count is not None]
        return SolveInfo(*torch.stack(solves, 1)) if len(solves) == len(counts) else None

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of every layer and direction, in the order of h_n."""
        return [list(layer.parameters()) for layer in self._all_layers()]

    def forward(
        self,
        x: Tensor | PackedSequence | None = None,
        h_0: States | None = None,
        *,
        input: Tensor | PackedSequence | None = None,
        hx: States | None = None,
        fields: Fields | None = None,
        memory: Memory | None = None,
        reset: ArrayLike | PackedSequence | None = None,
        reset_states: States | None = None,
        lengths: ArrayLike | None = None,
        padding: str = "right",
        cu_seqlens: ArrayLike | None = None,
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
            input, hx: x and h_0 by torch.nn.GRU's names; TypeError where both are given.
            fields: the cell's fields by name, each laid out like x without its channels, or with
                hidden_size of them, or a number.
            memory: the cell's memories by name, which all layers read: such as (B, H, K, V), or
                (B, K, V) shared by the heads, also without batch_first; without B for unbatched x,
                S in place of B with `cu_seqlens`.
            reset: bool, laid out like x without its channels; such a step starts from the zero
                state, in the order of processing.
            reset_states: the states that such steps start from instead, like h_0 with K in place of
                B for K of them, in the order in which `states[reset]` has them.
            lengths: int (B,); the steps of each sequence, the rest being padding. Integers on the
                CPU are checked; on CUDA the device asserts. A tensor, list or NumPy array, as
                cu_seqlens and reset may be.
            padding: the side that padding is on, "right" or "left".
            cu_seqlens: int (S + 1,), the starts of S sequences packed into one row (B = 1, or
                unbatched x), and the end of the last.
            all_states: return the states of all layers at all steps too.
            solver, backend, mode: for this call; else those of `using`, else the layer's own.

        Returns:
            (output, h_n): the last layer's first state, or its cell's readout, laid out like x with
            hidden_size channels (twice as many if bidirectional), in the dtype of the projection's
            result, 0 at padding; the final states, like h_0, in float32 (or float64), unless
            `keep_dtype`. With `all_states` a third item: for each layer and direction, in the order
            of h_n, its states, a tuple of N tensors like the output.
        """
        x, h_0 = one_of("x", x, "input", input, self._name), one_of("h_0", h_0, "hx", hx)
        check_input(self._name, x, self.input_size, (2, 3))
        begins: Any = reset
        if reset is not None and isinstance(x, Tensor):
            begins = checked_reset(x, reset, x.ndim - 1)
        layout = layout_of(x, self.batch_first, lengths, padding, cu_seqlens, self.group)
        to_rows, to_user = layout.to_rows, layout.to_user
        is_packed, x = isinstance(x, PackedSequence), to_rows(x)
        sequences = layout.sequences or one_a_row(x)
        if layout.sequences and not is_packed:  # a PackedSequence gets zeros at padding
            x = without_padding(x, sequences)
        if begins is not None:
            sequences = sequences._replace(reset=checked_reset(x, to_rows(begins)))
        layers = self._all_layers()
        batch_size = (sequences.total,) if layout.has_batch else ()
        initial, starts = self._states(layers, h_0, batch_size, reset_states, memory)
        if starts[0] is not None and begins is not None:
            order = order_of_resets(begins, layout, starts[0][0].shape[0])
            starts = [tuple(h.index_select(0, order) for h in start or ()) for start in starts]
        options: dict[str, Any] = {
            "fields": {k: to_rows(v) if has_time(v) else v for k, v in by_name(fields).items()},
            "sequences": sequences,
            "all_states": all_states,
            "solver": solver,
            "backend": backend,
            "mode": mode,
        }

        if memory is not None:
            options["memory"] = with_rows(memory, layout.has_batch or cu_seqlens is not None)
        finals, steps, directions = [], [], 1 + self.bidirectional
        for first in range(0, len(layers), directions):
            x, outputs = self._drop(x) if first else x, []
            for i in range(first, first + directions):
                result, final, *states = layers[i](
                    x, initial[i], reset_states=starts[i], **options, **self._with(i)
                )
                outputs.append(result)
                finals.append(final)
                steps += states
            last = first + directions == len(layers)
            x = outputs[0] if directions == 1 else self._merge(outputs, last)
            del result, outputs  # which the next layer does not need: its results take their memory
        h_n = stack_states(finals, layout.has_batch)
        if not all_states:
            return to_user(x), h_n
        return to_user(x), h_n, tuple(tuple(map(to_user, states)) for states in steps)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` under a tracer. An exporter of PyTorch gives it all its arguments by
        position, which would fail: refuse that before."""
        exports_to_onnx()
        return super()._slow_forward(*args, **kwargs)

    def step(
        self,
        x_t: Tensor | None = None,
        state: States | None = None,
        *,
        input: Tensor | None = None,
        hx: States | None = None,
        fields: Fields | None = None,
        memory: Memory | None = None,
        reset: ArrayLike | None = None,
        reset_states: States | None = None,
    ) -> tuple[Tensor, States]:
        """Run one time step, for decoding: x_t (B, input_size), states and results as in `forward`.

        It is `forward` at T = 1 by the sequential solver, and takes (input_size,) unbatched; fields
        are (B,), (B, hidden_size) or numbers, reset is (B,), memory is that of `forward`. States
        are as they are carried, in float32 (or float64), whatever `keep_dtype` says. Raises
        ValueError for bidirectional layers.
        """
        if self.bidirectional:
            raise ValueError(
                "a bidirectional layer cannot decode step by step: its reverse direction starts "
                "from the last step"
            )
        x_t = one_of("x_t", x_t, "input", input, self._name)
        state = one_of("state", state, "hx", hx)
        check_input(self._name, x_t, self.input_size, (1, 2))
        has_batch, fields = x_t.ndim == 2, by_name(fields)
        if reset is not None:
            reset = checked_reset(x_t, reset, x_t.ndim - 1)
        if not has_batch:
            x_t = x_t.unsqueeze(0)
            of_rows = fields.items()
            fields = {k: v.unsqueeze(0) if torch.is_tensor(v) else v for k, v in of_rows}
            reset = None if reset is None else reset.unsqueeze(0)
        batch_size, layers = (x_t.shape[0],) if has_batch else (), self._all_layers()
        states_of = partial(self._states, layers, state, batch_size, reset_states, memory)
        options = (fields or None, memory, reset, reset_states)
        with_memory: dict[str, Any] = (
            {} if memory is None else {"memory": with_rows(memory, has_batch)}
        )
        if has_batch and len(layers) == 1 and not any(o is not None for o in options):
            result = layers[0].step_directly(
                x_t, state, stacked=True, check=states_of, **self._step_with(0)
            )
            if result is not None:
                return result
        initial, starts = states_of()
        output, finals = x_t, []
        for i, layer in enumerate(layers):
            output, final = layer.step(
                self._drop(output) if i else output,
                initial[i],
                fields=fields or None,
                reset=reset,
                reset_states=starts[i],
                **with_memory,
                **self._step_with(i),
            )
            finals.append(final)
        return output if has_batch else output.squeeze(0), stack_states(finals, has_batch)

    def _mode(self) -> str:
        return type(self.cell).__name__.removesuffix("Cell")

    def first_call(self, x: Tensor, **inputs: Any) -> Arguments:
        """Return the record of the first layer's solve for rows x (B, T, input_size); inputs: as in
        `RecurrentLayer.arguments`."""
        return self._all_layers()[0].arguments(x, **inputs, **self._with(0))

    def _with(self, index: int) -> dict[str, Any]:
        """Return further arguments of a layer's call; index: in the order of `_all_layers`."""
        return {}

    def _step_with(self, index: int) -> dict[str, Any]:
        """Return further arguments of a layer's step; index: in the order of `_all_layers`."""
        return {}

    def _drop(self, output: Tensor) -> Tensor:
        """Apply the dropout between layers."""
        if not (self.dropout and self.training):
            return output
        # On CUDA the mask follows the layout, which would depend on the engine.
        return F.dropout(output.contiguous(), self.dropout)

    def _merge(self, outputs: list[Tensor], last: bool) -> Tensor:
        """Concatenate both directions; between layers head by head, as each head sees a slice."""
        if last or self.num_heads == 1:
            return torch.cat(outputs, -1)
        by_head = [output.unflatten(-1, (self.num_heads, -1)) for output in outputs]
        return torch.cat(by_head, -1).flatten(-2)

    def reset_parameters(self) -> None:
        """Initialise again (paper, Appendix C): see `HeadwiseLinear` and `Param`; zero biases."""
        for layer in self._all_layers():
            layer.reset_parameters()

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the parameters that are clipped.

        Raises ValueError for one that a parametrisation computes, which cannot be clamped.
        """
        return [p for layer in self._all_layers() for p in layer.recurrent_parameters()]

    def clip_recurrent(self) -> None:
        """Clamp the recurrent parameters elementwise to [-recurrent_clip, recurrent_clip].

        Raises ValueError as `recurrent_parameters`.
        """
        for layer in self._all_layers():
            layer.clip_recurrent()

    def flatten_parameters(self) -> None:
        """Do nothing: for code for torch.nn.GRU, whose cuDNN wants weights in one block."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        """Warn of a state_dict of torch.nn: loading with strict=False would ignore its keys."""
        if f"{prefix}weight_hh_l0" in state_dict:
            warn_user(f"{prefix}weight_hh_l0 and the like {_NOT_OURS}", UserWarning)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def extra_repr(self) -> str:
        names = ("num_layers", "batch_first", "dropout", "bidirectional", "num_heads")
        options = [f"{name}={getattr(self, name)!r}" for name in (*names, "solver", "backend")]
        return ", ".join([str(self.input_size), str(self.hidden_size), *options])

    def _all_layers(self) -> list[RecurrentLayer]:
        """Return layers in the order of h_n: layer 0 forward, layer 0 reverse, layer 1 ..."""
        layers = cast("list[RecurrentLayer]", list(self.layers))
        if not self.bidirectional:
            return layers
        reverse = cast("list[RecurrentLayer]", list(self.reverse_layers))
        return [layer for pair in zip(layers, reverse, strict=True) for layer in pair]

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _states(
        self,
        layers: list[RecurrentLayer],
        initial: States | None,
        batch_size: tuple[int, ...],
        reset_states: States | None,
        memory: Memory | None,
    ) -> tuple[ByLayer, ByLayer]:
        """Return initial states, of B rows or unbatched, and those of resets, by layer."""
        if initial is None and reset_states is None:
            return [None] * len(layers), [None] * len(layers)
        cell = unwrap(layers[0].cell)
        sizes = dict(zip(cell.states, layers[0].state_sizes_in(memory), strict=True))
        stack = self._name, sizes, len(layers)
        by_layer = initial_states(*stack, initial, batch_size)
        return by_layer, states_at_resets(*stack, reset_states)


def with_rows(memory: Memory, has_batch: bool) -> Memory:
    """Return memories with a leading dimension of rows, which those of unbatched input lack."""
    if has_batch or not isinstance(memory, Mapping):  # which the layers refuse
        return memory
    return {name: value.unsqueeze(0) for name, value in memory.items()}


def stack_states(finals: list[States], has_batch: bool) -> States:
    """Return the final states of all layers as `ParaRNN` does."""
    by_layer = [final if isinstance(final, tuple) else (final,) for final in finals]
    if len(by_layer) == 1:
        states = tuple([unsafe_view(state, (1, *state.shape)) for state in by_layer[0]])
    else:
        states = tuple(torch.stack(series) for series in zip(*by_layer, strict=True))
    if not has_batch:
        states = tuple([unsafe_view(state, (len(by_layer), *state.shape[2:])) for state in states])
    return states[0] if len(states) == 1 else states


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


class SLSTM(ParaRNN):
    """xLSTM's sLSTM layer, with a recurrent matrix a gate and head; arguments as in `ParaRNN`.

    The output is h, the states are (h, c, n): see `HeadSLSTMCell`.
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(HeadSLSTMCell, input_size, hidden_size, *args, **kwargs)


class BlockGRU(ParaRNN):
    """A GRU in num_heads blocks, with the gates of DreamerV3's; arguments as in `ParaRNN`.

    Without Dreamer's dense product over the whole state and its norms, and each block sees its
    slice of the input: see `BlockGRUCell`.
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(BlockGRUCell, input_size, hidden_size, *args, **kwargs)
