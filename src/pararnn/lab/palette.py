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
OTHERS = (
    *("black", "gold", "navy", "darkgreen", "crimson", "teal", "indigo", "saddlebrown"),
    *("magenta", "deepskyblue", "limegreen", "slategrey", "salmon", "darkkhaki"),
)
"""Colours of names that are not in the table, in their order."""
Style = str | tuple[int, tuple[float, ...]]
"""Matplotlib's name of a line style, or an offset and the lengths of dashes and gaps."""
STYLES: tuple[Style, ...] = ("-", "--", ":", "-.", (0, (7, 1, 1, 1, 1, 1)), (0, (9, 4)))
"""For models of one colour in one picture, in the order in which they come."""


def architecture(name: str) -> str:
    """Return the architecture of a name: all before the first dash, comma or blank."""
    return re.split(r"[-, ]", name, maxsplit=1)[0]


def looks(names: Iterable[str]) -> dict[str, tuple[str, Style]]:
    """Return the colour and the line style of each name.

    Names of one architecture share its colour and differ in style; a name without an architecture
    of the table has a colour of its own. In a picture of several panels, `names` are those of all
    panels.
    """
    result: dict[str, tuple[str, Style]] = {}
    for name in dict.fromkeys(names):
        colours = [colour for colour, _ in result.values()]
        unknown = sum(colour in OTHERS for colour in colours)
        colour = COLOURS.get(architecture(name), OTHERS[unknown % len(OTHERS)])
        result[name] = colour, STYLES[colours.count(colour) % len(STYLES)]
    return result
