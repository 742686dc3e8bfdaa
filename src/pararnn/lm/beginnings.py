"""Names of texts' beginnings, and a store of recently used values under a budget of bytes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A value that knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that the value holds."""


Value = TypeVar("Value", bound=Sized)


class Names:
    """Names of the beginnings of one text, at every multiple of `grain` tokens; it grows.

    names: a digest of all tokens up to each multiple, BLAKE2 of 256 bits. So equal names are equal
    tokens, and a name takes 32 bytes at any length. length: number of tokens.
    """

    def __init__(self, grain: int, tokens: Sequence[int] = ()) -> None:
        self.grain, self.length = grain, 0
        self.names: list[bytes] = []
        self._open: list[int] = []
        self._hash = hashlib.blake2b(digest_size=32)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens after the others."""
        self.length += len(tokens)
        pending = [*self._open, *tokens]
        whole = len(pending) - len(pending) % self.grain
        for first in range(0, whole, self.grain):
            self._hash.update(array("q", pending[first : first + self.grain]).tobytes())
            self.names.append(self._hash.digest())
        self._open = pending[whole:]

    def fork(self) -> Names:
        """Return the names of a text that begins with this one, to be extended by itself."""
        other = Names(self.grain)
        other.length, other.names, other._open = self.length, [*self.names], [*self._open]
        other._hash = self._hash.copy()
        return other

    @property
    def last(self) -> bytes | None:
        """The name of all tokens, if their number is a positive multiple of the grain."""
        return None if self._open or not self.names else self.names[-1]


class Recent(Generic[Value]):
    """Values by name, of which the least recently used leave when they exceed a budget.

    budget: largest sum of the values' `nbytes`. nbytes: their sum. evicted: how many have left.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.nbytes, self.evicted = budget, 0, 0
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: bytes) -> bool:
        return name in self._values

    def get(self, name: bytes) -> Value | None:
        """Return the value of a name, which is then the most recently used one."""
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: bytes, value: Value) -> bool:
        """Store a value, in place of one of its name; False if it exceeds the whole budget."""
        if (old := self._values.pop(name, None)) is not None:
            self.nbytes -= old.nbytes
        if value.nbytes > self.budget:
            return False
        while self.nbytes + value.nbytes > self.budget:
            _, least = self._values.popitem(last=False)
            self.nbytes -= least.nbytes
            self.evicted += 1
        self._values[name] = value
        self.nbytes += value.nbytes
        return True

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self.nbytes = 0
