"""Tables of one sequence over several GPUs: steps over two GPUs, and a model of more."""

from __future__ import annotations

from markdown_tables import Row, Table, one, read, source, table

FILE, AT_ONCE = "context.csv", "context_at_once.csv"
"""Steps of ranks that solve in turn, and of an earlier commit, whose ranks solved all at once."""
WIDTH, HALO = 1024, 3
"""Of the 400M GRU: channels, and tokens that a convolution reads of the rank before."""
BANDWIDTH, LATENCY = 50e9, 20e-6
"""Bytes a second and seconds of a message in the extrapolation, between hosts: 400 Gbit/s."""
SPAN = 65_536
"""Tokens of a rank in the extrapolation, which one GPU takes alone."""
PARTS = Table(
    "context_parts.csv",
    "Parts of a layer of the 400M GRU on two ranks, each with {span} tokens",
    {
        "part": "part",
        "least (median), ms": lambda row: (
            f"{float(row['min_ms']):.2f} ({float(row['median_ms']):.2f})"
        ),
    },
)


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
    parts = []
    for file, way in ((FILE, "in turn"), (AT_ONCE, "all at once, an earlier commit")):
        rows = read(file)
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
        text = f"A training step on one row, ranks solve {way} {source(rows, file)}:"
        parts.append(f"{text}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _hop_ms() -> float:
    """Return the ms by which a rank follows the one before, forward and backward."""
    solve = one(read(PARTS.file), part="solve", span=SPAN)
    message = 2 * (4 * WIDTH + 2 * WIDTH * HALO)
    return float(solve["min_ms"]) + (4 * LATENCY + message / BANDWIDTH) * 1e3


def context_ranks() -> str:
    """Return the extrapolation to more ranks, by the model that the page states."""
    rows = read(FILE)
    double = one(rows, recipe="gru-400m", gpus=2, checkpointing=False)
    alone, step, hop = _alone(rows, double), float(double["min_ms"]), _hop_ms()
    assert alone is not None
    lines = []
    for ranks in (2, 8, 64):
        own = step + (ranks - 2) * hop
        tokens = ranks * SPAN
        speed = f"{tokens / own * 1e3:,.0f}"
        kind = "measured" if ranks == 2 else "model"
        lines.append(
            (str(ranks), f"{tokens:,}", f"{own:,.0f}", speed, f"{100 * alone / own:.0f}%", kind)
        )
    head = ("ranks", "tokens of the row", "step, ms", "tokens/s", "of one GPU's speed", "")
    return f"A model of more ranks, each of which adds {hop:.2f} ms:\n\n{table(head, lines)}"
