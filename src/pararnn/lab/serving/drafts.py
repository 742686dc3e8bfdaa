"""Drafts of running texts, looked up in each of them, and their credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pararnn.lm.drafts import CREDIT, changed, hint
from pararnn.lm.lookup import Text


class DraftCounts:
    """Passes over drafts, drafts' tokens, and how many of them were right, since the start."""

    def __init__(self) -> None:
        self.passes = self.drafted = self.accepted = 0


@dataclass(eq=False)
class Drafts:
    """The drafts of one text: where they are looked up, and the credit for passes over them.

    A pass over drafts takes longer than a step for all texts in rows. So it has their number as its
    price, of which each text with a draft pays an equal share (`pararnn.lm.drafts.paying`). A text
    begins with `CREDIT`, and a right token earns 1. Where a pass takes up to twice a step's time,
    all texts together lose at most the time of `CREDIT` tokens for each text, and of a token for
    every eighth guess that came true without a pass (`hint`), whatever is drafted.

    begin: makes the text at the first guess, which a text's first token need not wait for. new:
    tokens that are not in it yet. unverified: the last guess, until a pass verifies it. place: of
    its first token. drafted, accepted: numbers of tokens.
    """

    begin: Callable[[], Text]
    credit: float = CREDIT
    unverified: Sequence[int] = ()
    place: int = 0
    drafted: int = 0
    accepted: int = 0
    new: list[int] = field(default_factory=list)

    @cached_property
    def text(self) -> Text:
        """The text, in which drafts are looked up."""
        return self.begin()

    def extend(self, token: int) -> None:
        """Add the text's next token."""
        self.new.append(token)

    def guess(self, most: int) -> list[int]:
        """Return at most so many tokens that may come next, and earn for the guess before."""
        self.text.extend(self.new)
        self.new.clear()
        tokens = self.text.tokens
        self.credit = changed(self.credit, hint(self.unverified, tokens[self.place :][:1]))
        self.unverified, self.place = self.text.draft()[: max(most, 0)], len(tokens)
        return [*self.unverified]

    def settle(self, share: float, drafted: int, accepted: int) -> None:
        """Pay a share of a pass, and earn what was right."""
        self.credit, self.unverified = changed(self.credit, accepted - share), ()
        self.drafted += drafted
        self.accepted += accepted
