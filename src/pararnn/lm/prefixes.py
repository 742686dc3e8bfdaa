"""States of prompts' beginnings, from which later prompts that begin alike continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.lm.beginnings import Names, Recent
from pararnn.lm.cache import LMCache
from pararnn.lm.model import LanguageModel
from pararnn.lm.states import Layout, Memory, pack, read_with_marks, unpack, why_keys

GRAIN = 16
"""Number of tokens from one kept state of a prompt to the next."""


class Kept(NamedTuple):
    """What is remembered of a text, uint8 (1, N), and the head's input (1, d) after it, if known.

    Neither shares memory with anything else.
    """

    data: Tensor
    hidden: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.data.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


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
    used ones leave, wherever in a text they are. One thread may use it at a time.

    Args:
        model: whose states they are; all its layers are recurrent.
        budget: bytes, on the model's device.
        grain: tokens.

    Raises ValueError for a model with keys of attention, and for a budget or grain that is not
    positive.
    """

    def __init__(self, model: LanguageModel, budget: int = 1 << 30, grain: int = GRAIN) -> None:
        if budget < 1 or grain < 1:
            raise ValueError(f"budget and grain must be positive, got {budget} and {grain}")
        if reason := why_keys(model):
            raise ValueError(reason)
        self.model, self.grain = model, grain
        self.kept: Recent[Kept] = Recent(budget)
        self.lookups = self.hits = self.tokens_saved = 0
        probe = model.new_cache()
        with torch.no_grad():
            model.hidden(torch.zeros(1, 1, dtype=torch.long, device=self.device), probe)
        self.layout = Layout.of([layer.read() for layer in probe.layers])

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.lm_head.weight.device

    @property
    def counts(self) -> Counts:
        """Counts so far."""
        kept = self.kept
        used = self.lookups, self.hits, self.tokens_saved
        return Counts(*used, len(kept), kept.nbytes, kept.evicted)

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
            name, length = names.names[index], (index + 1) * self.grain
            if name not in self.kept:
                continue
            kept = self.kept.get(name)
            assert kept is not None
            if length == names.length and kept.hidden is None:
                continue  # one token must be read for its logits
            self.hits += 1
            self.tokens_saved += length
            hidden = kept.hidden if length == names.length else None
            return unpack(kept.data, self.layout, length), hidden
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
            after = [hidden[:, mark - 1] for mark in marks]
            found = [names.names[place // self.grain - 1] for place in places]
            self.keep(found, layers, after)
        return hidden

    def read_rows(self, model: LanguageModel, prompts: Tensor) -> tuple[LMCache, Tensor]:
        """Read prompts (B, T) one by one; return their cache, and the head's inputs (B, d) after.

        Raises ValueError for a model that is not the states' own.
        """
        if model is not self.model:
            raise ValueError("these prefixes are states of another model: make some for this one")
        rows, after = [], []
        for tokens in prompts.tolist():
            names = self.names(tokens)
            cache, hidden = self.find(names)
            if hidden is None:
                hidden = self.read(tokens[cache.length :], names, cache)[:, -1]
            rows.append(pack([layer.read() for layer in cache.layers]))
            after.append(hidden)
        return unpack(torch.cat(rows), self.layout, prompts.shape[1]), torch.cat(after)

    def keep(
        self, names: Sequence[bytes], layers: Sequence[Memory], after: Sequence[Tensor | None]
    ) -> None:
        """Keep what layers remember of texts, (n, ...) each, and the head's inputs (1, d)."""
        rows = pack(layers).split(1)
        for name, row, hidden in zip(names, rows, after, strict=True):
            old = self.kept.get(name)
            if old is None or (old.hidden is None and hidden is not None):
                self.kept.put(name, Kept(row.clone(), None if hidden is None else hidden.clone()))
