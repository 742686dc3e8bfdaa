"""Drafts that are looked up in the text."""

from __future__ import annotations

import random

import pytest

from pararnn.lm import Lookup, lookup
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


def test_a_long_text_is_indexed_from_its_end_to_its_beginning(monkeypatch) -> None:
    """By its drafts, also those of texts that go on from it, which then are those of the index."""
    monkeypatch.setattr(lookup, "PACE", 100)
    draw = random.Random(0)
    for length, later in ((0, 0), (1, 1), (3, 3), (99, 9), (100, 100), (101, 101), (1000, 990)):
        drafter = Lookup(3, longest=draw.randrange(1, 5), least=1)
        tokens = [draw.randrange(3) for _ in range(length)]
        late, whole = drafter.text(tokens, later), drafter.text(tokens)
        assert late.ends == {ngram: end for ngram, end in whole.ends.items() if end >= later}
        forks = [late.fork(), late.fork()]
        for place in range(max(0, later - 100), -1, -100):
            forks[place % 200 > 0].draft()
            expected = {ngram: end for ngram, end in whole.ends.items() if end >= place}
            assert late.ends == expected
        for fork in forks:
            fork.draft()
            assert late.ends == whole.ends
            other = whole.fork()
            for _ in range(9):
                new = [draw.randrange(3) for _ in range(draw.randrange(4))]
                fork.extend(new)
                other.extend(new)
                assert fork.draft() == other.draft()
                assert {**fork.ends} == {**other.ends}
