"""Sweeps: several values of a key, as texts key=a,b, and all combinations of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

FLAG = "--sweep"
SEPARATORS = ("|", ",")
"""Separators of values. The first that a text has counts, so that values may hold commas."""


def combinations(sweep: Iterable[str], overrides: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Return a tuple of texts "key=value" for each combination of a sweep's values.

    sweep: texts "key=a,b,c", or "key=a,b|c" of values with commas in them. overrides: texts
    "key=value" for all runs. The last key changes first. Raises ValueError for a text that is none,
    and for a key that stands twice.
    """
    others = {text.partition("=")[0].strip() for text in overrides}
    choices: dict[str, list[str]] = {}
    for text in sweep:
        key, equals, values = (part.strip() for part in text.partition("="))
        separator = next((each for each in SEPARATORS if each in values), ",")
        parts = [part.strip() for part in values.split(separator)]
        if not equals or not key or not all(parts):
            raise ValueError(f"{text!r} is no key=value,value to sweep over, such as seed=0,1,2")
        if key in choices or key in others:
            raise ValueError(f"{key} has values twice: name it once, after {FLAG} or before")
        choices[key] = [f"{key}={part}" for part in parts]
    return list(itertools.product(*choices.values()))


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command's arguments into others, and `FLAG` with the texts key=... behind it."""
    others: list[str] = []
    sweep: list[str] = []
    in_sweep = False
    for text in arguments:
        begins = text == FLAG or text.startswith(f"{FLAG}=")
        in_sweep = begins or (in_sweep and "=" in text and not text.startswith("-"))
        if not in_sweep:
            others.append(text)
        elif text != FLAG:
            sweep.append(text.removeprefix(f"{FLAG}="))
    return others, [FLAG, *sweep] if sweep or FLAG in arguments else []


def name_of(values: Mapping[str, str]) -> str:
    """Return a name for files, of keys and their values: learning_rate-0.001-seed-0.

    Keys lose the records that they are in, unless two would be the same.
    """
    last = [key.rpartition(".")[2] for key in values]
    parts = [
        f"{key if last.count(short) > 1 else short}-{value}"
        for (key, value), short in zip(values.items(), last, strict=True)
    ]
    return re.sub(r"[^\w.+-]+", "-", "-".join(parts)).strip("-")
