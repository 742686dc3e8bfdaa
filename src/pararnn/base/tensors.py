"""Checks of users' tensors, and conversion of lists and arrays to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ArrayLike = Tensor | Sequence[Any]
"""Integers or flags: a tensor, a list, or a NumPy array."""

States = Tensor | tuple[Tensor, ...]
"""States of a cell: a tensor, or a tuple of N for N states."""


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError for what is no tensor, and for a nested one, with what to do."""
    if not isinstance(value, Tensor):
        cure = "" if value is None else ": torch.as_tensor makes one of arrays, lists and numbers"
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}{cure}")
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, which is not supported: give a PackedSequence, a padded "
            "batch with lengths, or one row with cu_seqlens"
        )


def as_states(name: str, value: Any) -> tuple[Tensor, ...]:
    """Return states as a tuple. Raises TypeError where one is no tensor."""
    states = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(state is None for state in states):
        raise TypeError(
            f"{name} must be a tensor for each state, got None among them: to start from zero "
            "give None in place of all"
        )
    for state in states:
        check_tensor(name, state)
    return states


def as_tensor(name: str, value: ArrayLike) -> Tensor:
    """Convert integers or flags to a tensor, on the CPU if they are none yet.

    Raises TypeError for what no tensor can be made of.
    """
    if isinstance(value, Tensor):
        check_tensor(name, value)
        return value
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, a list or an array, got {type(value).__name__}: {error}"
        ) from error


def as_integers(name: str, value: ArrayLike, count: int | None) -> Tensor:
    """Convert to int32 or int64 of one dimension, `count` numbers, or S + 1 for None.

    Raises TypeError as `as_tensor`, ValueError for other dtypes and sizes.
    """
    numbers = as_tensor(name, value)
    if not isinstance(value, Tensor) and not numbers.numel():
        numbers = numbers.to(torch.int64)  # an empty list is of no dtype
    fits = numbers.ndim == 1 and (count is None or numbers.shape[0] == count)
    if numbers.dtype not in (torch.int32, torch.int64) or not fits:
        wanted = "S + 1" if count is None else count  # not before: a message would fix the size
        raise ValueError(
            f"{name} must be int32 or int64 ({wanted},), got {numbers.dtype} {tuple(numbers.shape)}"
        )
    return numbers
