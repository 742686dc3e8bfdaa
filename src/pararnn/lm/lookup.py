"""Drafts from the text: tokens that followed the last ones earlier.

Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence

from pararnn.lm.drafts import Drafter, Guess, Written
from pararnn.lm.model import LanguageModel


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
        """Return the function that drafts, see `Drafter.begin`."""
        texts = [self.text(tokens) for tokens in prompts]

        def guess(written: Written) -> list[list[int]]:
            for text, tokens in zip(texts, written.tokens, strict=True):
                text.extend(tokens)
            return [text.draft() for text in texts]

        return guess

    def text(self, tokens: Sequence[int]) -> Text:
        """Return the text of a row that begins with these tokens."""
        return Text(self, tokens)


class Text:
    """A text that grows, with an index of where its n-grams stood last."""

    def __init__(self, lookup: Lookup, tokens: Sequence[int]) -> None:
        self.lookup = lookup
        self.sizes = range(lookup.longest, lookup.least - 1, -1)
        self.tokens: list[int] = []
        self.ends: MutableMapping[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. The n-grams that end the text are indexed once a token follows them."""
        for token in tokens:
            for ngram in self._last():
                self.ends[ngram] = len(self.tokens)
            self.tokens.append(token)

    def fork(self) -> Text:
        """Return a text that goes on from this one, which must not grow any more."""
        other = Text(self.lookup, ())
        other.tokens, other.ends = [*self.tokens], ChainMap({}, self.ends)
        return other

    def draft(self) -> list[int]:
        """Return `Lookup.drafts` tokens that may come next, or none."""
        end = next((self.ends[ngram] for ngram in self._last() if ngram in self.ends), None)
        if end is None:
            return []
        found = self.tokens[end : end + self.lookup.drafts]
        return [found[i % len(found)] for i in range(self.lookup.drafts)]

    def _last(self) -> list[tuple[int, ...]]:
        """Return the n-grams that end the text, the longest first."""
        return [tuple(self.tokens[-n:]) for n in self.sizes if n <= len(self.tokens)]
