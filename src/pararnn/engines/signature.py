"""The form of a call: all of it but the numbers in its tensors, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pararnn.cache import on_clear
from pararnn.engines.rule import Size
from pararnn.numerics import compute_dtype

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The types of tensors that nobody watches over."""
REMEMBERED = {*PLAIN_TYPES, type(None)}
"""The types of what stands in a record whose form is remembered."""
MAX_SIGNATURES = 4096
"""Forms that are remembered at once; what is kept with them goes when they do."""

Value = TypeVar("Value")


class Form:
    """What calls of one form share: sizes, dtypes, strides, devices and flags. It holds no tensor.

    size: (B, T, D). dtype: the compute dtype. plain: whether all tensors are. leaves: whether any
    wants a gradient.
    """

    __slots__ = ("_kept", "dtype", "leaves", "plain", "size")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        gates = tensors[0]
        assert gates is not None
        self.size, self.dtype = size_of(gates), compute_dtype(gates.dtype)
        self.plain = all(map(plain, tensors))
        self.leaves = any(t is not None and t.requires_grad for t in tensors)
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[..., Value], *args: Any) -> Value:
        """`make(*args)` for the first call that asks for `key`, and the same for later ones."""
        found: Value | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make(*args)
        return found


SIGNATURES: dict[Hashable, Form] = {}
"""By what they share."""
on_clear(SIGNATURES.clear)


def signature_of(tensors: Sequence[Tensor | None], rest: Hashable) -> Form:
    """The form of a record as `Arguments.flatten` takes it apart, one object for all of that form;
    one of its own where types or sizes may hide more: subclasses of tensors, what is traced."""
    if not REMEMBERED.issuperset(map(type, tensors)) or torch._C._get_tracing_state():
        return Form(tensors)
    described = [
        None
        if t is None
        else (
            t.shape,
            t.stride(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_neg() or t._is_zerotensor(),
        )
        for t in tensors
    ]
    key = (tuple(described), rest)
    form = SIGNATURES.get(key)
    if form is None:
        if len(SIGNATURES) >= MAX_SIGNATURES:
            SIGNATURES.clear()
        form = SIGNATURES[key] = Form(tensors)
    return form


def size_of(gates: Tensor) -> Size:
    """(B, T, D)."""
    batch, steps, _, *channels = gates.shape
    return batch, steps, math.prod(channels)


def plain(tensor: Tensor | None) -> bool:
    """Whether nothing hides behind a tensor: a subclass, or a negation that is put off."""
    return tensor is None or (
        type(tensor) in PLAIN_TYPES and not tensor.is_neg() and not tensor._is_zerotensor()
    )
