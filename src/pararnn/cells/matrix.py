"""Sizes of cells: with vectors of channels, or with numbers, vectors and matrices of each head."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.cells.shapes import ParamShape

VALUES = "V"
"""The axis of a head's output, D / H long. Every other axis is an argument of the cell."""
HEADS = "H"
"""The axis of heads, which parameters name and states and gates have without saying."""

Axes = tuple[str, ...]
"""Names of the axes of a tensor of one head: none for a number, two for a matrix."""


@dataclass(frozen=True)
class HeadAxes:
    """The axes of a cell's states, gates and memories, by name, as its class declares them.

    outputs: the axes of a step's outputs; without a readout they are the first states. inner: axes
    that only parameters have. of_calls: the axes that only memories have, and states with them,
    which are as long as a call's tensors.
    """

    states: Mapping[str, Axes]
    gates: Mapping[str, Axes]
    outputs: tuple[Axes, ...] = ((VALUES,),)
    inner: Axes = ()
    memory: Mapping[str, Axes] = field(default_factory=dict)
    of_calls: Axes = ()

    @property
    def arguments(self) -> Axes:
        """Axes whose sizes are arguments of the cell: all but `VALUES` and `of_calls`."""
        tensors = (*self.states.values(), *self.gates.values(), self.inner, *self.memory.values())
        every = dict.fromkeys(axis for axes in tensors for axis in axes)
        return tuple(axis for axis in every if axis not in (VALUES, *self.of_calls))


@dataclass(frozen=True)
class ChannelSizes:
    """Sizes of the tensors of a cell whose states and gates are vectors of D channels in H heads.

    keeps_states: whether solvers return the states of all steps. lengths: of each axis.
    """

    channels: int
    heads: int
    num_states: int
    num_gates: int
    keeps_states: ClassVar[bool] = True
    lengths: ClassVar[Mapping[str, int]] = {}

    @property
    def projected(self) -> tuple[int, int]:
        """The gates that a projection gives, and the channels of one."""
        return self.num_gates, self.channels

    @property
    def output(self) -> tuple[int, ...]:
        """(D,), the size of a step's output."""
        return (self.channels,)

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the states of one sequence, (D,) each."""
        return ((self.channels,),) * self.num_states

    def param(self, shape: ParamShape) -> tuple[int, ...]:
        """Return the size of a parameter."""
        return shape.size(self.channels, self.heads)

    def fan_in(self, shape: ParamShape) -> int:
        """Return the number of entries that a parameter of a Gaussian by default sums over."""
        return self.channels // (self.heads if shape.by_heads else 1)

    def lifted(self, shape: ParamShape, value: Tensor) -> Tensor:
        """Return a parameter as a program takes it."""
        return shape.lifted(value, self.channels, self.heads)


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the tensors of a cell with H heads: `states` and `gates` of one head each, in order.

    lengths: of each axis, but for those that a call decides, until `of_call` adds them. state_axes,
    memory: the axes of the states and of the memories. The gates of a head travel as one vector of
    `width` numbers. Solvers return outputs, as the states of all steps are too large.
    """

    keeps_states: ClassVar[bool] = False
    heads: int
    lengths: Mapping[str, int]
    state_axes: tuple[Axes, ...]
    gates: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    memory: tuple[Axes, ...] = ()

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the states. ValueError where a call's memory decides one."""
        missing = {axis for axes in self.state_axes for axis in axes if axis not in self.lengths}
        if missing:
            raise ValueError(
                f"a state is as long as a call's memory along {min(missing)}: pass memory={{...}}"
            )
        return tuple(tuple(self.lengths[axis] for axis in axes) for axes in self.state_axes)

    def of_call(self, lengths: Mapping[str, int]) -> HeadSizes:
        """Return the sizes in a call, with the lengths of the axes that it decides."""
        return replace(self, lengths={**self.lengths, **lengths}) if lengths else self

    @property
    def width(self) -> int:
        """W, the numbers of all gates of a head."""
        return sum(map(math.prod, self.gates))

    @property
    def gate_offsets(self) -> tuple[int, ...]:
        """Where each gate begins among the numbers of a head."""
        return tuple(accumulate(map(math.prod, self.gates[:-1]), initial=0))

    @property
    def projected(self) -> tuple[int, int]:
        """The gates that a projection gives, one for all, and its channels: H W."""
        return 1, self.heads * self.width

    @property
    def output(self) -> tuple[int, int]:
        """(H, V), V being the numbers of all outputs of a head."""
        return self.heads, sum(map(math.prod, self.outputs))

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the states with their heads, (H, K, V) for a matrix."""
        return tuple((self.heads, *size) for size in self.states)

    def by_head(self, gates: Tensor) -> Tensor:
        """Return gates (B, T, 1, H, W) or (B, T, 1, H W) as (B, T, H, W)."""
        one = gates.select(2, 0)
        return one if one.ndim == 4 else one.unflatten(2, (self.heads, self.width))

    def split(self, gates: Tensor) -> tuple[Tensor, ...]:
        """Return the gates in order of gates (..., H, W): (..., H), (..., H, K), (..., H, K, V)."""
        return split_numbers(gates, self.gates)

    def split_output(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs in order of all of them next to each other, (..., H, V)."""
        return split_numbers(output, self.outputs)

    def join_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs of a step, with leading dimensions (..., H), next to each other."""
        if len(outputs) == len(self.outputs[0]) == 1:
            return outputs[0]
        return join_numbers(outputs, self.outputs)

    def split_states(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the states in order of all of them next to each other, (..., H, numbers)."""
        return split_numbers(states, self.states)

    def join_states(self, states: Sequence[Tensor]) -> Tensor:
        """Return states, with leading dimensions (..., H), next to each other."""
        return join_numbers(states, self.states)

    @property
    def memory_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the memories of a head in a call, see `of_call`."""
        return tuple(tuple(self.lengths[axis] for axis in axes) for axes in self.memory)

    def memory_lengths(self, memories: Iterable[tuple[int, ...]]) -> dict[str, int]:
        """Return the lengths of axes by the sizes (..., *size) of memories in order, as the first
        one that has an axis says."""
        lengths: dict[str, int] = {}
        for axes, size in zip(self.memory, memories, strict=True):
            # No zip of unequal lengths, which the compiler of PyTorch 2.9 refuses.
            for place in range(-1, -1 - min(len(axes), len(size)), -1):
                lengths.setdefault(axes[place], size[place])
        every = {axis for axes in self.memory for axis in axes}
        return {axis: lengths.get(axis, 0) for axis in every if axis not in self.lengths}

    def param(self, shape: ParamShape) -> tuple[int, ...]:
        """Return the size of a parameter: (), (H,), or (H, ...) by the axes of its shape."""
        if shape.axes is None:
            return ()
        return self.heads, *(self.lengths[axis] for axis in shape.axes)

    def numbers(self, shape: ParamShape) -> int:
        """Return how many numbers of a parameter a head has."""
        return math.prod(self.param(shape)[1:])

    def fan_in(self, shape: ParamShape) -> int:
        """Return a matrix's rows, a vector's entries, and V for a number; of a tensor with more
        axes, the numbers along all but the last."""
        size = self.param(shape)[1:]
        return math.prod(size[:-1] or size) if shape.axes else self.lengths[VALUES]

    def lifted(self, shape: ParamShape, value: Tensor) -> Tensor:
        """Return a parameter as a program takes it: as it is."""
        return value


Sizes = ChannelSizes | HeadSizes


def split_numbers(x: Tensor, sizes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors (..., *size), of each of `sizes`, that x (..., W) has in order."""
    return tuple(
        [
            tensor.unflatten(-1, size) if size else tensor.squeeze(-1)
            for tensor, size in zip(x.split([*map(math.prod, sizes)], -1), sizes, strict=True)
        ]
    )


def join_numbers(tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the numbers (..., W) of tensors (..., *size), the inverse of `split_numbers`."""
    pairs = zip(tensors, sizes, strict=True)
    return torch.cat(
        [x.reshape(*x.shape[: x.ndim - len(size)], math.prod(size)) for x, size in pairs], -1
    )


def axes_of_class(
    name: str,
    states: Any,
    gates: Any,
    outputs: Any,
    memory: Any,
    shapes: Mapping[str, ParamShape],
    config: Collection[str],
) -> HeadAxes:
    """Return the axes that a class declares. Raises CellError, with a cure, for invalid ones.

    outputs: empty for one vector of `VALUES`. shapes: those of the parameters, by name. config: its
    names, which may be axes that only parameters have.
    """
    if not isinstance(states, Mapping) or not isinstance(gates, Mapping):
        raise CellError(
            f"{name} gives the axes of its {'states' if isinstance(states, Mapping) else 'gates'} "
            "and not of the other: states and gates are both dicts of axes, such as "
            '{"H": ("K", "V")} and {"k": "K", "f": ""}, or both tuples of names'
        )

    def axes_of(kind: str, tensors: Mapping[str, Any]) -> dict[str, Axes]:
        return {key: _axes(f"{name}.{kind}[{key!r}]", value) for key, value in tensors.items()}

    of_params = [axis for shape in shapes.values() for axis in shape.axes or ()]
    axes = HeadAxes(
        axes_of("states", states),
        axes_of("gates", gates),
        tuple(axes_of("outputs", outputs).values()) or ((VALUES,),),
        tuple(dict.fromkeys(axis for axis in of_params if axis in config)),
    )
    of_memories = axes_of("memory", memory)
    of_rows = (*axes.gates.values(), *axes.outputs)
    of_cell = {*of_params, *config, VALUES, *(axis for names in of_rows for axis in names)}
    of_calls = {a: None for tensor in of_memories.values() for a in tensor if a not in of_cell}
    axes = replace(axes, memory=of_memories, of_calls=tuple(of_calls))
    all_axes = {*axes.arguments, VALUES}
    unknown = sorted({axis for names in axes.outputs for axis in names} - all_axes)
    if unknown:
        raise CellError(f"{name}.outputs have the axis {unknown[0]!r}, which no state or gate has")
    for key, shape in shapes.items():
        if shape.axes is None and shape.name:
            raise CellError(
                f"{name}.params[{key!r}] has the shape {shape.name!r}: a cell whose states are "
                'matrices of heads takes "" (a number), "H" (a number a head) and axes of heads, '
                'such as "H,K,V"'
            )
        unknown = sorted({*(shape.axes or ())} - all_axes)
        if unknown:
            raise CellError(
                f"{name}.params[{key!r}] has the axis {unknown[0]!r}, which no state, gate or "
                f"memory has (they have {sorted(all_axes)}), and to which config gives no length"
            )
    return axes


def _axes(what: str, value: Any) -> Axes:
    names = () if value == "" else (value,) if isinstance(value, str) else value
    valid = isinstance(names, Sequence) and all(
        isinstance(axis, str) and axis.isidentifier() and axis != HEADS for axis in names
    )
    if not valid or len(names) > 2:
        raise CellError(
            f'{what} must be "" (a number for each head), the name of an axis such as "K", or a '
            f'tuple of two for a matrix, ("K", "V"); the heads\' own axis "{HEADS}" goes without '
            f"saying. Got {value!r}"
        )
    return tuple(names)


def sizes_of(
    name: str, axes: HeadAxes, config: Mapping[str, Any], channels: int, heads: int
) -> HeadSizes:
    """Return the sizes for D channels in H heads, with the lengths of axes that config has; None is
    that of `VALUES`. Raises CellError for one that is no positive integer."""
    lengths = {VALUES: channels // heads}
    for axis in axes.arguments:
        length = config[axis]
        length = lengths[VALUES] if length is None else length
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise CellError(
                f"{name}: the axis {axis} must be a positive number of entries, got {length!r}"
            )
        lengths[axis] = length

    def lengths_of(tensors: Iterable[Axes]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(lengths[axis] for axis in names) for names in tensors)

    return HeadSizes(
        heads,
        lengths,
        tuple(axes.states.values()),
        lengths_of(axes.gates.values()),
        lengths_of(axes.outputs),
        tuple(axes.memory.values()),
    )
