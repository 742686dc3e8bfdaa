"""README's table: our times next to others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markdown_tables import Row, digits, prose, read, table

CONTEXT_PICTURE = "![Tokens/s and memory by context length](benchmarks/results/lm_context.png)"


class Comparison(NamedTuple):
    """Line of the table: our time and another's, in one file.

    ours, other: the values that a row has; the first row with them is used. columns: of the times.
    """

    what: str
    file: str
    ours: Row
    other: Row
    name: str
    columns: tuple[str, str] = ("median_ms", "median_ms")
    size: str = "{B}, {T}, {D}"


KERNEL = {"what": "GRUCell", "dtype": "bfloat16", "B": "32", "T": "2048", "D": "1024"}
SPLIT = {"section": "shapes", "what": "gru", "T": "65536", "D": "1024", "dtype": "float32"}
TRAINED = {"what": "lstm, layer 2", "dtype": "float32", "B": "8", "T": "2048"}
SOLVE = {"what": "gru", "T": "512", "pass": "forward"}
LAYER = {"cell": "gru", "T": "2048"}
ENGINES = ("newton_ms", "sequential_ms")
DENSE = {"head": "512", "B": "16", "pass": "both"}


def against_transformer(
    what: str, file: str, scale: str, size: str, ways: Sequence[Row] = ({}, {}), **case: str
) -> Comparison:
    """Return the line of a GRU and of the Transformer of its scale.

    ways: what a row of each has in addition to `case`.
    """
    ours, other = (
        case | {"model": f"{model}-{scale}"} | way
        for model, way in zip(("gru", "transformer"), ways, strict=True)
    )
    return Comparison(what, file, ours, other, "the Transformer", size=size)


def against_cudnn(cell: str) -> Comparison:
    """Return the line of a layer with a full recurrent matrix and of cuDNN's in float16."""
    ours, other = (
        DENSE | {"way": way, "cell": cell, "dtype": dtype}
        for way, dtype in (("layer", "bfloat16"), ("cudnn", "float16"))
    )
    name = cell.upper()
    return Comparison(
        f"`pararnn.{name}`, forward + backward, bfloat16",
        "mixing",
        ours,
        other,
        f"`torch.nn.{name}`, float16",
    )


COMPARISONS = (
    against_transformer(
        "training step of a 400M GRU on long text", "lm_context", "400M", "{B}, {T}", T="131072"
    ),
    against_transformer(
        "training step of a 1B GRU", "lm_step", "1B", "{B}, {T}", T="2048", packed="False"
    ),
    against_transformer(
        "one generated token of a 1B GRU",
        "lm_decode",
        "1B",
        "{B}, after {context}",
        ({"way": "fused", "weights": "bfloat16"}, {"way": "graph"}),
        B="1",
        context="2048",
    ),
    *map(against_cudnn, ("lstm", "gru")),
    Comparison(
        "`ParaGRU` on two CPU cores, forward + backward",
        "cpu",
        LAYER | {"what": "layer: ParaGRU"},
        LAYER | {"what": "layer: torch.nn.GRU"},
        "`torch.nn.GRU`",
        ("both_ms", "both_ms"),
    ),
    Comparison(
        "`ParaGRU`, forward",
        "paper_solve",
        SOLVE | {"way": "newton, fused", "launch": "graph"},
        SOLVE | {"way": "loop, compiled step", "launch": "call"},
        "a Python loop over a compiled step",
    ),
    Comparison(
        "GRU kernel that splits time, forward",
        "parallel",
        SPLIT | {"pass": "forward"},
        SPLIT | {"pass": "forward"},
        "our loop kernel",
        ENGINES,
    ),
    Comparison(
        "the same for a trained LSTM layer, 4 segments",
        "parallel_trained",
        TRAINED | {"pass": "forward"},
        TRAINED | {"pass": "forward"},
        "our loop kernel",
        ENGINES,
    ),
    *(
        Comparison(
            f"GRU loop kernel, {step}, bfloat16",
            "kernels",
            KERNEL | {"pass": step},
            KERNEL | {"pass": step},
            "copying its bytes",
            ("graph_ms", "limit_ms"),
        )
        for step in ("forward", "backward")
    ),
)


def line(case: Comparison) -> list[str]:
    """Return a line of the table."""
    rows = read(f"{case.file}.csv")
    ours, other = (
        next(row for row in rows if values.items() <= row.items())
        for values in (case.ours, case.other)
    )
    mine, theirs = (float(row[key]) for row, key in zip((ours, other), case.columns, strict=True))
    ratio = theirs / mine
    return [
        case.what,
        case.size.format(**ours),
        digits(mine),
        f"{case.name}: {digits(theirs)}",
        f"{digits(ratio)} x",
    ]


def performance() -> str:
    """Return README's table and picture."""
    device = read("kernels.csv")[0]["device"].removeprefix("NVIDIA ")
    cpu = read("cpu.csv")[0]["device"]
    files = ", ".join(dict.fromkeys(case.file for case in COMPARISONS))
    text = prose(
        f"Median times on an {device} (`ParaGRU` on a CPU: {cpu}). Speed-up = other / ours; "
        "below 1 ours is slower. Training steps are forward and backward, without an optimizer. "
        "`ParaGRU` has a diagonal recurrent matrix. `pararnn.GRU` and `pararnn.LSTM` have full "
        "ones as in `torch.nn`, which runs them by cuDNN on a GPU. Copying the bytes "
        "is a lower bound. "
        f"Files in `benchmarks/results/`: {files}; each row has its commit and versions."
    )
    body = table(["what", "B, T, D", "ours, ms", "other, ms", "speed-up"], map(line, COMPARISONS))
    return f"{body}\n\n{text}\n\n{CONTEXT_PICTURE}"
