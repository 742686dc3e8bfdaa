"""Tables and sentences of docs/context-parallel.md: steps over two GPUs, and a model of more."""

from __future__ import annotations

from common import RESULTS, read_rows
from markdown_tables import Row, hold, prose, source, table

FILE, AT_ONCE = "context.csv", "context_at_once.csv"
"""Steps of ranks that solve in turn, and of an earlier commit, whose ranks solved all at once."""
PARTS = "context_parts.csv"
WIDTH, HALO = 1024, 3
"""Of the 400M GRU: channels, and tokens that a convolution reads of the rank before."""
BANDWIDTH, LATENCY = 50e9, 20e-6
"""Bytes a second and seconds of a message in the extrapolation, between hosts: 400 Gbit/s."""
SPAN = 65_536
"""Tokens of a rank in the extrapolation, which one GPU takes alone."""


def _rows(file: str = FILE) -> list[Row]:
    return read_rows(RESULTS / file)


def _alone(rows: list[Row], row: Row, column: str = "min_ms") -> float | None:
    """Return the ms that one GPU takes for a rank's part, by its own steps of that kind, if there
    are any: of as many tokens, or of a GRU, whose time is proportional to them, of others."""
    for each in rows:
        alike = all(each[key] == row[key] for key in ("recipe", "checkpointing"))
        if (
            each["gpus"] == "1"
            and alike
            and (each["T"] == row["T"] or "hybrid" not in row["recipe"])
        ):
            return float(each[column]) * int(row["T"]) / int(each["T"]) / int(row["gpus"])
    return None


def _share(rows: list[Row], row: Row, column: str = "min_ms") -> str:
    """Return the part of one GPU's speed that each of several has."""
    alone = _alone(rows, row, column)
    if row["gpus"] == "1" or alone is None:
        return ""
    return f"{100 * alone / float(row[column]):.0f}%"


def context_steps() -> str:
    """Return the table of measured steps."""
    parts = []
    for file, way in ((FILE, "in turn"), (AT_ONCE, "all at once, an earlier commit")):
        rows = _rows(file)
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


def _part_ms(name: str) -> float:
    """Return the least ms of a part of a layer."""
    (row,) = (row for row in _rows(PARTS) if row["part"] == name)
    assert int(row["span"]) == SPAN
    return float(row["min_ms"])


def context_parts() -> str:
    """Return the table of the parts of a layer on one rank."""
    rows = _rows(PARTS)
    lines = [
        (row["part"], f"{float(row['min_ms']):.2f} ({float(row['median_ms']):.2f})") for row in rows
    ]
    text = (
        f"Parts of a layer of the 400M GRU on two ranks, each with {SPAN:,} tokens "
        f"{source(rows, PARTS)}:"
    )
    return f"{text}\n\n{table(('part', 'least (median), ms'), lines)}"


def _hop_ms() -> float:
    """Return the ms by which a rank follows the one before, forward and backward."""
    message = 2 * (4 * WIDTH + 2 * WIDTH * HALO)
    return _part_ms("solve") + (4 * LATENCY + message / BANDWIDTH) * 1e3


def _two(rows: list[Row]) -> Row:
    """Return the GRU's step over two GPUs without checkpointing."""
    (row,) = (
        row
        for row in rows
        if (row["recipe"], row["gpus"], row["checkpointing"]) == ("gru-400m", "2", "False")
    )
    return row


def context_ranks() -> str:
    """Return the extrapolation to more ranks, by the model that the page states."""
    rows = _rows()
    double = _two(rows)
    alone, step = _alone(rows, double), float(double["min_ms"])
    assert alone is not None
    lines = []
    for ranks in (2, 8, 64):
        own = step + (ranks - 2) * _hop_ms()
        tokens = ranks * SPAN
        speed = f"{tokens / own * 1e3:,.0f}"
        kind = "measured" if ranks == 2 else "model"
        lines.append(
            (str(ranks), f"{tokens:,}", f"{own:,.0f}", speed, f"{100 * alone / own:.0f}%", kind)
        )
    head = ("ranks", "tokens of the row", "step, ms", "tokens/s", "of one GPU's speed", "")
    return table(head, lines)


def context_hop() -> str:
    """Return the sentence on what each rank adds in the model."""
    return prose(
        f"Each rank adds {_hop_ms():.2f} ms: {_part_ms('solve'):.2f} ms for a solve forward and "
        f"backward (above), and four messages between hosts, of "
        f"{LATENCY * 1e6:.0f} us each and {BANDWIDTH / 1e9:.0f} GB/s."
    )


def context_says() -> str:
    """Return the sentences on two GPUs."""
    rows, earlier = _rows(), _rows(AT_ONCE)
    now, older = _two(rows), _two(earlier)
    alone, alone_before = _alone(rows, now), _alone(earlier, older)
    assert alone is not None
    assert alone_before is not None
    lost, lost_before = float(now["min_ms"]) - alone, float(older["min_ms"]) - alone_before
    hold(lost < lost_before / 3, "in turn, two ranks lose less than a third of what they lost")
    return prose(
        f"Without checkpointing, at {SPAN:,} tokens a GPU, each of two H200s has "
        f"{_share(rows, now)} of one GPU's tokens/s by the least time, and "
        f"{_share(rows, now, 'median_ms')} by the median. A step takes {lost:.0f} ms longer than "
        "on one GPU; when ranks solved all at once, with a wait of the host in every layer, it "
        f"took {lost_before:.0f} ms longer."
    )


def context_hybrids() -> str:
    """Return the sentences on hybrids over two GPUs."""
    rows = _rows()
    pairs = [row for row in rows if row["recipe"] == "hybrid-400m" and row["gpus"] == "2"]
    parts = [
        f"{_share(rows, row)} at {int(row['T']):,} tokens"
        for row in pairs
        if row["checkpointing"] == "True"
    ]
    return prose(
        "A hybrid's attention takes a time that grows with the square of the row, so that its "
        "percentage is of one GPU with the same row. With checkpointing each of two H200s has, by "
        f"the least time, {' and '.join(parts)}."
    )
