"""Tables and sentences of docs/context-parallel.md: steps over two GPUs, and a model of more."""

from __future__ import annotations

import math

from common import RESULTS, read_rows
from markdown_tables import Row, hold, prose, source, table

FILE = "context.csv"
BLOCKS, WIDTH, HALO = 24, 1024, 3
"""Of the 400M GRU: blocks, channels, and tokens that a convolution reads of the rank before."""
BANDWIDTH = 50e9
"""Bytes a second of the extrapolation: a network card of 400 Gbit/s for each GPU."""
SPAN = 262_144
"""Tokens of a rank in the extrapolation, which one GPU takes alone."""


def _rows() -> list[Row]:
    return read_rows(RESULTS / FILE)


def _alone(rows: list[Row], row: Row) -> float:
    """Return the ms that one GPU takes for a rank's part, by its own steps of that kind."""
    (own,) = (
        each
        for each in rows
        if (each["gpus"], each["checkpointing"]) == ("1", row["checkpointing"])
    )
    return float(own["min_ms"]) * int(row["T"]) / int(own["T"]) / int(row["gpus"])


def context_steps() -> str:
    """Return the table of measured steps."""
    rows = _rows()
    lines = [
        (
            row["gpus"],
            f"{int(row['T']):,}",
            "yes" if row["checkpointing"] == "True" else "no",
            f"{float(row['min_ms']):,.0f} ({float(row['median_ms']):,.0f})",
            f"{int(row['T']) / float(row['min_ms']) * 1e3:,.0f}",
            row["peak_GiB"],
            f"{100 * _alone(rows, row) / float(row['min_ms']):.0f}%" if row["gpus"] != "1" else "",
        )
        for row in rows
    ]
    first = ("GPUs", "tokens of the row", "checkpointing", "step, least (median), ms")
    head = (*first, "tokens/s", "GiB a GPU", "of one GPU's speed")
    text = f"A training step of the 400M GRU on one row of tokens {source(rows, FILE)}:"
    return f"{text}\n\n{table(head, lines)}"


def _message_bytes() -> int:
    """Return the bytes that a rank sends in a step with checkpointing, to each of the others."""
    state, halo = 4 * WIDTH, 2 * WIDTH * HALO
    forward, backward = 3 * state + halo, 5 * state + halo  # guess, sizes, ends; and gradients
    return BLOCKS * (2 * forward + backward)


def context_ranks() -> str:
    """Return the extrapolation to more ranks, by the model that the page states."""
    rows = _rows()
    (double,) = (row for row in rows if (row["gpus"], int(row["T"])) == ("2", 2 * SPAN))
    alone, step = _alone(rows, double), float(double["min_ms"])
    lines = []
    for ranks in (2, 8, 64):
        own = alone + (step - alone) * math.log2(ranks)
        own += 0 if ranks == 2 else _message_bytes() * (ranks - 2) / BANDWIDTH * 1e3
        tokens = ranks * SPAN
        speed = f"{tokens / own * 1e3:,.0f}"
        kind = "measured" if ranks == 2 else "model"
        lines.append(
            (str(ranks), f"{tokens:,}", f"{own:,.0f}", speed, f"{100 * alone / own:.0f}%", kind)
        )
    head = ("ranks", "tokens of the row", "step, ms", "tokens/s", "of one GPU's speed", "")
    return table(head, lines)


def context_says() -> str:
    """Return the sentences on two GPUs."""
    rows = _rows()
    shares = {
        (row["T"], row["checkpointing"]): _alone(rows, row) / float(row["min_ms"])
        for row in rows
        if row["gpus"] == "2"
    }
    with_it = [share for (_, checkpointing), share in shares.items() if checkpointing == "True"]
    (plain,) = (share for (_, checkpointing), share in shares.items() if checkpointing == "False")
    hold(min(with_it) > 0.9 > plain, "spans of 262,144 tokens and more reach 90% on two GPUs")
    lost = [float(row["min_ms"]) - _alone(rows, row) for row in rows if row["gpus"] == "2"]
    return prose(
        f"With checkpointing, two H200s have {100 * min(with_it):.0f} to {100 * max(with_it):.0f}% "
        "of one GPU's tokens/s each. Without it, at 65,536 tokens a GPU, they have "
        f"{100 * plain:.0f}%: the step takes {min(lost):.0f} to {max(lost):.0f} ms longer in all "
        f"three cases, {min(lost) / BLOCKS:.1f} to {max(lost) / BLOCKS:.1f} ms a block, and a "
        "shorter step loses more by it."
    )
