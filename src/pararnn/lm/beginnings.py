"""Names of texts' beginnings."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import overload

BLOCK = 32
"""Names that are computed at once."""


class Names(Sequence[bytes]):
    """Names of the beginnings of one text, at every multiple of `grain` tokens; it grows.

    A name is a digest of all tokens up to a multiple, BLAKE2 of 256 bits. So equal names are equal
    tokens, and a name takes 32 bytes at any length. Names are computed when they are read, `BLOCK`
    at once: of a long beginning that is found whole, the last ones alone.

    length: number of tokens.
    """

    def __init__(self, grain: int, tokens: Sequence[int] = ()) -> None:
        self.grain = grain
        self._tokens = array("q", tokens)
        self._names: dict[int, bytes] = {}
        self._hashes = [_hash()]  # of all tokens before a block
        self._last = 0, _hash()  # the place after the name computed last, and of all before it

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self.length // self.grain

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self._name(place) for place in places]
        return self._name(places)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens after the others."""
        self._tokens.extend(tokens)

    def fork(self) -> Names:
        """Return the names of a text that begins with this one, to be extended by itself."""
        other = Names(self.grain, self._tokens)
        other._names, other._hashes = {**self._names}, [*self._hashes]
        other._last = self._last[0], self._last[1].copy()
        return other

    def _name(self, index: int) -> bytes:
        if index not in self._names:
            block = index // BLOCK
            while len(self._hashes) <= block:
                last = len(self._hashes) - 1
                self._hashes.append(self._hashes[last].copy())
                self._hashes[-1].update(self._bytes(last * BLOCK, (last + 1) * BLOCK))
            first, digest = self._last
            if not block * BLOCK <= first <= index:  # else a text that grows goes on
                first, digest = block * BLOCK, self._hashes[block].copy()
            end = min((block + 1) * BLOCK, len(self))
            for place in range(first, end):
                digest.update(self._bytes(place, place + 1))
                self._names[place] = digest.digest()
            self._last = end, digest
        return self._names[index]

    def _bytes(self, first: int, end: int) -> bytes:
        """Return the tokens from one multiple of the grain to another, as bytes."""
        return self._tokens[first * self.grain : end * self.grain].tobytes()


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)
