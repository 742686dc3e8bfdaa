"""Reading of texts after what is remembered of them: by calls, or by recorded pieces on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import Gpu, type_of, upload
from pararnn.layers.marks import after_steps
from pararnn.lm.cache import LayerCache, LMCache, copy_memory
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import Pages, Pool, RowPlaces, rows_cache
from pararnn.lm.replay import Replayed, replayable
from pararnn.lm.states import on_each, pack, read_with_marks

Read = tuple[Tensor, Tensor]
"""The head's inputs (1, T, d), and packed states (n, nbytes), uint8."""


class Piece(NamedTuple):
    """Tokens that one recording reads: their number, whether a text begins with them, and after how
    many of them there is a state to keep."""

    size: int
    is_first: bool
    marks: tuple[int, ...]


def pieces_of(start: int, end: int, most: int, grain: int) -> list[Piece]:
    """Return the pieces of a text's tokens from `start` to `end`, of at most `most` tokens.

    Sizes are powers of two, and a piece begins at a multiple of its size. With a grain that is a
    power of two, pieces of one size have their marks at the same tokens.
    """
    pieces = []
    while start < end:
        size = 1 << (min(end - start, most).bit_length() - 1)
        size = min(size, start & -start) if start else size
        pieces.append(Piece(size, not start, marks_of(start, start + size, grain)))
        start += size
    return pieces


def marks_of(start: int, end: int, grain: int) -> tuple[int, ...]:
    """Return the multiples of a grain among positions from start + 1 to end, counted from start."""
    return tuple(range(grain - start % grain, end - start + 1, grain)) if grain else ()


class Reader:
    """A reader of tokens after those of a text's cache, which packs states on the way.

    A read is one call of the model, whose kernels the host launches one by one. With `most` it is
    made of pieces, where that is faster and safe: on a GPU, for models whose steps are recorded
    too. Each piece (`pieces_of`) is a recorded graph over the memory of one text, which is copied
    there and back. How a text is cut depends on its positions alone, and so do its bits. A piece is
    recorded at its first use, or by `prepare`, which takes about three calls. There are at most two
    pieces of each size, with another one for sizes below the grain. They share the memory that the
    largest one's call takes, and that of its results: as many states as it has multiples of the
    grain.

    Args:
        model: of the texts.
        grain: number of tokens from one state to the next; 0 for none.
        most: tokens of the largest piece; 0 reads by calls. So do fewer than 8 (`replay.WORTH`) and
            grains that are not a power of two.
        pool: the memory of pages that texts' caches have, None without attention.
    """

    def __init__(
        self, model: LanguageModel, grain: int = 0, most: int = 0, pool: Pool | None = None
    ) -> None:
        self.model, self.grain = model, grain
        self.pool = pool if pool is not None and pool.has_pages else None
        is_aligned = not grain & (grain - 1)
        records = is_aligned and replayable(model, most, paged=self.pool is not None)
        self.most = most if records else 0
        self.recordings: dict[Piece, Replayed[Read]] = {}
        self.results = Results(self.most, max(1, self.most // grain) if grain else 0)

    def prepare(self) -> None:
        """Record a piece of every size for first tokens, and one for later ones, the largest first,
        whose memory the others share."""
        for size in [1 << power for power in reversed(range(self.most.bit_length()))]:
            for start in (0, max(size, self.grain)):
                (piece,) = pieces_of(start, start + size, self.most, self.grain)
                self._recording(piece)

    @torch.no_grad()
    def read(self, tokens: Sequence[int], cache: LMCache) -> Read:
        """Read tokens of one text after those of its cache.

        Returns the head's inputs (1, T, d) and, packed, what the model remembers after multiples of
        the grain, with the head's input after it, uint8 (n, nbytes). Raises NoRoom where there are
        no pages for keys, and nothing is read then.
        """
        row = upload([list(tokens)], self.device)
        start, end = cache.length, cache.length + len(tokens)
        if not self.most:
            marks = marks_of(start, end, self.grain)
            return read_packed(self.model, row, cache, self.grain, marks)
        pieces = pieces_of(start, end, self.most, self.grain)
        recordings = [self._recording(piece) for piece in pieces]  # before memory is copied there
        places = self.places
        if places is not None and isinstance(cache.places, Pages):
            cache.places.reserve(end)
            places.set(0, cache.places, start)
        if start:
            copy_memory(cache.layers, self.cache.layers)
        results = []
        for piece, recording in zip(pieces, recordings, strict=True):
            if places is not None:
                places.prepare([piece.size])
                places.advance([piece.size])
            new, row = row[:, : piece.size], row[:, piece.size :]
            results.append([result.clone() for result in recording(new)])
        if places is not None:
            places.set(0, None, 0)
        memory = [on_each(torch.empty_like, layer.read()) for layer in self.cache.layers]
        cache.layers = [
            layer if layer.places is not None else LayerCache(*new)
            for layer, new in zip(cache.layers, memory, strict=True)
        ]
        copy_memory(self.cache.layers, cache.layers)
        cache.length = end
        hidden, states = zip(*results, strict=True)
        return torch.cat(hidden, 1), torch.cat(states)

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    @cached_property
    def cache(self) -> LMCache:
        """The memory of one text, which recordings read and write."""
        return rows_cache(self.model, 1, self.pool, self.most)

    @property
    def places(self) -> RowPlaces | None:
        """The places of keys in pages, which recordings read; None without."""
        return self.cache.places if isinstance(self.cache.places, RowPlaces) else None

    @cached_property
    def memory(self) -> object:
        """The memory that recordings share."""
        gpu = type_of(self.device)
        return gpu.graph_memory() if isinstance(gpu, Gpu) else None

    @torch.no_grad()
    def _recording(self, piece: Piece) -> Replayed[Read]:
        """Return the recording of a piece; make it at its first use."""
        if piece not in self.recordings:
            # Without a reference to the reader, whose end frees all memory.
            read = partial(_read_piece, self.model, self.grain, self.results, piece)
            run = Replayed(read, self.cache, self.memory)
            if self.places is not None:  # keys of no text
                self.places.set(0, None, 0)
                self.places.prepare([0])
            # The first call compiles kernels, the second records. No text gets the first one's
            # results: solvers that look at values compute otherwise in a recording.
            for _ in range(2):
                run(torch.zeros(1, piece.size, dtype=torch.long, device=self.device))
            self.recordings[piece] = run
        return self.recordings[piece]


class Results:
    """Memory of what pieces return, for all of one reader: the next one overwrites it.

    tokens, states: most of each.
    """

    def __init__(self, tokens: int, states: int) -> None:
        self.tokens, self.states = tokens, states
        self.memory: Read | None = None

    def write(self, hidden: Tensor, states: Tensor) -> Read:
        """Return a copy in this memory, which the first call makes."""
        if self.memory is None:
            first = hidden.new_empty(1, self.tokens, hidden.shape[2])
            self.memory = first, states.new_empty(self.states, states.shape[1])
        views = self.memory[0][:, : hidden.shape[1]], self.memory[1][: len(states)]
        return views[0].copy_(hidden), views[1].copy_(states)


def _read_piece(
    model: LanguageModel, grain: int, results: Results, piece: Piece, tokens: Tensor, cache: LMCache
) -> Read:
    """Read a piece (1, T), and write what is remembered after it into the cache's tensors."""
    text = copy.copy(cache)
    text.layers = [_start(layer, piece.is_first) for layer in cache.layers]
    hidden, states = read_packed(model, tokens, text, grain, piece.marks)
    copy_memory(text.layers, cache.layers)
    return results.write(hidden, states)


def read_packed(
    model: LanguageModel, tokens: Tensor, cache: LMCache, grain: int, marks: Sequence[int]
) -> Read:
    """Read tokens (1, T) by one call of the model, or more where marks need them."""
    if not grain:
        hidden = model.hidden(tokens, cache)
        return hidden, torch.empty(0, 0, dtype=torch.uint8, device=hidden.device)
    hidden, layers = read_with_marks(model, tokens, cache, marks)
    return hidden, pack([*layers, (after_steps(hidden, marks, 1)[0], None)])


def _start(layer: LayerCache, is_first: bool) -> LayerCache:
    """Return a layer's cache that continues from another, or for a text's first tokens from none.

    Zeros in place of none might be something else to a mixer.
    """
    if layer.places is not None:
        return layer
    return LayerCache() if is_first else LayerCache(*layer.read())
