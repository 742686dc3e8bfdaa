"""Tables of training on several GPUs: large models, scaling, memory, where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from lm_scale import FILE, KEYS, PROFILE, SCALES, SCALING
from markdown_tables import Row, figure, measured, not_yet, picture, read, source, table

COMMAND = "benchmarks/lm_scale.py"
GROUP = ("device", "gpus", "rows_a_gpu", "T", "overrides")
"""What models are beside each other in."""


def same(row: Row, other: Row, keys: Sequence[str]) -> bool:
    """Whether two rows agree in `keys`."""
    return all(row[key] == other[key] for key in keys)


def size_of(row: Row) -> str:
    """The size in a recipe's name."""
    return row["recipe"].partition("-")[2]


def share(row: Row) -> str:
    """MFU in percent."""
    return f"{float(row['mfu_percent']):.1f}%" if row["mfu_percent"] else ""


def over_transformer(row: Row, rows: Sequence[Row]) -> str:
    """A row's time over that of the Transformer's fastest way which fits, beside it."""
    best = [
        float(other["median_ms"])
        for other in rows
        if other["recipe"] == f"transformer-{size_of(row)}"
        and same(row, other, GROUP)
        and not other["note"]
    ]
    return f"{float(row['median_ms']) / min(best):.2f}" if best else ""


def line(row: Row, rows: Sequence[Row]) -> list[str]:
    """A row of `sizes`."""
    about = [row["recipe"], row["gpus"], f"{row['rows_a_gpu']} x {int(row['T']):,}", row["way"]]
    if row["note"]:
        return [*about, row["note"], "", "", "", "", ""]
    return [
        *about,
        f"{float(row['median_ms']):.1f}",
        f"{float(row['min_ms']):.1f}",
        f"{int(row['tokens_per_s']):,}",
        share(row),
        figure(row, "peak_GiB"),
        over_transformer(row, rows),
    ]


def lm_scale() -> str:
    """Steps of the paper's large models by `pararnn train`."""
    if not measured(FILE):
        return not_yet(COMMAND)
    rows = read(FILE)
    mine = [row for row in rows if size_of(row) != SCALING]
    mine.sort(key=lambda row: (SCALES[::-1].index(size_of(row)), int(row["T"]), int(row["gpus"])))
    head = ["recipe", "GPUs", "a GPU", "keeps", "ms", "minimum", "tokens/s", "MFU", "GiB a GPU"]
    text = f"Medians of the log's rows {source(rows, FILE, several=True)}:"
    body = table([*head, "over the Transformer"], [line(row, rows) for row in mine])
    image = picture("lm_scale", "Training at 1B by GPUs, and steps of the sizes by T")
    return f"{image}{text}\n\n{body}"


def lm_scaling() -> str:
    """Weak scaling at 1B: a step's time, and how much of a single GPU's tokens/s each keeps."""
    rows = [row for row in read(FILE) if size_of(row) == SCALING] if measured(FILE) else []
    if not rows:
        return not_yet(f"{COMMAND} --sections scaling")
    numbers = sorted({int(row["gpus"]) for row in rows})
    keys = [key for key in KEYS if key != "gpus"]
    body: list[list[str]] = []
    known: list[Row] = []
    for row in rows:
        if any(same(row, other, keys) for other in known):
            continue
        known.append(row)
        mine = {int(other["gpus"]): other for other in rows if same(row, other, keys)}
        cells = (kept(mine[count], mine.get(1)) if count in mine else "" for count in numbers)
        body.append([row["recipe"], f"{row['rows_a_gpu']} x {int(row['T']):,}", row["way"], *cells])
    head = [f"{count} GPU{'s' * (count > 1)}" for count in numbers]
    text = f"ms (tokens/s a GPU over those of one) {source(rows, FILE, several=True)}:"
    return f"{text}\n\n{table(['recipe', 'a GPU', 'keeps', *head], body)}"


def kept(row: Row, one: Row | None) -> str:
    """A cell of `lm_scaling`."""
    if row["note"]:
        return row["note"]
    time = f"{float(row['median_ms']):.1f}"
    if one is None or one["note"]:
        return time
    efficiency = int(row["tokens_per_s"]) / int(row["gpus"]) / int(one["tokens_per_s"])
    return f"{time} ({100 * efficiency:.1f}%)"


def lm_scale_memory() -> str:
    """What keeping less costs: models of which more than one way was measured."""
    rows = read(FILE) if measured(FILE) else []
    keys = [key for key in KEYS if key != "way"]
    several = [
        row
        for row in rows
        if any(same(row, other, keys) and other["way"] != row["way"] for other in rows)
    ]
    if not several:
        return not_yet(f"{COMMAND} --sections memory")
    body = []
    for row in several:
        plain = next((o for o in several if same(row, o, keys) and o["way"] == "plain"), row)
        about = [row["recipe"], row["gpus"], f"{row['rows_a_gpu']} x {int(row['T']):,}", row["way"]]
        body.append([*about, *(change(row, plain, key) for key in ("median_ms", "peak_GiB"))])
    head = ["recipe", "GPUs", "a GPU", "keeps", "ms", "GiB a GPU"]
    text = f"Over a run that keeps all, in brackets {source(several, FILE, several=True)}:"
    return f"{text}\n\n{table(head, body)}"


def change(row: Row, plain: Row, key: str) -> str:
    """A figure, and how much more or less than the plain run's it is."""
    if row["note"]:
        return row["note"] if key == "median_ms" else ""
    if row is plain or not plain[key] or not row[key]:
        return figure(row, key, 4)
    return f"{figure(row, key, 4)} ({100 * (float(row[key]) / float(plain[key]) - 1):+.1f}%)"


def lm_scale_profile() -> str:
    """Where the time of a step goes: a row a class of kernels, a column a number of GPUs."""
    if not measured(PROFILE):
        return not_yet(f"{COMMAND} --sections scaling --profile")
    rows = read(PROFILE)
    cells = {(tuple(row[key] for key in KEYS), row["class"]): alone(row) for row in rows}
    runs = {tuple(row[key] for key in KEYS): row for row in rows}
    body = [
        [kind, *(cells.get((run, kind), "") for run in runs)]
        for kind in dict.fromkeys(row["class"] for row in rows)
    ]
    head = [
        f"{row['recipe']}, T = {int(row['T']):,}, {row['gpus']} x GPU"
        + ("" if row["way"] == "plain" else f", {row['way']}")
        for row in runs.values()
    ]
    text = f"ms of rank 0 busy, in brackets with nothing else {source(rows, PROFILE, several=True)}"
    return f"{text}:\n\n{table(['kernels', *head], body)}"


def alone(row: Row) -> str:
    """A cell of `lm_scale_profile`."""
    busy, own = (f"{float(row[key]):.1f}" for key in ("busy_ms", "alone_ms"))
    return busy if busy == own else f"{busy} ({own})"


def lm_lost() -> str:
    """What a killed rank costs."""
    name = "lm_lost.csv"
    if not measured(name):
        return not_yet(f"{COMMAND} --sections lost")
    rows = read(name)
    body = [
        [
            row["recipe"],
            row["gpus"],
            row["ended_after_s"],
            row["goes_on_from"],
            row["goes_on_with"],
            f"{float(row['largest_difference']):.1e}",
        ]
        for row in rows
    ]
    head = ["recipe", "GPUs", "ended after, s", "goes on from step", "with GPUs"]
    head.append("largest difference of a loss")
    return f"A rank is killed {source(rows, name, several=True)}:\n\n{table(head, body)}"
