"""Table of one sequence over several GPUs."""

from __future__ import annotations

from markdown_tables import Row, read, source, table

FILE = "context.csv"
"""Steps of ranks that solve one after the other."""


def _alone(rows: list[Row], row: Row) -> float | None:
    """Return the ms that one GPU takes for a rank's part, by its own steps of that kind, if there
    are any: of as many tokens, or of a GRU, whose time is proportional to them, of others."""
    for each in rows:
        alike = all(each[key] == row[key] for key in ("recipe", "checkpointing"))
        if (
            each["gpus"] == "1"
            and alike
            and (each["T"] == row["T"] or "hybrid" not in row["recipe"])
        ):
            return float(each["min_ms"]) * int(row["T"]) / int(each["T"]) / int(row["gpus"])
    return None


def _share(rows: list[Row], row: Row) -> str:
    """Return the part of one GPU's speed that each of several has."""
    alone = _alone(rows, row)
    if row["gpus"] == "1" or alone is None:
        return ""
    return f"{100 * alone / float(row['min_ms']):.0f}%"


def context_steps() -> str:
    """Return the table of measured steps."""
    rows = read(FILE)
    lines = [
        (
            row["recipe"],
            row["gpus"],
            f"{int(row['T']):,}",
            "yes" if row["checkpointing"] == "True" else "no",
            f"{float(row['min_ms']):,.0f} ({float(row['median_ms']):,.0f})",
            f"{int(row['T']) / float(row['min_ms']) * 1e3:,.0f}",
            row["peak_GiB"],
            _share(rows, row),
        )
        for row in rows
    ]
    first = ("model", "GPUs", "tokens of the row", "checkpointing", "step, least (median), ms")
    head = (*first, "tokens/s", "GiB a GPU", "of one GPU's speed")
    return f"A training step on one row {source(rows, FILE)}:\n\n{table(head, lines)}"
