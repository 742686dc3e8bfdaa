"""Drafts from the text: tokens that followed the last ones earlier.

Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence

from pararnn.lm.drafts import Drafter, Guess, Written
from pararnn.lm.model import LanguageModel

PACE = 512
"""Number of tokens of a long text that are indexed at once."""


class Lookup(Drafter):
    """Drafts of the next tokens, looked up in a row's text: what followed its last tokens before.

    Where the last `longest` tokens stand earlier in the text, or fewer, down to `least`, what
    followed them the last time is the draft. It may run into what it drafts, so that a text that
    repeats itself is continued. Attributes are those of `Drafter`, such as `counts` and `price`.

    Args:
        drafts: tokens that a pass verifies.
        longest, least: tokens of an n-gram.

    Raises ValueError for numbers that are not positive, and longest < least.
    """

    def __init__(self, drafts: int = 7, *, longest: int = 4, least: int = 2) -> None:
        if drafts < 1 or not 1 <= least <= longest:
            raise ValueError(
                "drafts and least must be positive, and longest no smaller than least, got "
                f"drafts={drafts}, longest={longest}, least={least}"
            )
        self.drafts, self.longest, self.least = drafts, longest, least

    def begin(self, model: LanguageModel, prompts: Sequence[Sequence[int]], length: int) -> Guess:
        texts = [self.text(tokens) for tokens in prompts]

        def guess(written: Written) -> list[list[int]]:
            for text, tokens in zip(texts, written.tokens, strict=True):
                text.extend(tokens)
            return [text.draft() for text in texts]

        return guess

    def text(self, tokens: Sequence[int], later: int = 0) -> Text:
        """Return the text of a row that begins with these tokens, see `Text`."""
        return Text(self, tokens, later)


class Text:
    """A text that grows, with an index of where its n-grams stood last.

    later: number of its first tokens that are left to `draft`, each call of which indexes `PACE`
    more of them, the last ones first: for a long text it is some ms of work at once.
    """

    def __init__(self, lookup: Lookup, tokens: Sequence[int], later: int = 0) -> None:
        self.lookup = lookup
        self.sizes = range(lookup.longest, lookup.least - 1, -1)
        self.tokens = [*tokens]
        self.missing = later
        self.ends: MutableMapping[tuple[int, ...], int] = dict(self._ngrams(later, len(tokens)))
        self.before: Text | None = None  # which it goes on from

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. The n-grams that end the text are indexed once a token follows them."""
        first = len(self.tokens)
        self.tokens += tokens
        self.ends.update(self._ngrams(first, len(self.tokens)))

    def fork(self) -> Text:
        """Return a text that goes on from this one, which must not grow any more."""
        other = Text(self.lookup, ())
        other.tokens, other.ends = [*self.tokens], ChainMap({}, self.ends)
        other.before = self
        return other

    def draft(self) -> list[int]:
        """Return `Lookup.drafts` tokens that may come next, or none."""
        self._index(PACE)
        last = (tuple(self.tokens[-n:]) for n in self.sizes if n <= len(self.tokens))
        end = next((self.ends[ngram] for ngram in last if ngram in self.ends), None)
        if end is None:
            return []
        found = self.tokens[end : end + self.lookup.drafts]
        return [found[i % len(found)] for i in range(self.lookup.drafts)]

    def _index(self, count: int) -> None:
        """Index so many tokens before those that are indexed."""
        if self.before is not None:
            self.before._index(count)
        elif self.missing:
            first = max(0, self.missing - count)
            for ngram, end in dict(self._ngrams(first, self.missing)).items():
                self.ends.setdefault(ngram, end)  # what stood later is there
            self.missing = first

    def _ngrams(self, first: int, end: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield n-grams before the tokens from one to another, and the place after each."""
        for n in self.sizes:
            places = range(max(first, n), end)
            starts = range(places.start - n, places.start)
            columns = [self.tokens[start : start + len(places)] for start in starts]
            yield from zip(zip(*columns, strict=True), places, strict=True)
