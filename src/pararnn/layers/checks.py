"""Checks of a stack's input and states, and its states by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pararnn.base.tensors import States, as_states, check_tensor

StateSizes = Mapping[str, tuple[int, ...]]
"""Sizes of one sequence's states, by name."""

ByLayer = Sequence[tuple[Tensor, ...] | None]
"""The states of each layer and direction, with a batch dimension; None is zero."""


def one_of(name: str, value: Any, other: str, other_value: Any, needed_by: str = "") -> Any:
    """Return an argument that has two names. Raises TypeError if both are given, or neither of an
    input that a layer needs."""
    if value is not None and other_value is not None:
        raise TypeError(f"{name} and {other} are two names of one argument: give one of them")
    if needed_by and value is None and other_value is None:
        raise TypeError(f"{needed_by} needs its input: {name}, or {other} by name")
    return value if other_value is None else other_value


def check_count(name: str, value: Any) -> None:
    """Raise TypeError for a size that is no integer, ValueError for one below 1."""
    if not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name} must be an integer, got {value!r} ({type(value).__name__}): // divides "
            "integers to one"
        )
    if value.__index__() < 1:
        raise ValueError(f"{name} must be positive, got {value}")


def check_input(
    name: str, x: Tensor | PackedSequence, input_size: int, ranks: tuple[int, ...]
) -> None:
    """Raise TypeError for what is no tensor, ValueError for another rank or number of channels."""
    if isinstance(x, PackedSequence):
        x, ranks = x.data, (2,)
    check_tensor(f"the input of {name}", x)
    if x.ndim not in ranks:
        sizes = " or ".join(f"{rank}D" for rank in ranks)
        raise ValueError(f"{name}: Expected input to be {sizes}, got {x.ndim}D instead")
    if x.shape[-1] != input_size:
        raise ValueError(
            f"{name}: input.size(-1) must be equal to input_size. Expected {input_size}, "
            f"got {x.shape[-1]}"
        )


def has_time(field: Any) -> bool:
    """Return True if a field is laid out as the input is, and is no number."""
    return isinstance(field, PackedSequence) or (isinstance(field, Tensor) and field.ndim > 0)


def initial_states(
    name: str, sizes: StateSizes, layers: int, initial: States | None, batch_size: tuple[int, ...]
) -> ByLayer:
    """Return the initial states of all layers, of sizes (*batch_size, *size) each, by layer.

    Raises TypeError where one is no tensor, ValueError for other sizes.
    """
    if initial is None:
        return [None] * layers
    full = [(layers, *batch_size, *size) for size in sizes.values()]
    states = as_states(f"the hidden state of {name}", initial)
    if [state.shape for state in states] != full:
        wanted = f"size {full[0]} each" if full.count(full[0]) == len(full) else f"the sizes {full}"
        raise ValueError(
            f"{name}: Expected hidden states {tuple(sizes)} of {wanted}, got "
            f"{[tuple(state.shape) for state in states]}"
        )
    if not batch_size:
        states = tuple(state.unsqueeze(1) for state in states)
    return _by_layer(states)


def states_at_resets(
    name: str, sizes: StateSizes, layers: int, reset_states: States | None
) -> ByLayer:
    """Return the states that K resets start from, by layer; errors as for initial states."""
    if reset_states is None:
        return [None] * layers
    states = as_states("reset_states", reset_states)
    shapes = [tuple(state.shape) for state in states]
    count = shapes[0][1] if len(shapes[0]) > 1 else 0
    if shapes != [(layers, count, *size) for size in sizes.values()]:
        texts = [f"({layers}, K, {', '.join(map(str, size))})" for size in sizes.values()]
        wanted = f"size {texts[0]} each" if len({*texts}) == 1 else f"the sizes {texts}"
        raise ValueError(
            f"{name}: reset_states must be {tuple(sizes)} of {wanted}, K the number of true steps "
            f"of reset, got {shapes}"
        )
    return _by_layer(states)


def _by_layer(states: Sequence[Tensor]) -> ByLayer:
    return list(zip(*[state.unbind() for state in states], strict=True))
