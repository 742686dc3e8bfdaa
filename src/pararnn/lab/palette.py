"""Colours of pictures: a model has the same colour in all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

COLOURS = {
    "gru": "tab:blue",
    "lstm": "tab:orange",
    "mamba2": "tab:green",
    "transformer": "tab:red",
    "hybrid": "tab:purple",
    "slstm": "tab:brown",
    "lem": "tab:pink",
    "elman": "tab:grey",
    "lrc": "tab:olive",
    "attention": "tab:cyan",
}
"""By the architecture, with which a model's name begins: "gru-400M", "gru, 2 layers"."""
OTHERS = ("black", "gold", "navy", "darkgreen", "crimson", "teal", "indigo", "saddlebrown")
"""For what is not in the table, in the order in which it comes."""
STYLES = ("-", "--", ":", "-.")
"""For models of one architecture in one picture, in the order in which they come."""


def architecture(name: str) -> str:
    """Return the architecture of a name: all before the first dash, comma or blank."""
    return re.split(r"[-, ]", name, maxsplit=1)[0]


def looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and the line style of each name.

    Names of one architecture share its colour and differ in style; a name without an architecture
    of the table has a colour of its own.
    """
    result: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(names):
        colours = [colour for colour, _ in result.values()]
        colour = COLOURS.get(architecture(name))
        if colour is None:
            others = sum(each in OTHERS for each in colours)
            result[name] = OTHERS[others % len(OTHERS)], STYLES[0]
        else:
            result[name] = colour, STYLES[colours.count(colour) % len(STYLES)]
    return result
