"""A running batch with a fixed number of rows; texts join and leave it between tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pararnn.base.device import upload, why_no_memory
from pararnn.base.errors import PararnnError
from pararnn.lm.cache import LayerCache, LMCache, copy_memory
from pararnn.lm.drafts import check_drafts, keeper_of, passes_of, token_rows
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import Page, Pages, Pool, RowPlaces, rows_cache
from pararnn.lm.replay import WORTH, Replayed, Steps
from pararnn.lm.states import Layout, Memory, on_each, pack


class ServingError(PararnnError, ValueError):
    """A model cannot be served, or a server cannot be set up as requested."""


PACKED = 8
"""Rows whose memory one recording packs: about as many texts as reach a state to keep at once."""


class Batch:
    """Rows of a model, each with the memory of one text: one call computes a token of every row.

    The number of rows never changes, and so neither do the kernels and the order of their sums: a
    row's logits depend only on its tokens, to the bit. Free rows are computed and ignored.
    On a GPU the step is recorded and replayed. Keys of attention are in pages, which the step finds
    by a table that stays where it is.

    With drafts there is another call, `verify`, which reads several tokens of every row, and after
    it `keep`. verifies_exactly: whether it has the bits of steps here, which is tried: products of
    other numbers of rows may sum in another order.

    Args:
        model: on its device, with mixers whose memory has a fixed size or is in pages.
        rows: how many texts run at once.
        pool: the memory of pages, for models with attention.
        drafts: the most tokens of a draft; 0 for steps only.

    Raises ServingError for a model with another mixer, for attention without a pool, and for drafts
    of a model that cannot go back, and for more rows than the device has memory for.
    """

    def __init__(
        self, model: LanguageModel, rows: int, pool: Pool | None = None, drafts: int = 0
    ) -> None:
        for layer, block in enumerate(model.backbone.blocks):
            if not (block.mixer.steady or block.mixer.paged):
                raise ServingError(
                    f"layer {layer} of the model ({type(block.mixer).__name__}) has a memory that "
                    "grows with the text, or a step that branches on values: recurrent layers and "
                    "attention in pages (Mixer.paged) are served. Serve others by transformers "
                    "serve"
                )
            if block.mixer.paged and pool is None:
                raise ServingError(
                    f"layer {layer} of the model ({type(block.mixer).__name__}) has keys, whose "
                    "pages need memory: set --prefix-mib, or give the pool of Prefixes"
                )
        if drafts:
            try:
                check_drafts(model, paged=True)
            except ValueError as error:
                raise ServingError(f"--drafts {drafts}: {error}") from error
        self.model, self.rows, self.drafts = model, rows, drafts
        self.pool = pool if pool is not None and pool.has_pages else None
        self.device = model.lm_head.weight.device
        if reason := why_no_memory(rows * _row_bytes(model, self.pool, drafts), self.device):
            raise ServingError(f"--rows {rows}, --drafts {drafts}: at least {reason}: ask for less")
        self.cache = rows_cache(model, rows, self.pool, 1 + drafts)
        self.places = self.cache.places if isinstance(self.cache.places, RowPlaces) else None
        self.steps, self.passes = passes_of(model, self.cache, WORTH)
        self.keep_counts = keeper_of(self.passes, self.cache, self.device)
        self.views = [row_views(self.cache, row) for row in range(rows)]
        is_recorded = isinstance(self.steps, Steps)
        self.packing = Replayed(_packed_rows, self.cache) if is_recorded else None
        self.marked: list[Memory] | None = None  # after each token of a pass, until `keep`
        self.verifies_exactly = bool(drafts) and self._verifies_exactly()

    def new_cache(self) -> LMCache:
        """Make an empty cache for a text; where keys are in pages they must be released."""
        return self.model.new_cache() if self.pool is None else self.pool.new_cache()

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (n, V) of the tokens after those whose head's inputs are (n, d)."""
        return self.model.lm_head(hidden)

    @torch.no_grad()
    def memories(self, rows: Sequence[int], counts: Sequence[int] = ()) -> list[Memory]:
        """Return a copy of what the layers remember of some rows, (n, ...) each.

        counts: of each, the tokens of the pass (`verify`) after which it is.
        """
        index: Any = (upload(rows, self.device),)
        if self.marked is not None:
            index += (upload(counts, self.device) - 1,)
        every = self.marked or [layer.read() for layer in self.cache.layers]
        return [on_each(lambda x: x[index], memory) for memory in every]

    @torch.no_grad()
    def packed(self, rows: Sequence[int], counts: Sequence[int] = ()) -> Tensor:
        """Return `memories` of some rows, packed, uint8 (n, nbytes)."""
        if self.packing is None or self.marked is not None:
            return pack([*self.memories(rows, counts), _nothing(len(rows), self.device)])
        states = []
        for first in range(0, len(rows), PACKED):
            some = [*rows[first : first + PACKED]]
            index = upload([*some, *[0] * (PACKED - len(some))], self.device)
            states.append(self.packing(index)[: len(some)].clone())
        return torch.cat(states)

    @torch.no_grad()
    def join(self, row: int, memory: LMCache) -> None:
        """Give a row the memory of a text, whose full pages it shares. Raises NoRoom."""
        if self.places is not None:
            self.leave(row)
            self.places.set(row, pages_of(memory).fork(), memory.length)
        self._write(row, memory)

    def leave(self, row: int) -> None:
        """Give back the pages of a row, whose text has ended."""
        if self.places is not None:
            pages = self.places.pages[row]
            if pages is not None:
                pages.release()
            self.places.set(row, None, 0)

    def page(self, row: int, index: int) -> Page | None:
        """Return a page of a row, None where there are none."""
        pages = None if self.places is None else self.places.pages[row]
        return None if pages is None else pages.pages[index]

    def has_room(self, drafts: Sequence[Sequence[int]] = ()) -> bool:
        """Return whether there are pages for a step, or for a pass over drafts."""
        if self.pool is None or self.places is None:
            return True
        return self.places.growth(_counts(drafts) or [1] * self.rows) <= self.pool.room

    def _write(self, row: int, memory: LMCache) -> None:
        """Copy a text's states into a row."""
        copy_memory(memory.layers, self.views[row])

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of every row; return logits (rows, V), which the next call overwrites.

        Raises NoRoom where there is none (`has_room`).
        """
        column, counts = upload(tokens, self.device), [1] * self.rows
        self.marked = None
        if self.places is not None:
            self.places.prepare(counts)
        logits = self.steps(column)
        if self.places is not None:
            self.places.advance(counts)
        return logits

    @torch.no_grad()
    def verify(self, tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Read one token of every row and its draft; return logits (rows, 1 + self.drafts, V),
        those after drafts of no meaning.

        The next call overwrites them. It must be `keep`, before which `memories` may be called.
        Raises NoRoom where there is none (`has_room`).
        """
        if self.places is not None:
            self.places.prepare(_counts(drafts))
        logits, memories = self.passes(token_rows(tokens, drafts, self.drafts, self.device))
        self.marked = memories[:-1]  # the last are the head's inputs
        return logits.view(self.rows, 1 + self.drafts, -1)

    @torch.no_grad()
    def keep(self, counts: Sequence[int]) -> None:
        """Let each row remember so many of the tokens that `verify` has read."""
        assert self.marked is not None
        self.keep_counts(self.marked, counts)
        self.marked = None
        if self.places is not None:
            self.places.advance(counts)

    def is_repeatable(self) -> bool:
        """Return whether equal rows have equal bits here, wherever they are in the batch.

        Products of some numbers of rows sum the last ones in another order. It writes to all rows.
        """
        # On a GPU the first is called, the others are replayed.
        with self._equal_rows(3) as tokens:
            logits = [self.step(tokens) for _ in range(3)][-1]
        return bool((logits == logits[:1]).all())

    def _verifies_exactly(self) -> bool:
        """Return whether a pass over drafts has the bits of steps: logits, and what rows remember.

        It writes to all rows.
        """
        width = 1 + self.drafts
        with self._equal_rows(width) as tokens:
            steps = torch.stack([self.step(tokens).clone() for _ in range(width)], 1)
            after_steps = _tensors(self.memories(range(self.rows)))
        with self._equal_rows(width) as tokens:
            for _ in range(3):
                logits = self.verify(tokens, [[token] * self.drafts for token in tokens])
            is_same = torch.equal(logits, steps)
            self.keep([width] * self.rows)
            after_pass = _tensors(self.memories(range(self.rows)))
        return is_same and all(map(torch.equal, after_steps, after_pass))

    @contextmanager
    def _equal_rows(self, count: int) -> Iterator[list[int]]:
        """Give all rows one text, which so many tokens may be added to; yield its next tokens."""
        memory, size = self.new_cache(), self.model.config.vocab_size
        with torch.no_grad():
            self.model.hidden(torch.arange(min(8, size), device=self.device)[None], memory)
        if self.places is not None:
            pages_of(memory).reserve(memory.length + count)
        for row in range(self.rows):
            self._write(row, memory)
            if self.places is not None:  # the rows write equal keys into one text's pages
                self.places.set(row, pages_of(memory), memory.length)
        yield [0] * self.rows
        for row in range(self.rows):
            self.leave(row)


def pages_of(memory: LMCache) -> Pages:
    """Return the pages of a text's cache."""
    assert isinstance(memory.places, Pages)
    return memory.places


def row_views(cache: LMCache, row: int) -> list[LayerCache]:
    """Return caches of a row, whose tensors (1, ...) are views of those of all rows."""
    return [
        LayerCache(*on_each(lambda x: x[row : row + 1], layer.read())) for layer in cache.layers
    ]


def _packed_rows(rows: Tensor, cache: LMCache) -> Tensor:
    """Return the memory of some rows, int (n,), packed."""
    layers = [on_each(lambda x: x.index_select(0, rows), layer.read()) for layer in cache.layers]
    return pack([*layers, _nothing(len(rows), rows.device)])


def _row_bytes(model: LanguageModel, pool: Pool | None, drafts: int) -> int:
    """Return the bytes that a row needs at least: what it remembers after each token of a pass, its
    logits, and numbers of pages."""
    width, weight = 1 + drafts, model.lm_head.weight
    memory = Layout.of([layer.read() for layer in rows_cache(model, 1).layers]).nbytes()
    pages = 0 if pool is None else pool.capacity + pool.pages_of(width)
    return width * (memory + model.config.vocab_size * weight.itemsize) + 4 * pages


def _nothing(rows: int, device: torch.device) -> Memory:
    """Return a memory without bytes, which models have whose keys are all in pages."""
    return torch.empty(rows, 0, device=device), None


def _counts(drafts: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of tokens of a pass that each row has pages for."""
    return [1 + len(draft) for draft in drafts]


def _tensors(memories: Sequence[Memory]) -> list[Tensor]:
    return [tensor for memory in memories for tensor in memory if tensor is not None]
