"""Names of beginnings are equal where the tokens are."""

import hashlib

import pytest
from hypothesis import given, settings, strategies

from pararnn.lm import beginnings
from pararnn.lm.beginnings import BLOCK, Names

TOKENS = strategies.lists(strategies.sampled_from([0, 1, 256, 2**40]), max_size=12)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "BLOCK", 2)
        yield


@settings(max_examples=200)
@given(strategies.integers(1, 5), TOKENS, TOKENS, strategies.lists(TOKENS, max_size=4))
def test_names_are_equal_where_the_tokens_are(grain, one, other, parts):
    names, others = Names(grain, one), Names(grain, other)
    for index in range(min(len(names), len(others))):
        end = (index + 1) * grain
        assert (names[index] == others[index]) == (one[:end] == other[:end])
    whole = [*one, *(token for part in parts for token in part)]
    grown, before = names.fork(), (names.length, [*names])
    for part in parts:
        grown.extend(part)
        assert grown[-1:] == Names(grain, whole[: grown.length])[-1:]
    assert (grown.length, [*grown]) == (len(whole), [*Names(grain, whole)])
    assert len(grown) == len(whole) // grain
    assert (names.length, [*names]) == before
    names.extend(other)
    assert [*names] == [*Names(grain, [*one, *other])]


def test_grains_have_other_names():
    assert Names(1, [0, 0])[1] == Names(2, [0, 0])[0]  # digests of all tokens so far
    with pytest.raises(IndexError):
        Names(2, [0, 0, 0])[1]


def test_the_last_names_of_a_long_text_are_computed_alone(monkeypatch):
    """By a few operations for many names."""
    monkeypatch.setattr(beginnings, "BLOCK", BLOCK)
    calls = []

    class Counted:
        def __init__(self, digest=None):
            self.digests = digest or hashlib.blake2b(digest_size=32)

        def copy(self):
            return Counted(self.digests.copy())

        def update(self, tokens):
            calls.append(len(tokens))
            self.digests.update(tokens)

        def digest(self):
            return self.digests.digest()

    text = [i % 251 for i in range(8208)]
    expected = Names(16, text)[:][511]
    monkeypatch.setattr(beginnings, "_hash", Counted)
    names = Names(16, text)
    assert names[511] == expected
    assert len(calls) == 512 // BLOCK - 1 + BLOCK
    assert names[511] == names[-2] == expected
    assert len(calls) == 512 // BLOCK - 1 + BLOCK
    longer = Names(16, [*text, *text[:16]])[513]
    assert len(names[512:]) == 1
    names.extend(text[:16])
    calls.clear()
    assert names[513] == longer
    assert calls == [16 * 8]  # a text that grows adds its new tokens alone
