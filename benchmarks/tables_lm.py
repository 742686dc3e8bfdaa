"""Tables of language models: steps, beside the paper's ratios and against the context; decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from markdown_tables import Row, figure, measured, not_yet, picture, read, source, table

PAPER_MS: dict[str, dict[str, float | None]] = {
    "400M": {"gru": 95.7, "lstm": 116, "mamba2": 115, "transformer": 81.0},
    "1B": {"gru": 192, "lstm": 235, "mamba2": 221, "transformer": 157},
    "2.9B": {"gru": 326, "lstm": 400, "mamba2": 393, "transformer": 267},
    "7B": {"gru": 613, "lstm": 715, "mamba2": None, "transformer": 520},
}
"""Table 3's ms a step; its 7B Mamba2 (9,475) does not fit the rest, and is left out."""


def lm_step() -> str:
    """Steps of language models, forward and backward, by length."""
    if not measured("lm_step.csv"):
        return not_yet("benchmarks/lm_step.py")
    rows = read("lm_step.csv")
    head = ["model", "B x T", "ms", "minimum", "tokens/s", "MFU", "GiB"]
    body = [
        [
            row["model"] + (", packed" if row["packed"] == "True" else ""),
            f"{row['B']} x {int(row['T']):,}",
            f"{float(row['median_ms']):.1f}",
            f"{float(row['min_ms']):.1f}",
            f"{int(row['tokens_per_s']):,}",
            f"{float(row['mfu_percent']):.0f}%",
            figure(row, "peak_GiB"),
        ]
        for row in rows
    ]
    repeats = ", ".join(dict.fromkeys(row["repeats"] for row in rows))
    about = source(rows, "lm_step.csv", several=True)
    return f"Medians of {repeats} steps {about}:\n\n{table(head, body)}"


Steps = tuple[str, dict[str, Row]]
"""How steps were taken, and by architecture what they took."""


def steps_of(scale: str) -> list[Steps]:
    """A scale's steps at T = 2,048, without an optimizer at 400M and 1B.

    Of train_step.csv's paths the bare loop's are taken, if the Transformer's is there: Mamba2 goes
    by no other. What lm_scale.csv has on as many GPUs stands in its place.
    """
    if scale in ("400M", "1B"):
        rows = [row for row in read("lm_step.csv") if row["packed"] == "False"]
        return [("1 GPU", at_2048(rows, scale, "model"))]
    trained = [row for row in read("train_step.csv") if row["gpus"] != "1"]
    bare = [row for row in trained if row["path"] == "bare"]
    path = "bare" if "transformer" in at_2048(bare, scale, "recipe") else "trainer"
    plain = [row for row in scaled() if row["way"] == "plain" and not row["overrides"]]
    ways = {path: [row for row in trained if row["path"] == path], "`pararnn train`": plain}
    found = {
        gpus: (f"{gpus} GPU{'s' * (gpus != '1')}, {how}", mine)
        for how, own in ways.items()
        for gpus, mine in by_gpus(own, scale).items()
        if "transformer" in mine  # or there is nothing to be beside
    }
    return [found[gpus] for gpus in sorted(found, key=int)]


def by_gpus(rows: Sequence[Row], scale: str) -> dict[str, dict[str, Row]]:
    """A scale's rows by the number of GPUs and by architecture."""
    return {
        gpus: at_2048((row for row in rows if row["gpus"] == gpus), scale, "recipe")
        for gpus in {row["gpus"] for row in rows}
    }


def at_2048(rows: Iterable[Row], scale: str, name: str) -> dict[str, Row]:
    """By architecture, the rows of a scale at the length of the paper's table."""
    mine = [row for row in rows if row["T"] == "2048"]
    ending = f"-{scale.lower()}"
    return {row[name].split("-")[0]: row for row in mine if row[name].lower().endswith(ending)}


def scaled() -> list[Row]:
    """The rows of lm_scale.csv that fitted into memory."""
    return (
        [row for row in read("lm_scale.csv") if not row["note"]] if measured("lm_scale.csv") else []
    )


def lm_ratios() -> str:
    """Steps at the paper's sizes, over the Transformer's, beside the paper's ratios."""
    if not (measured("lm_step.csv") and measured("train_step.csv")):
        return not_yet("benchmarks/lm_step.py")
    body, used = list[list[str]](), list[Row]()
    for scale, paper in PAPER_MS.items():
        for how, found in steps_of(scale):
            body += ratios(scale, how, found, paper)
            used += found.values()
    head = ["model", "on", "ms", "tokens/s", "MFU", "GiB a GPU", "over the Transformer"]
    head.append("the paper")
    about = source(used, "lm_step.csv", several=True)
    about = about.replace("csv`", "csv`, `train_step.csv` and `lm_scale.csv`")
    return f"T = 2,048 {about}:\n\n{table(head, body)}"


def ratios(
    scale: str, how: str, found: Mapping[str, Row], paper: Mapping[str, float | None]
) -> list[list[str]]:
    """Lines of steps that were taken alike, in the paper's order."""
    base, paper_base = found.get("transformer"), paper["transformer"]
    if base is None or paper_base is None:
        return []
    return [
        [
            f"{name}-{scale}",
            how,
            f"{milliseconds(found[name]):.1f}",
            f"{int(found[name]['tokens_per_s']):,}",
            f"{float(found[name]['mfu_percent']):.0f}%",
            figure(found[name], "peak_GiB"),
            f"{milliseconds(found[name]) / milliseconds(base):.2f}",
            "" if ms is None else f"{ms / paper_base:.2f}",
        ]
        for name, ms in paper.items()
        if name in found
    ]


def milliseconds(row: Row) -> float:
    """A step's time: the median, of training the mean, which its throughput is of."""
    return float(row["mean_ms"] if "mean_ms" in row else row["median_ms"])


def lm_context() -> str:
    """Tokens/s and memory against the context, and how far a model's rates lie apart."""
    name = "lm_context.csv"
    if not measured(name):
        return not_yet("benchmarks/lm_context.py")
    rows = read(name)
    lengths = sorted({int(row["T"]) for row in rows})
    body = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {int(row["T"]): row for row in rows if row["model"] == model}
        cells = [rate_and_memory(mine[length]) if length in mine else "" for length in lengths]
        rates = [int(row["tokens_per_s"]) for row in mine.values() if not row["note"]]
        apart = f"{100 * (1 - min(rates) / max(rates)):.1f}%" if rates else ""
        body.append([model, *cells, apart])
    head = ["model", *(f"T = {length:,}" for length in lengths), "slowest below fastest"]
    text = f"Tokens/s (GiB) {source(rows, name, several=True)}:"
    image = picture("lm_context", "Tokens/s and memory against the context")
    return f"{image}{text}\n\n{table(head, body)}"


def rate_and_memory(row: Row) -> str:
    """A cell of `lm_context`."""
    if row["note"]:
        return row["note"]
    memory = f" ({figure(row, 'peak_GiB')})" if row["peak_GiB"] else ""
    return f"{int(row['tokens_per_s']):,}{memory}"


def lm_decode() -> str:
    """Time of a token in decoding: a row a model, context and batch, a column a way."""
    if not measured("lm_decode.csv"):
        return not_yet("benchmarks/lm_decode.py")
    rows = read("lm_decode.csv")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    sizes = {"cache_MB": "cache, MB", "peak_GiB": "GiB"}
    known = [key for key in sizes if any(row.get(key) for row in rows)]
    body = []
    for model, context, batch in dict.fromkeys((r["model"], r["context"], r["B"]) for r in rows):
        mine = {
            row["way"]: row
            for row in rows
            if (row["model"], row["context"], row["B"]) == (model, context, batch)
        }
        times = (figure(mine[way], "median_ms") if way in mine else "" for way in ways)
        weights = figure(next(iter(mine.values())), "weights_ms")
        sizes_of = ([float(row[key]) for row in mine.values() if row[key]] for key in known)
        largest = (max(found, default=None) for found in sizes_of)
        memory = (
            "" if size is None else f"{size:,.3g}" if size < 1e3 else f"{size:,.0f}"
            for size in largest
        )
        body.append([model, f"{int(context):,}", batch, *times, weights, *memory])
    head = ["model", "context", "B", *ways, "weights read", *(sizes[key] for key in known)]
    text = f"Medians in ms {source(rows, 'lm_decode.csv', several=True)}:"
    return f"{text}\n\n{table(head, body)}"


def lm_generate() -> str:
    """The paper's Figure 3: tokens/s by the number of generated tokens."""
    name = "lm_generate.csv"
    if not measured(name):
        return not_yet("benchmarks/lm_generate.py")
    rows = read(name)
    lengths = sorted({int(row["tokens"]) for row in rows})
    body = []
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in rows):
        mine = {
            int(row["tokens"]): row for row in rows if (row["model"], row["way"]) == (model, way)
        }
        body.append([model, way, *(rate(mine[n]) if n in mine else "" for n in lengths)])
    head = ["model", "", *(f"{length:,}" for length in lengths)]
    text = (
        "Tokens/s, the least time of 5 repetitions, of fewer where a number in brackets says so "
        f"{source(rows, name, several=True)}:"
    )
    image = picture("lm_generate", "Tokens/s against the tokens that are generated")
    return f"{image}{text}\n\n{table(head, body)}"


def rate(row: Row) -> str:
    """A cell of `lm_generate`."""
    few = "" if row["repeats"] == "5" else f" ({row['repeats']})"
    return f"{float(row['tokens_per_s']):.1f}{few}"


def lm_first_text() -> str:
    """A token's time while every length is new, by the kernels that attention may take."""
    name = "lm_first_text.csv"
    if not measured(name):
        return not_yet("benchmarks/lm_first_text.py")
    rows = read(name)
    keys = ("model", "kernels", "text", "tokens", "median_ms", "max_ms")
    head = ["model", "attention's kernels", "text", "tokens", "ms a token", "most"]
    body = [[row[key] for key in keys] for row in rows]
    return f"Medians in ms {source(rows, name, several=True)}:\n\n{table(head, body)}"
