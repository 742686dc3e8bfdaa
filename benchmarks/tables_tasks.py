"""Tables of the synthetic tasks."""

from __future__ import annotations

from common import RESULTS
from markdown_tables import Cell, Row, Table
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
    """Return a line for each further training: its best and worst seed, at all its lengths."""
    head = ("folder", "task", "model", "rate", "steps", "seeds", "best, %", "worst, %", "by length")
    lines = [
        (
            folder,
            result["task"],
            row_of(result),
            f"{result['config']['train']['lr']:g}",
            f"{result['steps']:,}",
            str(len(result["accuracies"])),
            percent(max(result["accuracies"])),
            percent(min(result["accuracies"])),
            "; ".join(
                f"{int(length):,}: {percent(max(seeds))}"
                + f" ({percent(min(seeds))})" * (len(seeds) > 1)
                for length, seeds in result["lengths"].items()
            ),
        )
        for folder in MORE
        for result in read_results(RESULTS / "tasks" / folder)
    ]
    return markdown(head, lines)


def best_rate(rows: list[Row]) -> Row:
    """Return the row of the rate that is best at the trained length, then at the longest one."""
    return max(rows, key=lambda row: [float(row[str(n)] or 0) for n in (100, 10_000)])


def _at(length: int) -> Cell:
    def cell(rows: list[Row]) -> str:
        text = best_rate(rows)[str(length)]
        return percent(float(text)) if text else ""

    return cell


STATE_TRACKING = Table(
    "state_tracking.csv",
    "Accuracy in percent at four lengths, trained at 100, width {width}, one seed; of S5's cells "
    "of one layer the better of two rates",
    {
        "task": lambda row: row["task"].upper(),
        "mixer": lambda row: MIXERS[row["mixer"]],
        "layers": "layers",
        "head": lambda row: row["head"] + ", dense" * (row["head"] == row["width"]),
    },
    {
        "rate": lambda rows: best_rate(rows)["lr"],
        **{f"T = {length:,}": _at(length) for length in LENGTHS},
        "positions trained on": lambda rows: best_rate(rows)["horizon"],
    },
)
