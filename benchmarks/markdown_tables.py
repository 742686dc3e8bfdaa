"""Result files as Markdown tables and sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import RESULTS, read_rows

Row = dict[str, str]
Text = Callable[[Row], str]
Cell = Callable[[list[Row]], str]


def read(name: str) -> list[Row]:
    """Return the rows of a result file."""
    return read_rows(RESULTS / name)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(rows: Sequence[Row], name: str) -> str:
    """Return the device, versions, commits and file of some rows, in brackets."""
    first = rows[0]
    devices, commits = (
        ", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "commit")
    )
    count = first.get("threads", "")
    threads = f", {count} thread{'s' * (count != '1')}" if count else ""
    return (
        f"({devices}{threads}, PyTorch {first['torch']}, commit {commits}; "
        f"`benchmarks/results/{name}`)"
    )


@dataclass(frozen=True)
class Table:
    """Table of a result file: rows whose `lines` are equal share a line, `across` has columns."""

    file: str
    text: str
    """Sentence in front of the source; {column} is filled from the first row."""
    lines: Mapping[str, str | Text]
    """First columns of a line, by title: a column of the file, or a function of a row."""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """Columns for each value of `across`, by title."""
    across: Text = lambda _: ""
    last_cells: Mapping[str, Cell] = field(default_factory=dict)
    """Last columns, by title, each of all rows of a line."""
    where: Callable[[Row], bool] = lambda _: True

    def __call__(self) -> str:
        """Return the text, the source and the table."""
        rows = [row for row in read(self.file) if self.where(row)]
        text = self.text.format(**rows[0])
        return f"{text} {source(rows, self.file)}:\n\n{self.markdown(rows)}"

    def markdown(self, rows: Iterable[Row]) -> str:
        """Return the table of rows."""
        groups: dict[tuple[str, ...], dict[str, list[Row]]] = {}
        columns: dict[str, None] = {}
        for row in rows:
            line = tuple(row[c] if isinstance(c, str) else c(row) for c in self.lines.values())
            column = self.across(row)
            columns[column] = None
            groups.setdefault(line, {}).setdefault(column, []).append(row)
        body = []
        for line, by_column in groups.items():
            own = [
                cell(by_column[column]) if column in by_column else ""
                for column in columns
                for cell in self.cells.values()
            ]
            every = [row for rows in by_column.values() for row in rows]
            body.append([*line, *own, *(cell(every) for cell in self.last_cells.values())])
        titles = [", ".join(filter(None, (c, t))) for c in columns for t in self.cells]
        return table([*self.lines, *titles, *self.last_cells], body)


def digits(value: float | str) -> str:
    """Return a number with three digits, and all before the point; "" of ""."""
    if value == "":
        return ""
    value = float(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number(key: str, form: str = "") -> Text:
    """Return a function of a row that formats a column, by default with three digits."""
    return lambda row: f"{float(row[key]):{form}}" if form and row[key] else digits(row[key])


def single(text: Text) -> Cell:
    """Return a cell of exactly one row."""

    def cell(rows: list[Row]) -> str:
        (row,) = rows
        return text(row)

    return cell


def size(row: Row) -> str:
    """Return a row's B, T, D."""
    return ", ".join(row[letter] for letter in "BTD")


CELLS = ("gru", "lstm")
NAMES = {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2", "transformer": "Transformer"}
WIDTH = 120
"""Characters of a line of prose."""


def prose(*paragraphs: str) -> str:
    """Return paragraphs broken into lines."""
    lines = (
        textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
        for text in paragraphs
    )
    return "\n\n".join(lines)


def hold(claim: bool, what: str) -> None:
    """Raise ValueError where the results do not bear out the words of a sentence."""
    if not claim:
        raise ValueError(f"the results do not say so any more: {what}; write the sentence anew")


def enumeration(words: Iterable[str]) -> str:
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
