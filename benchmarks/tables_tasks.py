"""Tables of the synthetic tasks."""

from __future__ import annotations

from common import RESULTS
from markdown_tables import Row, Table
from markdown_tables import table as markdown

from pararnn.lab.tasks.report import table
from pararnn.lab.tasks.results import percent, read_results, row_of

MIXERS = {
    "head-gru": "GRU",
    "head-lstm": "LSTM",
    "head-slstm": "sLSTM",
    "m2rnn": "M2RNN",
    "deltanet": "DeltaNet",
    "mamba2": "Mamba2",
    "transformer": "Transformer",
}
LENGTHS = (100, 500, 2000, 10_000)


def tasks() -> str:
    """Return the paper's Table 6 and ours."""
    results = read_results(RESULTS / "tasks" / "table6")
    sources = dict.fromkeys(
        f"{each['device']}, PyTorch {each['versions']['torch']}, commit {each['commit']}"
        for each in results
    )
    most = max(results, key=lambda result: result["steps"])
    return (
        f"({'; '.join(sources)}; `benchmarks/results/tasks/table6`):\n\n{table(results)} Most "
        f"steps of a training: {most['steps']:,} ({most['task']}, {most['mixer']})."
    )


MORE = (
    "recall",
    "bare",
    "nopos",
    "clip",
    "hop",
    "hop-layers",
    "hop-heads",
    "lengths",
    "s3",
    "dense",
    "m2rnn",
)
"""Folders of further trainings."""


def more_tasks() -> str:
    """Return a line for each task of further trainings, with a column for each model."""
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for folder in MORE:
        for result in read_results(RESULTS / "tasks" / folder):
            model, _, layers = row_of(result).partition(", ")
            line = lines.setdefault((folder, result["task"], layers.split(" ")[0] or "1"), {})
            line[model] = _best_and_worst(result["accuracies"])
            if result["lengths"]:
                length, seeds = list(result["lengths"].items())[-1]
                line[model] += f"; at {int(length):,}: {_best_and_worst(seeds)}"
    models = dict.fromkeys(model for line in lines.values() for model in line)
    body = [[*key, *(line.get(model, "") for model in models)] for key, line in lines.items()]
    return "Accuracy in percent of the best seed, in brackets that of the worst:\n\n" + markdown(
        ["folder", "task", "layers", *models], body
    )


def _best_and_worst(accuracies: list[float]) -> str:
    worst = f" ({percent(min(accuracies))})" * (len(accuracies) > 1)
    return percent(max(accuracies)) + worst


def best_rate(rows: list[Row]) -> Row:
    """Return the row of the rate that is best at the trained length, then at the longest one."""
    return max(rows, key=lambda row: [float(row[str(n)] or 0) for n in (100, 10_000)])


def _accuracies(rows: list[Row]) -> str:
    row = best_rate(rows)
    return " / ".join(percent(float(row[str(n)])) for n in LENGTHS if row[str(n)])


STATE_TRACKING = Table(
    "state_tracking.csv",
    "Accuracy in percent at T = 100 / 500 / 2,000 / 10,000, trained at 100, width {width}, one "
    "seed; of S5's cells of one layer the better of two rates",
    {
        "mixer": lambda row: MIXERS[row["mixer"]],
        "layers": "layers",
        "head": lambda row: row["head"] + ", dense" * (row["head"] == row["width"]),
    },
    {"": _accuracies},
    lambda row: row["task"].upper(),
)
