"""Result files as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common import RESULTS, read_csv

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a result file."""
    return read_csv(RESULTS / name)


def measured(name: str) -> bool:
    """Whether there is a result file."""
    return (RESULTS / name).exists()


def not_yet(command: str) -> str:
    """What stands in place of a table that has no result file."""
    return f"Not measured yet: `{command}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(rows: Sequence[Row], name: str) -> str:
    """A line that says where figures come from."""
    first = rows[0]
    threads = f", {first['threads']} threads" if "threads" in first else ""
    return (
        f"({first['device']}{threads}, PyTorch {first['torch']}, commit {first['commit']}; "
        f"`benchmarks/results/{name}`)"
    )


def size(row: Row) -> str:
    """A row's B, T, D."""
    return ", ".join(row[letter] for letter in "BTD")


def figure(row: Row, key: str, digits: int = 3) -> str:
    """A figure of a row with some digits; empty where the row has none."""
    return f"{float(row[key]):.{digits}g}" if row[key] else ""
