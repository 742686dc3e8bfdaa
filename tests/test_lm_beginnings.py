"""Names of beginnings are equal where the tokens are; slots are a dictionary of the last used."""

from hypothesis import given, settings, strategies

from pararnn.lm.beginnings import Names, Slots

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


ACTIONS = strategies.lists(
    strategies.tuples(strategies.booleans(), strategies.integers(0, 9)), max_size=60
)


@settings(max_examples=300)
@given(strategies.integers(1, 8), ACTIONS)
def test_slots_are_a_dictionary_in_order_of_use(count, actions):
    """Next to a plain dictionary, whose first entries are the least recently used."""
    slots, model = Slots(count), {}
    evicted = 0
    for adds, number in actions:
        name = bytes([number])
        slot = slots.get(name)
        assert slot == model.get(name)
        if name in model:
            model[name] = model.pop(name)
        elif adds:
            slot = slots.add(name)
            if len(model) == count:
                assert slot == model.pop(next(iter(model)))
                evicted += 1
            assert slot not in model.values()
            assert 0 <= slot < count
            model[name] = slot
        assert list(slots._by_name.items()) == list(model.items())
        assert (len(slots), slots.evicted) == (len(model), evicted)
        assert all(each in slots for each in model)
