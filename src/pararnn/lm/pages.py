"""Keys and values of attention in pages, which texts that begin alike share.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pararnn.base.device import upload, why_no_memory
from pararnn.base.errors import PararnnError
from pararnn.lm.cache import LayerCache, LMCache, Places, PlainCache, SteadyCache
from pararnn.lm.model import LanguageModel
from pararnn.lm.rows_op import paged_attention, put_in_pages
from pararnn.lm.states import Layout, on_each, why_keys


class NoRoom(PararnnError, RuntimeError):
    """The memory of pages is in use by texts that are being read or written."""


@dataclass(eq=False)
class Page:
    """A page of keys and values: its unit of the memory, and the page before it in its texts.

    texts: how many texts read it now. others: how many later pages and kept states need it.
    """

    unit: int
    before: Page | None
    texts: int = 0
    others: int = 0

    def line(self) -> list[Page]:
        """Return the pages from a text's first to this one."""
        pages = [self]
        while pages[-1].before is not None:
            pages.append(pages[-1].before)
        return pages[::-1]


class PagedCache(LayerCache):
    """A layer's cache whose keys and values are in pages, (P, H, N, D) each.

    places: which pages are each row's.
    """

    places: Places

    no_keys = (
        "this cache holds keys in pages, and gives no tensor of all of them: call attend where "
        "cache.places is not None (Mixer.paged)"
    )

    def __init__(self, pages: tuple[Tensor, Tensor], places: Places) -> None:
        super().__init__()
        self.key_pages, self.value_pages = pages
        self.places = places

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, by_rows: bool = True
    ) -> Tensor:
        last, table = positions.expand(len(q), -1), self.places.table
        put_in_pages(k, v, self.key_pages, self.value_pages, table, last)
        return paged_attention(q, self.key_pages, self.value_pages, table, last, by_rows)

    def fork(self, count: int) -> PlainCache:
        """Return a copy for `count` rows, in tensors of their own; see `LMCache.fork`."""
        other, table = PlainCache(), self.places.table.long()
        every = [
            pages[table].transpose(1, 2).flatten(2, 3)[:, :, : self.places.length]
            for pages in (self.key_pages, self.value_pages)
        ]
        other.keys, other.values = (x.expand(count, -1, -1, -1).contiguous() for x in every)
        return other


class Pages:
    """The pages of one text, in order; the last may be filled in part. Satisfies `Places`.

    `release` gives them back, which a text's cache must do in the end.
    """

    def __init__(self, pool: Pool, pages: Sequence[Page] = ()) -> None:
        self.pool, self.length = pool, 0
        self.pages: list[Page] = []
        self._table: Tensor | None = None
        for page in pages:
            self._add(page)

    @property
    def table(self) -> Tensor:
        """The units, int32 (1, n)."""
        if self._table is None:
            self._table = torch.tensor([self.units], dtype=torch.int32, device=self.pool.device)
        return self._table

    @property
    def units(self) -> list[int]:
        """The units."""
        return [page.unit for page in self.pages]

    def positions(self, past: int, steps: int) -> Tensor:
        """Take pages for more tokens, and return their positions, int (1, steps)."""
        self.reserve(past + steps)
        return torch.arange(past, past + steps, device=self.pool.device).unsqueeze(0)

    def reserve(self, length: int) -> None:
        """Take pages for a text of a length. Raises NoRoom."""
        for unit in self.pool.take(max(0, self.pool.pages_of(length) - len(self.pages))):
            before = self.pages[-1] if self.pages else None
            if before is not None:
                before.others += 1
            self._add(Page(unit, before))
        self.length = length

    def fork(self) -> Pages:
        """Return pages for a text that begins with this one; full ones are shared. NoRoom."""
        full = self.length // self.pool.grain
        other = Pages(self.pool, self.pages[:full])
        try:
            other.reserve(self.length)
        except NoRoom:
            other.release()
            raise
        if full < len(other.pages):
            self.pool.memory[other.pages[full].unit] = self.pool.memory[self.pages[full].unit]
        return other

    def release(self) -> None:
        """Give the pages back; those that no text, later page or kept state needs are free."""
        for page in reversed(self.pages):
            page.texts -= 1
            self.pool.in_use -= not page.texts
            self.pool.collect(page)
        self.pages, self._table = [], None

    def _add(self, page: Page) -> None:
        self.pool.in_use += not page.texts
        page.texts += 1
        self.pages.append(page)
        self._table = None


class Spans(NamedTuple):
    """A layer's keys in a page: heads, numbers of a head, dtype; bytes before them in a unit."""

    heads: int
    size: int
    dtype: torch.dtype
    start: int


class Pool:
    """A budget of bytes for pages of keys and for kept states, in units of one size.

    A unit holds a page of all layers, or a part of a state; without layers of attention a unit is a
    state. They are the rows of one tensor on the model's device, which is there from the start.

    Args:
        model: its layers are steady, or take keys in pages (`Mixer.paged`).
        budget: bytes.
        grain: tokens of a page.

    Raises ValueError for other models, for a budget that is too small, and for one that the device
    does not have.
    """

    def __init__(self, model: LanguageModel, budget: int, grain: int) -> None:
        if grain < 1:
            raise ValueError(f"grain must be positive, got {grain}")
        if reason := why_keys(model, pages=True):
            raise ValueError(reason)
        self.device, self.grain = model.lm_head.weight.device, grain
        if reason := why_no_memory(budget, self.device):
            raise ValueError(f"the budget is {reason}: give less")
        probe = model.new_cache()
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            hidden = model.hidden(token, probe)[:, -1]
        self.layout = Layout.of([*(layer.read() for layer in probe.layers), (hidden, None)])
        self.spans: list[Spans | None] = []
        self.page_bytes = 0
        for layer in probe.layers:
            keys = layer.keys if isinstance(layer, PlainCache) else None
            if keys is None:
                self.spans.append(None)
                continue
            self.spans.append(Spans(keys.shape[1], keys.shape[3], keys.dtype, self.page_bytes))
            self.page_bytes += 2 * grain * keys.nbytes
        self.unit_bytes = self.page_bytes or self.state_bytes
        self.state_units = -(-self.state_bytes // self.unit_bytes)
        self.has_pages = self.page_bytes > 0
        self.count = budget // self.unit_bytes
        # Unit 0 is for rows without a text. A text needs a page, and another where it is copied.
        least, what = (3, "three pages") if self.has_pages else (1, "a state")
        if self.count < least:
            raise ValueError(
                f"{what} of this model: {least * self.unit_bytes} bytes, and the budget is "
                f"{budget}: give more"
            )
        self.free = list(range(self.count - 1, 0 if self.has_pages else -1, -1))
        self.capacity, self.in_use = len(self.free), 0
        self.evict: Callable[[], bool] = lambda: False
        shape = self.count, self.unit_bytes
        self.memory = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.memory[:1] = 0
        self.layers = [None if span is None else self._views(span) for span in self.spans]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.layout.nbytes()

    @property
    def room(self) -> int:
        """Units that no text uses: free ones, and those of kept states."""
        return self.capacity - self.in_use

    @property
    def longest(self) -> int | None:
        """Number of tokens of the longest text that fits, None for any: with a page to copy one."""
        return (self.capacity - 1) * self.grain if self.has_pages else None

    def pages_of(self, length: int) -> int:
        """Return the number of pages of a text of a length."""
        return -(-length // self.grain)

    def new_cache(self, pages: Sequence[Page] = (), layers: Sequence[LayerCache] = ()) -> LMCache:
        """Make a cache of a text that has these full pages; `layers` holds its states.

        Its `places` must be released in the end, where there are any.
        """
        cache = LMCache(0)
        states = layers or [LayerCache() for _ in self.layers]
        cache.length = len(pages) * self.grain
        if not self.has_pages:
            cache.layers = list(states)
            return cache
        places = cache.places = Pages(self, pages)
        places.length = cache.length
        cache.layers = self.with_pages(states, places)
        return cache

    def with_pages(self, layers: Sequence[LayerCache], places: Places) -> list[LayerCache]:
        """Return layers' caches with those of attention replaced by pages of rows."""
        return [
            layer if pages is None else PagedCache(pages, places)
            for layer, pages in zip(layers, self.layers, strict=True)
        ]

    def take(self, count: int) -> list[int]:
        """Return the numbers of free units, for which kept states leave. Raises NoRoom."""
        while len(self.free) < count:
            if not self.evict():
                raise NoRoom(
                    f"{count} units of {self.unit_bytes} bytes are needed, and texts use "
                    f"{self.in_use} of the {self.capacity} that the budget has: give more bytes, "
                    "or shorter texts"
                )
        return [self.free.pop() for _ in range(count)]

    def state(self, units: Sequence[int]) -> Tensor:
        """Return a copy of the state in some units, uint8 (1, nbytes)."""
        if len(units) == 1:  # without an upload
            data = self.memory[units[0]].clone()
        else:
            data = self.memory.index_select(0, upload(units, self.device)).view(-1)
        return data[: self.state_bytes].unsqueeze(0)

    def collect(self, page: Page | None) -> None:
        """Free a page that nothing needs any more, and then those before it."""
        while page is not None and not page.texts and not page.others:
            self.free.append(page.unit)
            page = page.before
            if page is not None:
                page.others -= 1

    def _views(self, span: Spans) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in all units, (P, H, N, D)."""
        numbers = self.memory.view(span.dtype)
        shape = span.heads, self.grain, span.size
        size, start = math.prod(shape), span.start // span.dtype.itemsize
        keys, values = (
            numbers[:, first : first + size].unflatten(1, shape) for first in (start, start + size)
        )
        return keys, values


class RowPlaces:
    """Where the keys of a batch's rows are, in tensors that a recorded step reads. Satisfies
    `pararnn.lm.cache.Places`.

    starts: numbers of tokens that the rows have, int64 (rows,). A row without a text, and tokens
    that fill up a pass over drafts, have their keys in the first unit of the memory, which is no
    text's. steps: the most tokens of a pass.
    """

    def __init__(self, pool: Pool, rows: int, steps: int = 1) -> None:
        device, columns = pool.device, pool.capacity + pool.pages_of(steps)
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.starts = torch.zeros(rows, dtype=torch.long, device=device)
        self.length, self.grain = 0, pool.grain
        self.lengths, self.columns = [0] * rows, [0] * rows
        self.pages: list[Pages | None] = [None] * rows
        self.units = np.zeros((rows, columns), np.int32)  # what the table is to hold
        self.changes: dict[int, range] = {}  # columns of rows that it lacks

    def positions(self, past: int, steps: int) -> Tensor:
        """Return the positions of the rows' next tokens, int64 (rows, steps)."""
        return self.starts.unsqueeze(1) + torch.arange(steps, device=self.starts.device)

    def set(self, row: int, pages: Pages | None, length: int) -> None:
        """Give a row the pages of a text of a length, or none."""
        units = [] if pages is None else pages.units
        unused = [0] * (self.columns[row] - len(units))
        self.pages[row], self.lengths[row], self.columns[row] = pages, length, len(units)
        self._change(row, 0, [*units, *unused])

    def growth(self, counts: Sequence[int]) -> int:
        """Return the number of pages that `prepare` takes for so many tokens of each row."""
        every = zip(self.pages, self.lengths, counts, strict=True)
        return sum(
            max(0, pages.pool.pages_of(length + count) - len(pages.pages))
            for pages, length, count in every
            if pages is not None
        )

    def prepare(self, counts: Sequence[int]) -> None:
        """Take pages for the next tokens of all texts, and write places and lengths."""
        for row, pages in enumerate(self.pages):
            if pages is not None:
                first = len(pages.pages)
                pages.reserve(self.lengths[row] + counts[row])
                self._change(row, first, [page.unit for page in pages.pages[first:]])
                self.columns[row] = len(pages.pages)
        if self.changes:
            device, spans = self.table.device, self.changes.items()
            rows = np.concatenate([np.full(len(span), row) for row, span in spans])
            columns = np.concatenate([np.arange(span.start, span.stop) for _, span in spans])
            index = upload(np.stack([rows, columns]), device)
            self.table[index[0], index[1]] = upload(self.units[rows, columns], device)
            self.changes.clear()
        self.starts.copy_(upload(self.lengths, self.starts.device))

    def advance(self, counts: Sequence[int]) -> None:
        """Count the tokens of each row that were read."""
        every = zip(self.lengths, self.pages, counts, strict=True)
        self.lengths = [length + count * (pages is not None) for length, pages, count in every]

    def _change(self, row: int, first: int, units: Sequence[int]) -> None:
        """Note the units of a row from a column on."""
        if units:
            end = first + len(units)
            self.units[row, first:end] = units
            span = self.changes.get(row, range(first, end))
            self.changes[row] = range(min(first, span.start), max(end, span.stop))


class LinePlaces:
    """Where the keys of rows are that all go on from one length, each in pages of its own.
    Satisfies `pararnn.lm.cache.Places`.

    Positions count on by themselves, on the device: a recorded step needs nothing of the host.
    """

    grain = 16

    def __init__(self, rows: int, length: int, more: int, device: torch.device) -> None:
        self.length, self.pages = length, -(-(length + more) // self.grain)
        units = torch.arange(rows * self.pages, dtype=torch.int32, device=device)
        self.table = units.view(rows, self.pages)
        self.next = torch.tensor([length], device=device)

    def positions(self, past: int, steps: int) -> Tensor:
        """Return the positions of the rows' next tokens, int64 (1, steps), and count them.

        Raises NoRoom.
        """
        room = self.pages * self.grain
        if past + steps > room:
            raise NoRoom(
                f"rows of {past} tokens go on by {steps}, and their pages have room for {room} "
                "tokens: make the cache steady for more of them"
            )
        self.length = past + steps
        result = (self.next + torch.arange(steps, device=self.next.device)).unsqueeze(0)
        self.next += steps
        return result

    def paged(self, keys: Tensor) -> Tensor:
        """Return keys or values (B, H, S, D) in pages (P, H, N, D)."""
        rows, heads, length, size = keys.shape
        lines = keys.new_zeros(rows, heads, self.pages * self.grain, size)
        lines[:, :, :length] = keys
        pages = lines.unflatten(2, (self.pages, self.grain)).transpose(1, 2)
        return pages.flatten(0, 1).contiguous()


@torch.no_grad()
def rows_cache(
    model: LanguageModel, rows: int, pool: Pool | None = None, steps: int = 1
) -> LMCache:
    """Return a cache of texts whose memory, zeros at first, stays where recordings read it.

    pool: of pages for keys, whose places are a `RowPlaces`; None without attention. steps: the most
    tokens of a pass.
    """
    device, cache, one = model.lm_head.weight.device, model.new_cache(), model.new_cache()
    # Any token, for the sizes of what is remembered.
    model.hidden(torch.zeros(1, 1, dtype=torch.long, device=device), one)
    cache.layers = [
        SteadyCache(*on_each(lambda x: x.new_zeros(rows, *x.shape[1:]), layer.read()))
        for layer in one.layers
    ]
    if pool is not None:
        places = cache.places = RowPlaces(pool, rows, steps)
        cache.layers = pool.with_pages(cache.layers, places)
    return cache
