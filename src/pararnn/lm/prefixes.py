"""States of prompts' beginnings, from which later prompts that begin alike continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import upload
from pararnn.lm.beginnings import Names
from pararnn.lm.cache import LayerCache, LMCache, join_rows
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import Page, Pages, Pool
from pararnn.lm.reading import Reader
from pararnn.lm.states import unpack

GRAIN = 16
"""Number of tokens from one kept state of a prompt to the next, and of a page of keys."""


class Counts(NamedTuple):
    """How often prompts were looked up and how often a beginning was found; the tokens that were
    not read again for it; states that are kept, and bytes of these and of pages; states that have
    left."""

    lookups: int
    hits: int
    tokens_saved: int
    states: int
    bytes: int
    evicted: int


@dataclass(eq=False)
class State:
    """A kept state: its units of the memory, and the last page of its text, if there are pages.

    is_open: whether the head's input after it is not known.
    """

    units: list[int]
    page: Page | None
    is_open: bool


class Prefixes:
    """States of prompts' beginnings, a state every `grain` tokens, within a budget of bytes.

    A prompt continues from the longest beginning that is kept, so that at most grain - 1 tokens of
    what it shares with earlier texts are read again. States have one size, and the least recently
    used ones leave, wherever in a text they are. Keys and values of attention are beside them, in
    pages of `grain` tokens: all texts that begin alike share them, and they leave with the last
    state and the last text that need them. The memory (`pool`) is as large as the budget from the
    start. One thread may use it at a time.

    Args:
        model: whose states they are; layers of attention take their keys in pages (`Mixer.paged`).
        budget: bytes.
        grain: tokens.

    Raises ValueError for another model, for a grain that is not positive, and for a budget that is
    too small, or more than the device has.
    """

    def __init__(self, model: LanguageModel, budget: int = 1 << 30, grain: int = GRAIN) -> None:
        self.model, self.grain = model, grain
        self.lookups = self.hits = self.tokens_saved = self.evicted = 0
        self.pool = Pool(model, budget, grain)
        self.pool.evict = self.evict
        self.reader = Reader(model, grain)
        self.kept: OrderedDict[bytes, State] = OrderedDict()  # the least recently used ones first

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.pool.device

    @property
    def counts(self) -> Counts:
        """Counts so far."""
        used = self.lookups, self.hits, self.tokens_saved
        return Counts(*used, len(self.kept), self.nbytes, self.evicted)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.pool.state_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all states that are kept, and of all pages."""
        return (self.pool.capacity - len(self.pool.free)) * self.pool.unit_bytes

    def names(self, tokens: Sequence[int]) -> Names:
        """Return the names of a text's beginnings, for the other methods."""
        return Names(self.grain, tokens)

    def find(self, names: Names) -> tuple[LMCache, Tensor | None]:
        """Return a cache of the longest beginning of a text that is kept, as a copy.

        It is empty where there is none. If it holds the whole text, the head's input (1, d) after
        it comes with it, from which the next token's logits follow; else None. Keys are in the
        pages of the beginning, which the cache's `places` hold until their `release`.
        """
        self.lookups += 1
        for index in reversed(range(len(names))):
            length = (index + 1) * self.grain
            state = self._used(names[index])
            is_whole = length == names.length
            if state is None or (is_whole and state.is_open):
                continue  # in the latter a token must be read, for the logits after it
            self.hits += 1
            self.tokens_saved += length
            *layers, last = unpack(self.pool.state(state.units), self.pool.layout)
            cache = self.pool.new_cache(
                [] if state.page is None else state.page.line(),
                [LayerCache(*memory) for memory in layers],
            )
            cache.length = length
            return cache, last[0] if is_whole else None
        return self.pool.new_cache(), None

    def read(
        self, tokens: Sequence[int], names: Names, cache: LMCache, reader: Reader | None = None
    ) -> Tensor:
        """Read tokens of a text after those of its cache, and keep states on the way.

        names: of the whole text, or of a beginning that these tokens are within. reader: of states
        of this grain; None reads by calls. Returns the head's inputs (1, T, d). Raises NoRoom where
        the texts that are being read need all pages.
        """
        first = cache.length // self.grain
        hidden, states = (reader or self.reader).read(tokens, cache)
        found = range(first, first + len(states))
        pages = [page_of(cache, index) for index in found]
        self.keep([names[index] for index in found], states, pages)
        return hidden

    def read_rows(self, model: LanguageModel, prompts: Tensor) -> tuple[LMCache, Tensor]:
        """Read prompts (B, T) one by one; return their cache, and the head's inputs (B, d) after.

        The cache is a copy, with keys in tensors of its own. Raises ValueError for a model that is
        not the states' own, NoRoom for a prompt that is longer than all pages.
        """
        if model is not self.model:
            raise ValueError("these prefixes are states of another model: make some for this one")
        last, caches = [], []
        for tokens in prompts.tolist():
            names = self.names(tokens)
            cache, hidden = self.find(names)
            try:
                if hidden is None:
                    hidden = self.read(tokens[cache.length :], names, cache)[:, -1]
                last.append(hidden)
                caches.append(cache.fork(1))
            finally:
                release(cache)
        return join_rows(caches), torch.cat(last)

    def keep(
        self,
        names: Sequence[bytes],
        states: Tensor,
        pages: Sequence[Page | None] | None = None,
        is_open: bool = False,
    ) -> None:
        """Keep what a model remembers of texts, packed with the head's inputs (`states.pack`).

        states: uint8 (n, bytes). pages: the last page of each, where keys are in pages. is_open:
        whether the head's inputs are not known, and left out. A state that is kept already stays,
        unless it lacks the head's input. Where texts use the memory, fewer are kept.
        """
        pool, new = self.pool, dict[int, State]()
        # The last ones are the most recently used.
        for row in range(max(0, len(names) - pool.room // pool.state_units), len(names)):
            name, page = names[row], None if pages is None else pages[row]
            state = self._used(name)
            if state is None:
                state = State(pool.take(pool.state_units), page, is_open=True)
                self.kept[name] = state
                if page is not None:
                    page.others += 1
            elif is_open or not state.is_open:
                continue
            state.is_open = is_open
            new[row] = state
        new = {row: state for row, state in new.items() if self.kept.get(names[row]) is state}
        if not new:
            return
        data = states.index_select(0, upload(list(new), self.device))
        # Whole units first, then what the last one of each state is filled with in part.
        for index in range(pool.state_units):
            some = data[:, index * pool.unit_bytes : (index + 1) * pool.unit_bytes]
            units = upload([state.units[index] for state in new.values()], self.device)
            pool.memory[units, : some.shape[1]] = some

    def evict(self) -> bool:
        """Let the least recently used state leave; return whether there was one."""
        if not self.kept:
            return False
        _, state = self.kept.popitem(last=False)
        self.evicted += 1
        self.pool.free += state.units
        if state.page is not None:
            state.page.others -= 1
            self.pool.collect(state.page)
        return True

    def _used(self, name: bytes) -> State | None:
        """Return the state of a name, which is then the most recently used one; None without."""
        if name in self.kept:
            self.kept.move_to_end(name)
        return self.kept.get(name)


def page_of(cache: LMCache, index: int) -> Page | None:
    """Return a text's page of a number, None where its keys are in none."""
    return cache.places.pages[index] if isinstance(cache.places, Pages) else None


def release(cache: LMCache) -> None:
    """Give back the pages of a text's cache, if it has some."""
    if isinstance(cache.places, Pages):
        cache.places.release()
