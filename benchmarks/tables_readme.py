"""README's table: our times next to others'."""

from __future__ import annotations

from typing import NamedTuple

from markdown_tables import Row, digits, read, table


class Comparison(NamedTuple):
    """Line of the table: our time and another's, in one file.

    ours, other: the values that a row has; the first row with them is used. column: of the times.
    """

    what: str
    file: str
    ours: Row
    other: Row
    name: str
    column: str = "median_ms"
    size: str = "{B}, {T}, {D}"


def against_transformer(
    what: str, file: str, scale: str, size: str, ours: Row, other: Row
) -> Comparison:
    """Return the line of a GRU and of the Transformer of its scale."""
    gru, transformer = (
        {"model": f"{model}-{scale}", **values}
        for model, values in (("gru", ours), ("transformer", other))
    )
    return Comparison(what, file, gru, transformer, "the Transformer", size=size)


STEP = {"T": "2048", "packed": "False"}
TOKEN = {"B": "1", "context": "2048"}
DENSE = {"cell": "lstm", "head": "512", "B": "16", "pass": "both"}
LAYER = {"cell": "gru", "T": "2048"}
LONG = {"T": "131072"}

COMPARISONS = (
    against_transformer(
        "training step of a 400M GRU on long text", "lm_context", "400M", "{B}, {T}", LONG, LONG
    ),
    against_transformer("training step of a 1B GRU", "lm_step", "1B", "{B}, {T}", STEP, STEP),
    against_transformer(
        "one generated token of a 1B GRU",
        "lm_decode",
        "1B",
        "{B}, after {context}",
        TOKEN | {"way": "fused", "weights": "bfloat16"},
        TOKEN | {"way": "graph"},
    ),
    Comparison(
        "`pararnn.LSTM`, forward + backward, bfloat16",
        "mixing",
        DENSE | {"way": "layer", "dtype": "bfloat16"},
        DENSE | {"way": "cudnn", "dtype": "float16"},
        "`torch.nn.LSTM`, float16",
    ),
    Comparison(
        "`ParaGRU`, forward + backward, on a CPU",
        "cpu",
        LAYER | {"what": "layer: ParaGRU"},
        LAYER | {"what": "layer: torch.nn.GRU"},
        "`torch.nn.GRU`",
        "both_ms",
    ),
)


def line(case: Comparison) -> list[str]:
    rows = read(f"{case.file}.csv")
    ours, other = (
        next(row for row in rows if values.items() <= row.items())
        for values in (case.ours, case.other)
    )
    mine, theirs = float(ours[case.column]), float(other[case.column])
    return [
        case.what,
        case.size.format(**ours),
        ours["device"],
        digits(mine),
        f"{case.name}: {digits(theirs)}",
        f"{digits(theirs / mine)} x",
        f"{case.file}.csv",
    ]


def performance() -> str:
    """Return README's table."""
    head = ("what", "B, T, D", "device", "ours, ms", "other, ms", "speed-up", "file")
    return table(head, map(line, COMPARISONS))
