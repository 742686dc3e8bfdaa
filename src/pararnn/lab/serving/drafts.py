"""Drafts of running texts, looked up in each of them, and the rule by which a text drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pararnn.lm.lookup import Text

CREDIT = 8.0
"""Passes over wrong drafts that a text alone in the batch may cause."""


class DraftCounts:
    """Passes over drafts, drafts' tokens, and how many of them were right, since the start."""

    def __init__(self) -> None:
        self.passes = self.drafted = self.accepted = 0


@dataclass(eq=False)
class Drafts:
    """The drafts of one text: where they are looked up, and the credit for passes over them.

    A pass over drafts takes longer than a step for all texts in rows. So it has their number as its
    price, of which each text with a draft pays an equal share (`paying`). A text begins with
    `CREDIT`, and a right token earns 1. Where a pass takes up to twice a step's time, all texts
    together lose at most the time of `CREDIT` tokens for each text, whatever is drafted.

    text: None where the credit is too small for any pass. drafted, accepted: numbers of tokens.
    """

    text: Text | None
    credit: float = CREDIT
    drafted: int = 0
    accepted: int = 0

    def extend(self, token: int) -> None:
        """Add the text's next token."""
        if self.text is not None:
            self.text.extend([token])

    def guess(self, most: int) -> list[int]:
        """Return at most so many tokens that may come next."""
        return [] if self.text is None or most < 1 else self.text.draft()[:most]

    def settle(self, share: float, drafted: int, accepted: int) -> None:
        """Pay a share of a pass, and earn what was right."""
        self.credit += accepted - share
        self.drafted += drafted
        self.accepted += accepted
        if self.credit < 1:  # the least share
            self.text = None


def paying(credits: Mapping[int, float], active: int) -> set[int]:
    """Return the rows that can pay equal shares of a pass of so many texts, as many as can."""
    rows = set(credits)
    while poor := {row for row in rows if credits[row] * len(rows) < active}:
        rows = rows - poor
    return rows
