"""States of prompts' beginnings, from which later prompts that begin alike continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.lm.beginnings import Names, Slots
from pararnn.lm.cache import LayerCache, LMCache
from pararnn.lm.model import LanguageModel
from pararnn.lm.states import (
    Layout,
    Memory,
    cache_of,
    pack,
    read_with_marks,
    unpack,
    why_keys,
)

GRAIN = 16
"""Number of tokens from one kept state of a prompt to the next."""


class Counts(NamedTuple):
    """How often prompts were looked up and how often a beginning was found; the tokens that were
    not read again for it; states that are kept and their bytes; states that have left."""

    lookups: int
    hits: int
    tokens_saved: int
    states: int
    bytes: int
    evicted: int


class Prefixes:
    """States of prompts' beginnings, a state every `grain` tokens, within a budget of bytes.

    A prompt continues from the longest beginning that is kept, so that at most grain - 1 tokens of
    what it shares with earlier texts are read again. A state needs no other: the least recently
    used ones leave, wherever in a text they are. They have one size, and are the rows of a single
    tensor on the model's device, which is as large as the budget from the start. One thread may use
    it at a time.

    Args:
        model: whose states they are; all its layers are recurrent.
        budget: bytes.
        grain: tokens.

    Raises ValueError for a model with keys of attention, for a grain that is not positive, and for
    a budget that holds no state.
    """

    def __init__(self, model: LanguageModel, budget: int = 1 << 30, grain: int = GRAIN) -> None:
        if grain < 1:
            raise ValueError(f"grain must be positive, got {grain}")
        if reason := why_keys(model):
            raise ValueError(reason)
        self.model, self.grain = model, grain
        self.lookups = self.hits = self.tokens_saved = 0
        probe = model.new_cache()
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            hidden = model.hidden(token, probe)[:, -1]
        self.layout = Layout.of([*(layer.read() for layer in probe.layers), (hidden, None)])
        if budget < self.state_bytes:
            raise ValueError(
                f"a state of this model has {self.state_bytes} bytes, and the budget {budget}: "
                "give more"
            )
        self.slots = Slots(budget // self.state_bytes)
        self.open_slots: set[int] = set()  # of states whose head's input is not known
        size = (self.slots.count, self.state_bytes)
        self.memory = torch.empty(size, dtype=torch.uint8, device=self.device)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.lm_head.weight.device

    @property
    def counts(self) -> Counts:
        """Counts so far."""
        used = self.lookups, self.hits, self.tokens_saved
        return Counts(*used, len(self.slots), self.nbytes, self.slots.evicted)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self.layout.nbytes()

    @property
    def nbytes(self) -> int:
        """Bytes of all states that are kept."""
        return len(self.slots) * self.state_bytes

    def names(self, tokens: Sequence[int]) -> Names:
        """Return the names of a text's beginnings, for the other methods."""
        return Names(self.grain, tokens)

    def find(self, names: Names) -> tuple[LMCache, Tensor | None]:
        """Return a cache of the longest beginning of a text that is kept, as a copy.

        It is empty where there is none. If it holds the whole text, the head's input (1, d) after
        it comes with it, from which the next token's logits follow; else None.
        """
        self.lookups += 1
        for index in range(len(names.names) - 1, -1, -1):
            length = (index + 1) * self.grain
            slot = self.slots.get(names.names[index])
            is_whole = length == names.length
            if slot is None or (is_whole and slot in self.open_slots):
                continue  # in the latter a token must be read, for the logits after it
            self.hits += 1
            self.tokens_saved += length
            *layers, last = unpack(self.memory[slot : slot + 1], self.layout)
            cache = cache_of([LayerCache(*memory) for memory in layers], length)
            return cache, last[0] if is_whole else None
        return self.model.new_cache(), None

    def read(self, tokens: Sequence[int], names: Names, cache: LMCache) -> Tensor:
        """Read tokens of a text after those of its cache, and keep states on the way.

        names: of the whole text, or of a beginning that these tokens are within. Returns the head's
        inputs (1, T, d).
        """
        start = cache.length
        end = start + len(tokens)
        places = range(start // self.grain * self.grain + self.grain, end + 1, self.grain)
        marks = [place - start for place in places]
        row = torch.tensor([list(tokens)], device=self.device)
        hidden, layers = read_with_marks(self.model, row, cache, marks)
        if marks:
            index = torch.tensor(marks, device=self.device) - 1
            found = [names.names[place // self.grain - 1] for place in places]
            self.keep(found, layers, hidden[0].index_select(0, index))
        return hidden

    def read_rows(self, model: LanguageModel, prompts: Tensor) -> tuple[LMCache, Tensor]:
        """Read prompts (B, T) one by one; return their cache, and the head's inputs (B, d) after.

        Raises ValueError for a model that is not the states' own.
        """
        if model is not self.model:
            raise ValueError("these prefixes are states of another model: make some for this one")
        rows = []
        for tokens in prompts.tolist():
            names = self.names(tokens)
            cache, hidden = self.find(names)
            if hidden is None:
                hidden = self.read(tokens[cache.length :], names, cache)[:, -1]
            rows.append(pack([*(layer.read() for layer in cache.layers), (hidden, None)]))
        *layers, last = unpack(torch.cat(rows), self.layout)
        cache = cache_of([LayerCache(*memory) for memory in layers], prompts.shape[1])
        assert last[0] is not None
        return cache, last[0]

    @torch.no_grad()
    def keep(
        self, names: Sequence[bytes], layers: Sequence[Memory], hidden: Tensor | None = None
    ) -> None:
        """Keep what layers remember of texts, (n, ...) each, and the head's inputs (n, d) if known.

        A state that is kept already stays, unless it lacks the head's input.
        """
        first = max(0, len(names) - self.slots.count)  # the last ones are the most recently used
        new: dict[int, int] = {}
        for row, name in enumerate(names[first:], first):
            slot = self.slots.get(name)
            if slot is None or (hidden is not None and slot in self.open_slots):
                new[self.slots.add(name) if slot is None else slot] = row
        if not new:
            return
        slots, rows = (torch.tensor(list(x), device=self.device) for x in (new, new.values()))
        known = next(memory for memory in layers[0] if memory is not None)
        last = known.new_empty(len(known), 0) if hidden is None else hidden
        data = pack([*layers, (last, None)]).index_select(0, rows)
        self.memory[slots, : data.shape[1]] = data
        (self.open_slots.update if hidden is None else self.open_slots.difference_update)(new)
