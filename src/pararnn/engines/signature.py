"""Signature of a call: all that calls which launch alike share, and a cache of what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from pararnn.base import private
from pararnn.base.cache import ABSENT, on_clear
from pararnn.base.numerics import compute_dtype
from pararnn.engines.rule import Size

PLAIN_TYPES = (Tensor, nn.Parameter)
"""Tensor types without subclass hooks."""
_CACHEABLE = {*PLAIN_TYPES, type(None)}
"""Types of the entries of a record whose signature is cached."""
MAX_SIGNATURES = 4096
"""Signatures that are cached at once; all go when one more comes."""

Value = TypeVar("Value")


class Signature:
    """Sizes, dtypes, strides, devices and options of calls that launch alike. It holds no tensor.

    size: (B, T, D). dtype: the compute dtype. plain: True if all tensors are. requires_grad: True
    if any tensor does.
    """

    __slots__ = ("_values", "dtype", "plain", "requires_grad", "size")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        gates = tensors[0]
        assert gates is not None
        self.size, self.dtype = size_of(gates), compute_dtype(gates.dtype)
        self.plain = all(map(is_plain, tensors))
        self.requires_grad = any(t is not None and t.requires_grad for t in tensors)
        self._values: dict[Hashable, Any] = {}

    def cache(self, key: Hashable, make: Callable[..., Value], *args: Any) -> Value:
        """Return `make(*args)` of the first call with `key`, from the cache for later ones; None
        is cached too."""
        value: Any = self._values.get(key, ABSENT)
        if value is ABSENT:
            value = self._values[key] = make(*args)
        return value


SIGNATURES: dict[Hashable, Signature] = {}
"""Cached signatures, by what their calls share."""
on_clear(SIGNATURES.clear)


def signature_of(tensors: Sequence[Tensor | None], values: Hashable) -> Signature:
    """Return the signature of a record, passed as `Arguments.flatten` returns it.

    Calls that launch alike get one object. Tensors whose types or sizes may hide more (subclasses,
    tensors under a tracer) get one of their own.
    """
    if not is_cacheable(tensors) or private.get_tracing_state():
        return Signature(tensors)
    layouts = [None if t is None else (*layout_of(t), t.requires_grad) for t in tensors]
    key = (tuple(layouts), values)
    signature = SIGNATURES.get(key)
    if signature is None:
        if len(SIGNATURES) >= MAX_SIGNATURES:
            SIGNATURES.clear()
        signature = SIGNATURES[key] = Signature(tensors)
    return signature


def is_cacheable(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if the types of tensors hide nothing that a launch depends on."""
    return _CACHEABLE.issuperset(map(type, tensors))


def layout_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what a launch depends on of a tensor of a cacheable type, except its address."""
    lazy = tensor.is_neg() or private.is_zerotensor(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, lazy


def size_of(gates: Tensor) -> Size:
    """Return (B, T, D)."""
    batch, steps, _, *channels = gates.shape
    return batch, steps, math.prod(channels)


def is_plain(tensor: Tensor | None) -> bool:
    """Return True unless a tensor is of a subclass, or a lazy negation or zero."""
    return tensor is None or (
        type(tensor) in PLAIN_TYPES and not tensor.is_neg() and not private.is_zerotensor(tensor)
    )
