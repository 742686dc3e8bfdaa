"""Colours of models in pictures."""

from pararnn.lab.palette import COLOURS, OTHERS, looks


def test_a_model_has_its_colour_by_any_name_of_it():
    names = ["gru", "gru-400M", "gru, 2 layers", "lstm-7b", "mine:Cell", "gru", "other"]
    results = looks(names)
    assert list(results) == list(dict.fromkeys(names))
    assert {results[name][0] for name in names[:3]} == {COLOURS["gru"]}
    assert [results[name][1] for name in names[:3]] == ["-", "--", ":"]
    assert results["lstm-7b"] == (COLOURS["lstm"], "-")
    assert [results[name] for name in ("mine:Cell", "other")] == [
        (OTHERS[0], "-"),
        (OTHERS[1], "-"),
    ]
    assert looks(reversed(names))["gru-400M"][0] == COLOURS["gru"]


def test_no_two_models_of_a_picture_look_alike():
    names = [*(f"mamba2-{n}" for n in range(6)), *(f"mine{n}" for n in range(2 * len(OTHERS)))]
    assert len(set(looks(names).values())) == len(names)


def test_colours_are_told_apart():
    every = [*COLOURS.values(), *OTHERS]
    assert len(set(every)) == len(every)
