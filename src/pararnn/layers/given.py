"""What a stack of layers is given: its input and its states, checked, and the states by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pararnn.cells.base import unwrapped
from pararnn.layers.cuts import States
from pararnn.layers.recurrent import RecurrentLayer
from pararnn.tensors import as_states, check_tensor

if TYPE_CHECKING:
    from pararnn.layers.rnn import ParaRNN

ByLayer = Sequence[tuple[Tensor, ...] | None]
"""The states of each layer and direction, with a batch dimension; None is zero."""


def either(name: str, given: Any, other: str, also: Any) -> Any:
    """An argument that has two names. Raises TypeError where both are given."""
    if given is not None and also is not None:
        raise TypeError(f"{name} and {other} are two names of one argument: give one of them")
    return given if also is None else also


def check_input(stack: ParaRNN, x: Tensor, ranks: tuple[int, ...]) -> None:
    """Raise TypeError for what is no tensor, ValueError for another rank or number of channels."""
    name = type(stack).__name__
    check_tensor(f"the input of {name}", x)
    if x.ndim not in ranks:
        wanted = " or ".join(f"{rank}D" for rank in ranks)
        raise ValueError(f"{name}: Expected input to be {wanted}, got {x.ndim}D instead")
    if x.shape[-1] != stack.input_size:
        raise ValueError(
            f"{name}: input.size(-1) must be equal to input_size. Expected {stack.input_size}, "
            f"got {x.shape[-1]}"
        )


def has_time(field: Any) -> bool:
    """Whether a field is laid out as the input is, and no number."""
    return isinstance(field, PackedSequence) or (isinstance(field, Tensor) and field.ndim > 0)


def initial_states(
    stack: ParaRNN, parts: Sequence[RecurrentLayer], given: States | None, size: tuple[int, ...]
) -> ByLayer:
    """The initial states of all layers, of a size each, by layer.

    Raises TypeError where one is no tensor, ValueError for other sizes.
    """
    if given is None:
        return [None] * len(parts)
    names, full = unwrapped(parts[0].cell).states, (len(parts), *size)
    states = as_states(f"the hidden state of {type(stack).__name__}", given)
    if [state.shape for state in states] != [full] * len(names):
        raise ValueError(
            f"{type(stack).__name__}: Expected hidden states {tuple(names)} of size {full} "
            f"each, got {[tuple(state.shape) for state in states]}"
        )
    if len(size) == 1:
        states = tuple(state.unsqueeze(1) for state in states)
    return list(zip(*[state.unbind() for state in states], strict=True))


def states_at_resets(
    stack: ParaRNN, parts: Sequence[RecurrentLayer], given: States | None
) -> ByLayer:
    """The states that K resets start from, by layer; errors as for initial states."""
    if given is None:
        return [None] * len(parts)
    names, states = unwrapped(parts[0].cell).states, as_states("reset_states", given)
    shapes = [tuple(state.shape) for state in states]
    count = shapes[0][1] if len(shapes[0]) > 1 else 0
    if shapes != [(len(parts), count, stack.hidden_size)] * len(names):
        raise ValueError(
            f"{type(stack).__name__}: reset_states must be {tuple(names)} of size ({len(parts)}, "
            f"K, {stack.hidden_size}) each, K the number of true steps of reset, got {shapes}"
        )
    return list(zip(*[state.unbind() for state in states], strict=True))
