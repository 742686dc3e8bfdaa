"""Tables of paper_solve.csv and paper_reduction.csv: forward passes against the length."""

from __future__ import annotations

from markdown_tables import Table, digits, read, single, source
from paper_plots import preferred_rows

LENGTHS = (1, 16, 64, 512, 2048, 4096, 32768, 65536, 131072, 4194304)


def _table(name: str) -> str:
    """Return the table of a file: least ms by length."""
    times = Table(
        name,
        "",
        {"what": "what", "way": "way", "launch": "launch"},
        {"": single(lambda row: digits(row["min_ms"]))},
        lambda row: f"T = {int(row['T']):,}",
    )
    rows = [row for row in preferred_rows(read(name)) if row["pass"] == "forward"]
    rows = [row for row in rows if int(row["T"]) in LENGTHS]
    rows.sort(key=lambda row: LENGTHS.index(int(row["T"])))
    text = f"Minima in ms, forward, B = {rows[0]['B']}, D = {rows[0]['D']}, float32"
    return f"{text} {source(rows, name)}:\n\n{times.markdown(rows)}"


def paper_solve() -> str:
    """Return the times of cells."""
    return _table("paper_solve.csv")


def paper_reduction() -> str:
    """Return the times of linear recurrences."""
    return _table("paper_reduction.csv")
