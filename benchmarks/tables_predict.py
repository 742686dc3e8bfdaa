"""Tables of the predictions of `explain` against what runs at full size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from markdown_tables import Cell, Row, Table, digits, number, single, size

FILE = "predict_cpu.csv"
TIE = 1.1


def share(right: Callable[[Row], bool], of: Callable[[Row], bool] = lambda _: True) -> Cell:
    """Return a cell with how many rows are right, of those that count."""

    def cell(rows: Sequence[Row]) -> str:
        counted = [row for row in rows if of(row)]
        return f"{sum(map(right, counted))} of {len(counted)}" if counted else ""

    return cell


def median(key: str) -> Cell:
    """Return a cell with the median of a column."""
    return lambda rows: digits(statistics.median(float(row[key]) for row in rows))


def has_sweeps(row: Row) -> bool:
    """Return True where Newton on the whole sequence ran at full size."""
    return row["sweeps"] != ""


def off(row: Row) -> int:
    """Return by how many sweeps a prediction is off."""
    return abs(int(row["predicted_sweeps"]) - int(row["sweeps"]))


PREDICT = Table(
    FILE,
    "Right predictions of layers at initialisation, trained, and with trained recurrent weights "
    "times 2 and 4, forward + backward; medians in ms of a prediction, and of all pairs (hopeless "
    "ones as predicted)",
    {"backend": "backend", "B, T, D": size},
    last_cells={
        "the fastest pair": share(lambda row: row["predicted"] == row["fastest"]),
        "within 10% of it": share(lambda row: float(row["of_fastest"]) <= TIE),
        "the rule of auto": share(lambda row: row["rule"] == row["fastest"]),
        "sweeps": share(lambda row: off(row) == 0, has_sweeps),
        "sweeps, to 2": share(lambda row: off(row) <= 2, has_sweeps),
        "convergence": share(
            lambda row: (row["converges"] == "True") == (row["mended"] == "0"), has_sweeps
        ),
        "prediction": median("prediction_ms"),
        "all pairs": median("at_full_size_ms"),
    },
    where=lambda row: row["others"] != "",
    order=lambda row: 10**6 * (row["backend"] == "auto") + int(row["T"]) + int(row["D"]),
)
PREDICT_M2RNN = Table(
    FILE,
    "M2RNN, which no pair of Newton takes; times in ms",
    {"layer": "stage", "B, T, D": size},
    {
        "nats a step": single(number("exponent", ".2f")),
        "Newton would converge": single(lambda row: {"True": "yes"}.get(row["converges"], "no")),
        "sweeps": single(lambda row: row["predicted_sweeps"]),
        "prediction": single(number("prediction_ms")),
        "the loop by kernels": single(number("at_full_size_ms")),
    },
    where=lambda row: row["cell"] == "m2rnn" and row["backend"] == "auto",
)
