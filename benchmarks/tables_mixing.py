"""Tables of mixing.csv: times of recurrences that mix channels inside heads, next to others'."""

from __future__ import annotations

from collections.abc import Callable

from markdown_tables import PASSES, Cell, Row, Table, Text, digits, number, read, single, size

TITLES = {
    "kernels": "pararnn",
    "layer": "pararnn",
    "layer-resets": "pararnn, resets",
    "projection": "projection alone",
    "cudnn": "cuDNN",
    "loop": "loop",
    "torchrl-triton": "torchrl, resets",
}
NAMES = {"lstm": "LSTM", "gru": "GRU", "slstm": "sLSTM", "block-gru": "block GRU"}


def is_measured(row: Row) -> bool:
    """Return True for a row with a time, False for one that says why there is none."""
    return bool(row["median_ms"])


def title_of(row: Row) -> str:
    """Return what ran a row, with its dtype where it is not bfloat16."""
    title = TITLES.get(row["way"], row["way"].replace("-", ", "))
    return title if row["dtype"] == "bfloat16" else f"{title}, {row['dtype']}"


def column_of(row: Row) -> str:
    """Return the column of a row: its title, one for all backends of flashrnn."""
    return "flashrnn" if row["way"].startswith("flashrnn") else title_of(row)


def both_passes(rows: list[Row]) -> str:
    """Return the times of both passes, and in brackets those over our kernels'.

    Of several backends the fastest of a pass, with its name.
    """
    parts = []
    for step in ("forward", "both"):
        own = [row for row in rows if row["pass"] == step and is_measured(row)]
        if not own:
            parts.append("-")
            continue
        row = min(own, key=lambda each: float(each["median_ms"]))
        flashrnn, backend = row["way"].startswith("flashrnn"), row["way"].partition("-")[2]
        ratio = row["over_kernels"] if row["way"] != "kernels" else ""
        notes = [backend] * flashrnn + [f"{ratio} x"] * bool(ratio)
        parts.append(digits(row["median_ms"]) + (f" ({', '.join(notes)})" if notes else ""))
    return " / ".join(parts)


def apart_ratios(rows: list[Row]) -> str:
    """Return what both passes of a layer take apart from its projection, over our kernels."""
    by_pass = {row["pass"]: row["apart_over_kernels"] for row in rows if row["way"] == "layer"}
    ratios = [by_pass.get(step, "") for step in ("forward", "both")]
    return " / ".join(f"{ratio} x" if ratio else "-" for ratio in ratios)


def head_of(row: Row) -> str:
    """Return the channels of a head, and whether it is the only one."""
    return f"{row['head']}, dense" if row["heads"] == "1" else row["head"]


def _of(*ways: str) -> Callable[[Row], bool]:
    return lambda row: row["way"].startswith(ways)


LINES: dict[str, str | Text] = {"cell": lambda row: NAMES[row["cell"]], "head": head_of, "B": "B"}
KERNELS = Table(
    "mixing.csv",
    "Medians in ms, forward / forward + backward, T = {T}, width 768 (512 at the "
    "head of 512), and in brackets the ratio to our kernels",
    LINES,
    {"": both_passes},
    column_of,
    where=lambda row: (
        row["T"] == "1024"
        and row["cell"] != "slstm"
        and _of("kernels", "cudnn", "loop", "flashrnn")(row)
    ),
)
LAYERS = Table(
    "mixing.csv",
    "Layers with their projection, medians in ms, forward / forward + backward, and in brackets "
    "the ratio to our kernels; last what our layer takes apart from its projection, over them",
    {**LINES, "T": "T"},
    {"": both_passes},
    column_of,
    {"apart": apart_ratios},
    where=_of("layer", "projection", "torchrl"),
)


def _with_speed_up(step: str) -> Cell:
    return single(lambda row: f"{digits(row[f'{step}_ms'])} ({row[f'{step}_speedup']} x)")


CPU = Table(
    "mixing_cpu.csv",
    "Medians in ms, and in brackets the speed-up over torch.nn, B = {B}, T = {T}, D = {D}, float32",
    {"cell": lambda row: NAMES[row["cell"]], "layer": "what"},
    {title: _with_speed_up(step) for step, title in PASSES.items()},
)


def _inference(kind: str) -> Cell:
    """Return a cell of our ms, torch.nn's and the speed-up."""
    return single(
        lambda row: (
            f"{digits(row[f'{kind}ms'])} / {digits(row[f'torch_{kind}ms'])} "
            f"({row[f'{kind}speedup']} x)"
        )
    )


def _stack_of(row: Row) -> str:
    """Return the layer, and what it has of more than one layer and direction."""
    layers = ", two layers" if row["layers"] == "2" else ""
    return NAMES[row["cell"]] + layers + (", bidirectional" * (row["bidirectional"] == "True"))


CPU_INFERENCE = Table(
    "cpu_inference.csv",
    "ms of a call without gradients, pararnn's / torch.nn's, and in brackets the speed-up, float32",
    {
        "layer": _stack_of,
        "B, T, input, D": lambda row: ", ".join(row[key] for key in ("B", "T", "input", "D")),
    },
    {"median": _inference(""), "minimum": _inference("min_")},
)
NORMS = Table(
    "norms.csv",
    "Medians in ms, float32, one head",
    {"device": "device", "cell": "cell", "B, T, D": size},
    {"forward": single(number("forward_ms")), "both": single(number("both_ms"))},
    lambda row: row["way"],
)

XLSTM = Table(
    "xlstm_layer.csv",
    "ms, medians and in brackets minima, float32, {threads} thread, xlstm {xlstm}",
    {
        "B, T, D; heads": lambda row: f"{row['B']}, {row['T']}, {row['D']}; {row['heads']}",
        "step": lambda row: PASSES[row["step"]],
    },
    {"": single(lambda row: f"{digits(row['ms'])} ({digits(row['min_ms'])})")},
    lambda row: row["layer"],
)


WORLD_MODELS = Table(
    "world_models.csv",
    "Medians in ms, float32, 8 blocks, as many variables as classes",
    {"device": "device", "layer": "cell", "B, T, D": size, "classes": "classes"},
    {"forward": single(number("forward_ms")), "both": single(number("both_ms"))},
    lambda row: row["way"],
)


def mixing() -> str:
    """Return the table of kernels, and that of layers where they have been measured."""
    rows = read("mixing.csv")
    return "\n\n".join(each() for each in (KERNELS, LAYERS) if any(map(each.where, rows)))
