"""What users hand in as tensors: checks that name it, and integers and flags in other forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Given = Tensor | Sequence[Any]
"""Integers or flags: a tensor, a list, or a NumPy array."""


def check_tensor(name: str, given: Any) -> None:
    """Raise TypeError for what is no tensor, and for a nested one, with what to do."""
    if not isinstance(given, Tensor):
        cure = "" if given is None else ": torch.as_tensor makes one of arrays, lists and numbers"
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}{cure}")
    if given.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, which is not supported: give a PackedSequence, a padded "
            "batch with lengths, or one row with cu_seqlens"
        )


def as_states(name: str, given: Any) -> tuple[Tensor, ...]:
    """States as a tuple. Raises TypeError where one is no tensor."""
    states = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if any(state is None for state in states):
        raise TypeError(
            f"{name} must be a tensor for each state, got None among them: to start from zero "
            "give None in place of all"
        )
    for state in states:
        check_tensor(name, state)
    return states


def as_tensor(name: str, given: Given) -> Tensor:
    """Integers or flags as a tensor, on the CPU where they were none.

    Raises TypeError for what no tensor can be made of.
    """
    if isinstance(given, Tensor):
        check_tensor(name, given)
        return given
    try:
        return torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, a list or an array, got {type(given).__name__}: {error}"
        ) from error


def as_integers(name: str, given: Given, count: int | None) -> Tensor:
    """int32 or int64 of one dimension, `count` of them, or S + 1 for None.

    Raises TypeError as `as_tensor`, ValueError for others.
    """
    made = as_tensor(name, given)
    if not isinstance(given, Tensor) and not made.numel():
        made = made.to(torch.int64)  # an empty list is of no dtype
    fits = made.ndim == 1 and (count is None or made.shape[0] == count)
    if made.dtype not in (torch.int32, torch.int64) or not fits:
        wanted = "S + 1" if count is None else count  # not before: a message would fix the size
        raise ValueError(
            f"{name} must be int32 or int64 ({wanted},), got {made.dtype} {tuple(made.shape)}"
        )
    return made
