"""Table of step_peers_cuda.csv: recurrences of many kinds, next to peers that run the same step."""

from __future__ import annotations

from common import RESULTS
from markdown_tables import PASSES, Row, Table, digits


def size(row: Row) -> str:
    """Return a row's B, T and dtype."""
    return f"{row['B']}, {int(row['T']):,}; {row['dtype']}"


def way(row: Row) -> str:
    """Return what ran a row, and its version."""
    return f"{row['way']} {row['version']}".strip()


def times(rows: list[Row]) -> str:
    """Return a median, and in brackets the minimum, the ratio to ours and to a copy."""
    (row,) = rows
    if not row["median_ms"]:
        return "-"
    facts = [digits(row["min_ms"])]
    if row["over_ours"] and row["way"] != "pararnn":
        facts.append(f"{digits(row['over_ours'])} x")
    facts += [f"{digits(row['over_copy'])} copies"]
    facts += ["by calls"] if row["launch"] == "call" else []
    return f"{digits(row['median_ms'])} ({', '.join(facts)})"


def remarks(rows: list[Row]) -> str:
    """Return what is said about a way; errors are in the file."""
    known = [note for row in rows for note in row["note"].split("; ") if note]
    lost = any(not row["median_ms"] for row in rows)
    return "; ".join([*dict.fromkeys(known), *["an error, see the file"] * lost])


def distances(rows: list[Row]) -> str:
    """Return how far outputs and gradients of inputs are from ours, relative to ours."""
    values = [row["difference"] for row in rows]
    return " / ".join(values) if all(values) else ""


TABLE = Table(
    "step_peers_cuda.csv",
    "Medians in ms of replays of CUDA graphs, in brackets minima, the ratio to pararnn and that to "
    "a copy of inputs and outputs; {copy_GB_per_s} GB/s copied",
    {"recurrence": "case", "B, T; dtype": size, "by": way},
    {"": times},
    lambda row: PASSES[row["pass"]],
    {"distance to ours": distances, "remarks": remarks},
)


def step_peers() -> str:
    """Return the table, or that there is none before the first run."""
    return TABLE() if (RESULTS / TABLE.file).exists() else "Not measured yet."
