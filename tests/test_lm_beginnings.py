"""Names of beginnings are equal where the tokens are; the store is a dictionary with a budget."""

from dataclasses import dataclass

from hypothesis import given, settings, strategies

from pararnn.lm.beginnings import Names, Recent

TOKENS = strategies.lists(strategies.sampled_from([0, 1, 256, 2**40]), max_size=12)


@dataclass
class Value:
    nbytes: int


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


def test_grains_have_other_names():
    assert Names(1, [0, 0]).names[1] == Names(2, [0, 0]).names[0]  # digests of all tokens so far


ACTIONS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["put", "get", "put", "clear"]),
        strategies.integers(0, 7),
        strategies.integers(0, 12),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(strategies.integers(1, 25), ACTIONS)
def test_the_store_is_a_dictionary_in_order_of_use(budget, actions):
    """Next to a plain dictionary, whose first entries are the least recently used."""
    store, model = Recent(budget), {}
    evicted = 0
    for action, number, size in actions:
        name = bytes([number])
        if action == "clear":
            store.clear()
            model.clear()
        elif action == "get":
            found = store.get(name)
            assert found is model.get(name)
            if found is not None:
                model[name] = model.pop(name)
        else:
            value = Value(size)
            model.pop(name, None)
            if size <= budget:
                while sum(each.nbytes for each in model.values()) + size > budget:
                    del model[next(iter(model))]
                    evicted += 1
                model[name] = value
            assert store.put(name, value) == (size <= budget)
        assert list(store._values.items()) == list(model.items())
        assert store.nbytes == sum(each.nbytes for each in model.values()) <= budget
        assert (len(store), store.evicted) == (len(model), evicted)
        assert all(each in store for each in model)
