"""Result files as Markdown tables and sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from common import RESULTS, read_rows

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a result file."""
    return read_rows(RESULTS / name)


def measured(name: str) -> bool:
    """Whether there is a result file."""
    return (RESULTS / name).exists()


def picture(name: str, caption: str) -> str:
    """A result picture in a page of the docs, before its table; nothing where there is none."""
    path = f"{name}.png"
    return f"![{caption}](../benchmarks/results/{path})\n\n" if (RESULTS / path).exists() else ""


def not_yet(command: str) -> str:
    """What stands in place of a table that has no result file."""
    return f"Not measured yet: `{command}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(rows: Sequence[Row], name: str, several: bool = False) -> str:
    """A line that says where figures come from; `several`: rows of more than one commit."""
    first = rows[0]
    if several:
        first = first | {"commit": ", ".join(dict.fromkeys(row["commit"] for row in rows))}
    count = first.get("threads", "")
    threads = f", {count} thread{'s' * (count != '1')}" if count else ""
    return (
        f"({first['device']}{threads}, PyTorch {first['torch']}, commit {first['commit']}; "
        f"`benchmarks/results/{name}`)"
    )


def size(row: Row) -> str:
    """A row's B, T, D."""
    return ", ".join(row[letter] for letter in "BTD")


WIDTH = 120
"""Of lines of prose."""


def prose(*paragraphs: str) -> str:
    """Return paragraphs broken into lines."""
    lines = (
        textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
        for text in paragraphs
    )
    return "\n\n".join(lines)


def hold(claim: bool, what: str) -> None:
    """Raise where the results do not have what a sentence says in words."""
    if not claim:
        raise ValueError(f"the results do not say so any more: {what}; write the sentence anew")


def listed(words: Iterable[str]) -> str:
    """Return words as an enumeration: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def span(values: Iterable[float], form: str = ".2g", unit: str = "") -> str:
    """Return the least and the largest of some figures, or the one that all are: "1 to 2 ms"."""
    every = sorted(values)
    low, high = (f"{value:{form}}" for value in (every[0], every[-1]))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def one(rows: Iterable[Row], **values: Any) -> Row:
    """Return the one row with these values."""
    wanted = {key: str(value) for key, value in values.items()}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


def figure(row: Row, key: str, digits: int = 3) -> str:
    """A figure of a row with some digits; empty where the row has none."""
    return f"{float(row[key]):.{digits}g}" if row[key] else ""
