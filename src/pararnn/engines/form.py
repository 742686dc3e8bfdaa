"""The form of a call: all of it but the numbers in its tensors, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pararnn.engines.base import Arguments

ORDINARY = (Tensor, nn.Parameter)
"""The types of tensors that nobody watches over."""
MOST_FORMS = 4096
"""Forms that are remembered at once; what is kept with them goes when they do."""

Value = TypeVar("Value")


class Form:
    """What calls of one form share: sizes, dtypes, strides, devices and flags. It holds no tensor.

    size: (B, T, D). dtype: the compute dtype. plain: whether all tensors are. leaves: whether any
    wants a gradient.
    """

    __slots__ = ("_kept", "dtype", "leaves", "plain", "size")

    def __init__(self, args: Arguments, plain: bool, leaves: bool) -> None:
        self.size, self.dtype, self.plain, self.leaves = args.size, args.dtype, plain, leaves
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[..., Value], *args: Any) -> Value:
        """`make(*args)` for the first call that asks for `key`, and the same for later ones."""
        found: Value | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make(*args)
        return found


FORMS: dict[Hashable, Form] = {}
"""By what they share."""


def form_of(args: Arguments) -> Form:
    """The form of a record, one object for all of that form; one of its own where types or sizes
    may hide more: subclasses of tensors, and what is being traced."""
    tensors, rest = args.flatten()
    described: list[Any] = []
    for t in tensors:
        if t is None:
            described.append(None)
        elif type(t) in ORDINARY:
            put_off = t.is_neg() or t._is_zerotensor()
            described.append((t.shape, t.stride(), t.dtype, t.device, t.requires_grad, put_off))
        else:
            return _new(args, tensors)
    if torch._C._get_tracing_state():
        return _new(args, tensors)
    key = (tuple(described), rest)
    form = FORMS.get(key)
    if form is None:
        if len(FORMS) >= MOST_FORMS:
            FORMS.clear()
        form = FORMS[key] = _new(args, tensors)
    return form


def _new(args: Arguments, tensors: list[Tensor | None]) -> Form:
    leaves = any(t is not None and t.requires_grad for t in tensors)
    return Form(args, all(map(plain, tensors)), leaves)


def plain(tensor: Tensor | None) -> bool:
    """Whether nothing hides behind a tensor: a subclass, or a negation that is put off."""
    return tensor is None or (
        type(tensor) in ORDINARY and not tensor.is_neg() and not tensor._is_zerotensor()
    )
