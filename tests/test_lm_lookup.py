"""Drafts that are looked up in the text."""

from __future__ import annotations

import pytest

from pararnn.lm import Lookup
from pararnn.lm.lookup import Text


def test_impossible_sizes_are_refused() -> None:
    for wrong in ({"drafts": 0}, {"least": 0}, {"longest": 1, "least": 2}):
        with pytest.raises(ValueError, match="must be positive"):
            Lookup(**wrong)


def test_drafts_follow_the_longest_match_and_the_last_one() -> None:
    lookup = Lookup(3, longest=3, least=1)
    cases = {
        (1, 2, 3, 9, 2, 3, 8, 1, 2, 3): [9, 2, 3],  # not 8, which followed two of them
        (2, 3, 9, 1, 2, 3, 8, 4, 2, 3): [8, 4, 2],  # the last place of two
        (4, 1, 2, 3): [],
        (4, 7, 7): [7, 7, 7],  # it runs into itself
        (5, 6, 5, 6): [5, 6, 5],
        (3,): [],
    }
    for text, draft in cases.items():
        assert Text(lookup, text).draft() == draft, text
        grown = Text(lookup, ())
        for token in text:
            grown.extend([token])
        assert grown.draft() == draft
    assert Text(Lookup(3), (5, 6, 7, 6, 9, 6)).draft() == []  # one token is too few
