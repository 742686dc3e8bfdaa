"""Result files as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import RESULTS, read_rows

Row = dict[str, str]
Text = Callable[[Row], str]
Cell = Callable[[list[Row]], str]
PASSES = {"forward": "forward", "both": "forward + backward"}
"""Titles of what is timed."""


def read(name: str) -> list[Row]:
    return read_rows(RESULTS / name)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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
    order: Callable[[Row], int] = lambda _: 0
    """Key by which rows are sorted, and so the columns of `across`."""

    def __call__(self) -> str:
        """Return the text, the source and the table."""
        rows = sorted(filter(self.where, read(self.file)), key=self.order)
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


def spread(values: Sequence[float]) -> str:
    """Return the mean, and the least and the largest of several."""
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else mean


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


def one(rows: Iterable[Row], **values: Any) -> Row:
    """Return the one row with these values."""
    wanted = {key: str(value) for key, value in values.items()}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row
