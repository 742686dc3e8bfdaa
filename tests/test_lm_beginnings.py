"""Names of beginnings are equal where the tokens are."""

from hypothesis import given, settings, strategies

from pararnn.lm.beginnings import Names

TOKENS = strategies.lists(strategies.sampled_from([0, 1, 256, 2**40]), max_size=12)


@settings(max_examples=200)
@given(strategies.integers(1, 5), TOKENS, TOKENS, strategies.lists(TOKENS, max_size=4))
def test_names_are_equal_where_the_tokens_are(grain, one, other, parts):
    names, others = Names(grain, one), Names(grain, other)
    for index in range(min(len(names.names), len(others.names))):
        end = (index + 1) * grain
        assert (names.names[index] == others.names[index]) == (one[:end] == other[:end])
    whole = [*one, *(token for part in parts for token in part)]
    grown, before = names.fork(), (names.length, [*names.names], names.last)
    for part in parts:
        grown.extend(part)
    assert (grown.length, grown.names) == (len(whole), Names(grain, whole).names)
    assert len(grown.names) == len(whole) // grain
    assert (grown.last is not None) == (bool(whole) and len(whole) % grain == 0)
    assert (names.length, names.names, names.last) == before
    names.extend(other)
    assert names.names == Names(grain, [*one, *other]).names


def test_grains_have_other_names():
    assert Names(1, [0, 0]).names[1] == Names(2, [0, 0]).names[0]  # digests of all tokens so far
