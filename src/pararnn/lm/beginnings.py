"""Names of texts' beginnings, and slots of a memory for those that were used last."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


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


class Slots:
    """Slots of a memory by name; when all are in use, the least recently used one is given again.

    evicted: how many names have lost their slots.
    """

    def __init__(self, count: int) -> None:
        self.count, self.evicted = count, 0
        self._by_name: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    def get(self, name: bytes) -> int | None:
        """Return the slot of a name, which is then the most recently used one; None without one."""
        if name in self._by_name:
            self._by_name.move_to_end(name)
        return self._by_name.get(name)

    def add(self, name: bytes) -> int:
        """Give a slot to a name that has none, and return it."""
        slot = len(self._by_name)
        if slot == self.count:
            _, slot = self._by_name.popitem(last=False)
            self.evicted += 1
        self._by_name[name] = slot
        return slot
