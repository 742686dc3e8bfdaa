"""Table of mixing.csv: times of recurrences that mix channels inside heads, next to others'."""

from __future__ import annotations

from markdown_tables import Row, Table, digits

TITLES = {"kernels": "pararnn", "layer": "pararnn, layer", "cudnn": "cuDNN", "loop": "loop"}
NAMES = {"lstm": "LSTM", "gru": "GRU", "slstm": "sLSTM"}


def title_of(row: Row) -> str:
    """Return what ran a row, with its dtype where it is not bfloat16."""
    title = TITLES.get(row["way"], row["way"].replace("-", ", "))
    return title if row["dtype"] == "bfloat16" else f"{title}, {row['dtype']}"


def both_passes(rows: list[Row]) -> str:
    """Return the times of both passes, and in brackets those over our kernels'."""
    by_pass = {row["pass"]: row for row in rows}
    parts = []
    for step in ("forward", "both"):
        row = by_pass.get(step)
        if row is None:
            parts.append("-")
            continue
        own = row["way"] == "kernels" or not row["over_kernels"]
        parts.append(digits(row["median_ms"]) + ("" if own else f" ({row['over_kernels']} x)"))
    return " / ".join(parts)


def head_of(row: Row) -> str:
    """Return the channels of a head, and whether it is the only one."""
    return f"{row['head']}, dense" if row["heads"] == "1" else row["head"]


mixing = Table(
    "mixing.csv",
    "Medians in ms, forward / forward + backward, T = {T}, width 768 (512 at the "
    "head of 512), and in brackets the ratio to our kernels",
    {"cell": lambda row: NAMES[row["cell"]], "head": head_of, "B": "B"},
    {"": both_passes},
    title_of,
)
