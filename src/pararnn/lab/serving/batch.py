"""A running batch with a fixed number of rows; texts join and leave it between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base.errors import PararnnError
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import Page, Pages, Pool
from pararnn.lm.replay import WORTH, Steps, next_logits, replayable
from pararnn.lm.states import Memory


class ServingError(PararnnError, ValueError):
    """A model cannot be served, or a server cannot be set up as requested."""


class RowPlaces:
    """Where the keys of a batch's rows are, in tensors that a recorded step reads. Satisfies
    `pararnn.lm.cache.Places`.

    starts: numbers of tokens that the rows have, int64 (rows,). A row without a text has its key in
    the first unit of the memory, which is no text's.
    """

    def __init__(self, pool: Pool, rows: int) -> None:
        device = pool.device
        self.table = torch.zeros(rows, pool.capacity, dtype=torch.int32, device=device)
        self.starts = torch.zeros(rows, dtype=torch.long, device=device)
        self.length, self.grain = 0, pool.grain
        self.lengths = [0] * rows
        self.pages: list[Pages | None] = [None] * rows
        self.changes: list[tuple[int, int, int]] = []

    def positions(self, past: int, steps: int) -> Tensor:
        """Return the positions of the rows' next tokens, int64 (rows, steps)."""
        return self.starts.unsqueeze(1) + torch.arange(steps, device=self.starts.device)

    def set(self, row: int, pages: Pages | None, length: int) -> None:
        """Give a row the pages of a text of a length, or none."""
        units = [0] if pages is None else pages.units
        self.pages[row], self.lengths[row] = pages, length
        self.changes += [(row, index, unit) for index, unit in enumerate(units)]

    def prepare(self) -> None:
        """Take pages for the next tokens of all texts, and write places and lengths."""
        for row, pages in enumerate(self.pages):
            if pages is not None:
                first = len(pages.pages)
                pages.reserve(self.lengths[row] + 1)
                self.changes += [
                    (row, i, pages.pages[i].unit) for i in range(first, len(pages.pages))
                ]
        if self.changes:
            last = {(row, index): unit for row, index, unit in self.changes}
            device = self.table.device
            rows, columns = torch.tensor(list(last), device=device).unbind(1)
            units = torch.tensor(list(last.values()), dtype=torch.int32, device=device)
            self.table[rows, columns] = units
            self.changes.clear()
        self.starts.copy_(torch.tensor(self.lengths))

    def advance(self) -> None:
        """Count the tokens that were read."""
        self.lengths = [
            length + (pages is not None)
            for length, pages in zip(self.lengths, self.pages, strict=True)
        ]


class Batch:
    """Rows of a model, each with the memory of one text: one call computes a token of every row.

    The number of rows never changes, and so neither do the kernels and the order of their sums: a
    row's logits depend only on its tokens, to the bit. Free rows are computed and ignored.
    On a GPU the step is recorded and replayed. Keys of attention are in pages, which the step finds
    by a table that stays where it is.

    Args:
        model: on its device, with mixers whose memory has a fixed size or is in pages.
        rows: how many texts run at once.
        pool: the memory of pages, for models with attention.

    Raises ServingError for a model with another mixer, and for attention without a pool.
    """

    def __init__(self, model: LanguageModel, rows: int, pool: Pool | None = None) -> None:
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
        self.model, self.rows = model, rows
        self.pool = pool if pool is not None and pool.has_pages else None
        self.device = model.lm_head.weight.device
        self.cache, one = model.new_cache(), model.new_cache()
        with torch.no_grad():
            model.hidden(torch.zeros(1, 1, dtype=torch.long, device=self.device), one)
        # Any token, for the sizes of what is remembered.
        self.cache.layers = [
            SteadyCache(*(None if x is None else _zeros(x, rows) for x in layer.read()))
            for layer in one.layers
        ]
        self.places: RowPlaces | None = None
        if self.pool is not None:
            self.places = self.cache.places = RowPlaces(self.pool, rows)
            self.cache.layers = self.pool.with_pages(self.cache.layers, self.places)
        is_recorded = replayable(model, WORTH, paged=self.pool is not None)
        self.steps = Steps(model, self.cache) if is_recorded else None

    def new_cache(self) -> LMCache:
        """Make an empty cache for a text; where keys are in pages they must be released."""
        return self.model.new_cache() if self.pool is None else self.pool.new_cache()

    @torch.no_grad()
    def read(self, tokens: Sequence[int], memory: LMCache) -> Tensor:
        """Read tokens of one text after those of its memory; return the head's inputs (1, T, d)."""
        return self.model.hidden(torch.tensor([list(tokens)], device=self.device), memory)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (n, V) of the tokens after those whose head's inputs are (n, d)."""
        return self.model.lm_head(hidden)

    @torch.no_grad()
    def memories(self, rows: Sequence[int]) -> list[Memory]:
        """Return a copy of what the layers remember of some rows, (n, ...) each."""
        index = torch.tensor(rows, device=self.device)

        def chosen(memory: Tensor | None) -> Tensor | None:
            return None if memory is None else memory.index_select(0, index)

        every = [layer.read() for layer in self.cache.layers]
        return [(chosen(inputs), chosen(states)) for inputs, states in every]

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

    def page(self, row: int) -> Page | None:
        """Return the last page of a row, None where there are none."""
        pages = None if self.places is None else self.places.pages[row]
        return None if pages is None else pages.pages[-1]

    @property
    def growth(self) -> int:
        """Number of pages that the next step takes."""
        if self.places is None:
            return 0
        grain = self.places.grain
        pairs = zip(self.places.pages, self.places.lengths, strict=True)
        return sum(pages is not None and not length % grain for pages, length in pairs)

    def _write(self, row: int, memory: LMCache) -> None:
        """Copy a text's states into a row."""
        for layer, layer_memory in zip(self.cache.layers, memory.layers, strict=True):
            for rows, new in zip(layer.read(), layer_memory.read(), strict=True):
                if rows is not None and new is not None:
                    rows[row] = new[0]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of every row; return logits (rows, V), which the next call overwrites.

        Raises NoRoom where rows need more pages (`growth`) than there is room for.
        """
        column = torch.tensor(tokens, device=self.device)
        if self.places is not None:
            self.places.prepare()
        if self.steps is not None:
            logits = self.steps(column)
        else:
            logits = next_logits(self.model, column.unsqueeze(1), self.cache)
        if self.places is not None:
            self.places.advance()
        return logits

    def is_repeatable(self) -> bool:
        """Return whether equal rows have equal bits here, wherever they are in the batch.

        Products of some numbers of rows sum the last ones in another order. It writes to all rows.
        """
        memory = self.new_cache()
        self.read(range(min(8, self.model.config.vocab_size)), memory)
        if self.places is not None:
            pages_of(memory).reserve(memory.length + 3)
        for row in range(self.rows):
            self._write(row, memory)
            if self.places is not None:  # the rows write equal keys into one text's pages
                self.places.set(row, pages_of(memory), memory.length)
        for _ in range(3):  # on a GPU the first is called, the others are replayed
            logits = self.step([0] * self.rows)
        for row in range(self.rows):
            self.leave(row)
        return bool((logits == logits[:1]).all())


def pages_of(memory: LMCache) -> Pages:
    """Return the pages of a text's cache."""
    assert isinstance(memory.places, Pages)
    return memory.places


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    """Return zeros for all rows of the batch."""
    return tensor.new_zeros(rows, *tensor.shape[1:])
