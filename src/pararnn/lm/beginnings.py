"""Names of texts' beginnings."""

from __future__ import annotations

import hashlib
from array import array
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
